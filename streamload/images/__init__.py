"""Image operations on arrays for `transform=`, and decoders of image files."""

from __future__ import annotations

from streamload.images.files import grey, palette, unchanged
from streamload.images.operations import (
    CenterCrop,
    Compose,
    Joint,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    ToTensor,
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
