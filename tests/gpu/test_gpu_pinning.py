"""Pinned slots on a real GPU; tests/batch has the same with a stand-in for the CUDA runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_shards import write_numbers

from streamload import StreamLoader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def test_batches_are_page_locked_and_copied_without_blocking(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [400], width=1000)
    with StreamLoader(source, 50, fields=("npy", "cls"), num_workers=2, pin_memory=True) as loader:
        for values, labels in loader:
            assert values.is_pinned()
            on_device = values.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert on_device[:, 0].cpu().tolist() == labels.tolist()


def test_pinning_can_be_turned_off(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [10])
    with StreamLoader(source, 5, fields=("npy",), num_workers=1, pin_memory=False) as loader:
        assert not next(iter(loader))[0].is_pinned()
