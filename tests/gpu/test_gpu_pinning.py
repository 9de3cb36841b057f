"""Pinned slots on a real GPU; tests/test_loader_device.py has the same with a stand-in for CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_shards import write_numbers

from streamload import StreamLoader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("busy_cycles", [0, 20_000_000])
def test_a_slot_is_filled_again_only_after_its_copies(tmp_path: Path, busy_cycles: int) -> None:
    """The host never waits, so copies run late: by about ten milliseconds for each batch where the device is busy."""
    source = write_numbers(tmp_path / "shards", [1280], width=5000)
    with StreamLoader(source, 20, fields=("npy", "cls"), num_workers=2, prefetch_batches=1) as loader:
        for _ in range(3):
            wrong, numbers = [], []
            for values, labels in loader:
                assert values.is_pinned()
                torch.cuda._sleep(busy_cycles)
                values, labels = (tensor.to("cuda", non_blocking=True) for tensor in (values, labels))
                wrong.append((values != labels[:, None]).sum())
                numbers.append(labels)
            assert int(torch.stack(wrong).sum()) == 0
            assert torch.cat(numbers).tolist() == list(range(1280))


def test_memory_is_unlocked_after_its_copies(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [40], width=5000)
    with StreamLoader(source, 20, fields=("npy", "cls"), num_workers=1) as loader:
        torch.cuda._sleep(20_000_000)
        copies = [[tensor.to("cuda", non_blocking=True) for tensor in batch] for batch in loader]
    assert sum(int((values != labels[:, None]).sum()) for values, labels in copies) == 0
