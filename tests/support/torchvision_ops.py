"""Import torchvision beside a torch for CPUs, with which PyPI's torchvision cannot load its compiled operators."""

from __future__ import annotations

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):  # importing torchvision registers more about these two; no transform calls them
    if not hasattr(torch.ops.torchvision, name):
        _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision import tv_tensors  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

__all__ = ["tv_tensors", "v2"]
