"""When two batches are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def assert_same(ours: Any, theirs: Any) -> None:
    """The same structure, types, dtypes, shapes and values."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (
            torch.equal(ours.nan_to_num(), theirs.nan_to_num())
            if ours.is_floating_point()
            else (
                torch.equal(torch.view_as_real(ours).nan_to_num(), torch.view_as_real(theirs).nan_to_num())
                if ours.is_complex()
                else bool((ours.numpy() == theirs.numpy()).all())
            )
        )
    elif isinstance(ours, Mapping):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    elif isinstance(ours, np.ndarray | np.generic):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes() or (ours == theirs).all()
    else:
        assert ours == theirs
