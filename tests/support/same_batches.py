"""When two batches are the same, and what all ranks get together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from streamload import StreamLoader


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


def global_batches(
    urls: Any, world_size: int, size: int, state: dict[str, Any] | None = None, **options: Any
) -> list[list[int]]:
    """The global batches of a pass over the first field, each as the sorted samples of all ranks."""
    ranks = []
    for rank in range(world_size):
        with StreamLoader(urls, size // world_size, **options, rank=rank, world_size=world_size) as loader:
            if state is not None:
                loader.load_state_dict(state)
            ranks.append([batch[0].tolist() for batch in loader])
    return [sorted(sum(slices, [])) for slices in zip_longest(*ranks, fillvalue=[])]
