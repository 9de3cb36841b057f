"""`device=` on a real GPU; tests/test_loader_device.py has the same with a stand-in that copies as late as it may."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from make_shards import write_numbers

from streamload import StreamLoader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

TOTAL = 400
BATCH = 20
BUSY_CYCLES = 20_000_000
"""About ten milliseconds."""


@pytest.fixture(scope="session", autouse=True)
def cuda_has_begun() -> None:
    """What CUDA opens once for a process, and keeps, is opened first, so that no test seems to leave it."""
    if torch.cuda.is_available():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.ones(1000).pin_memory().to("cuda", non_blocking=True).sum()
            torch.mm(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
        torch.cuda.synchronize()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("gpu") / "shards", [150, 250], width=5000)


def make(source: str, **options: Any) -> StreamLoader:
    common = {"batch_size": BATCH, "fields": ("npy", "cls"), "num_workers": 2, "device": "cuda"}
    return StreamLoader(source, **{**common, **options})


def check(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """0 on the device if all is as it should be; the device is not waited for."""
    return (values != labels[:, None]).sum()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_there_and_right(source: str, workers: int) -> None:
    here = torch.device("cuda", torch.cuda.current_device())
    with make(source, num_workers=workers) as loader:
        for _ in range(3):
            numbers, wrong = [], []
            for values, labels in loader:
                assert values.device == labels.device == here
                wrong.append(check(values, labels))
                numbers.append(labels)
            assert int(torch.stack(wrong).sum()) == 0
            assert torch.cat(numbers).tolist() == list(range(TOTAL))


def test_the_loop_runs_ahead_of_a_busy_device(source: str) -> None:
    """Memory on the device must not be used again while work that is queued will read it."""
    with make(source) as loader:
        for _ in range(2):
            wrong = []
            for values, labels in loader:
                torch.cuda._sleep(BUSY_CYCLES)
                wrong.append(check(values, labels))
                del values, labels
            assert int(torch.stack(wrong).sum()) == 0


def test_on_a_stream_of_the_users_own(source: str) -> None:
    stream = torch.cuda.Stream()
    with make(source) as loader, torch.cuda.stream(stream):
        wrong = []
        for values, labels in loader:
            torch.cuda._sleep(BUSY_CYCLES // 10)
            wrong.append(check(values, labels))
        total = torch.stack(wrong).sum()
        assert int(total) == 0


def test_left_early_and_begun_again(source: str) -> None:
    with make(source) as loader:
        for steps in (1, 3, 0):
            for step, (values, labels) in enumerate(loader):
                if step == steps:
                    break
            assert int(check(values, labels)) == 0
            assert loader.state_dict()["position"] == (steps + 1) * BATCH
    gc.collect()
    torch.cuda.synchronize()
    assert int(check(values, labels)) == 0, "what was given stays when the loader is closed"


# -- page-locked memory that the loop copies by itself ---------------------------------------------------------------


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
