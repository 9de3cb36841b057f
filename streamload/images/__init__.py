"""Image operations for `transform=`, on arrays; and reading image files, which the decoders use."""

from __future__ import annotations

from streamload.images.decoders import grey, palette, unchanged
from streamload.images.floats import Normalize, ToFloat, ToTensor
from streamload.images.joint import Joint
from streamload.images.operations import (
    CenterCrop,
    Compose,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

__all__ = [
    "CenterCrop",
    "Compose",
    "Joint",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Resize",
    "ToFloat",
    "ToTensor",
    "grey",
    "palette",
    "unchanged",
]
