"""Page-locked batches and those on a device, with a CUDA that copies late; tests/gpu has the same on a GPU."""

from __future__ import annotations

import gc
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from late_cuda import LateCuda
from make_shards import write_numbers
from matrix import exhaustive
from transforms import raise_on_33, slow

from streamload import StreamLoader
from streamload.errors import TransformError
from streamload.trainer.epoch_iterator import EpochIterator

BATCH = 10


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    return LateCuda(monkeypatch)


def make(source: str, **options: Any) -> StreamLoader:
    common = {"batch_size": BATCH, "fields": ("npy", "cls"), "num_workers": 0, "prefetch_batches": 6, "device": "cuda"}
    return StreamLoader(source, **{**common, **options})


def begin(loader: StreamLoader, ready: int = 0) -> EpochIterator:
    """A pass, for which so many batches are here already."""
    begun = iter(loader)
    messages: list[Any] = []
    while sum(len(message.batches) for message in messages) < ready:
        messages.append(begun.connection.receive(30))
    for message in reversed(messages):
        begun.connection.messages.appendleft(message)
    return begun


def test_the_batch_ahead_is_copied_but_not_given(source: str, cuda: LateCuda) -> None:
    with make(source) as loader:
        batches = begin(loader, ready=3)
        positions, begun = [], []
        for batch in batches:
            positions.append(loader.state_dict()["position"])
            begun.append(cuda.begun)
            assert cuda.read(batch[1])[0] == positions[-1] - BATCH
            assert loader.statistics().samples == positions[-1]
    assert positions == [10, 20, 30, 40, 50, 60]
    assert begun[:2] == [4, 6], "the second is in flight when the first is given, and so on"
    with make(source) as again:
        batches = begin(again, ready=2)
        next(batches)
        state = again.state_dict()
        assert cuda.begun > begun[-1] + 2
    with make(source) as resumed:
        resumed.load_state_dict(state)
        assert cuda.read(next(iter(resumed))[1])[0] == 10


@pytest.mark.parametrize("device", [exhaustive((None,)), "cuda"])
def test_the_end_waits_for_copies_before_it_unlocks(source: str, cuda: LateCuda, device: str | None) -> None:
    loader = make(source, num_workers=1, device=device)
    batches = begin(loader, ready=1)
    labels = next(batches)[1]
    if device is None:
        labels = labels.to("cuda", non_blocking=True)
    del batches
    assert cuda.queued() >= (2 if device else 1), "it was left without waiting"
    assert cuda.waits == 0
    loader.close()
    gc.collect()
    assert cuda.locked == {}
    assert cuda.queued() == 0
    assert cuda.too_early == 0
    assert labels.tolist() == list(range(10))


def test_a_bad_sample_is_raised_when_all_before_it_were_given(source: str, cuda: LateCuda) -> None:
    with make(source, fields=("cls",), transform={"cls": raise_on_33}) as loader:
        batches = begin(loader, ready=4)
        got = []
        with pytest.raises(TransformError):
            for batch in batches:
                got += cuda.read(batch[0])
        assert got == list(range(30))
        assert loader.state_dict()["position"] == 30
    assert cuda.too_early == 0


def test_no_room_on_the_device_for_the_batch_ahead(source: str, cuda: LateCuda) -> None:
    cuda.fails_at = 3
    with make(source) as loader:
        batches = begin(loader, ready=3)
        assert cuda.read(next(batches)[1])[0] == 0
        assert cuda.begun == 3
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        assert loader.state_dict()["position"] == 10
        assert [cuda.read(batch[1])[0] for batch in loader] == [10, 20, 30, 40, 50], "and it goes on from there"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="device='cuda', but torch sees no CUDA device"):
        StreamLoader(source, device="cuda")


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_slot_is_filled_again_only_after_late_copies(tmp_path: Path, cuda: LateCuda, device: str | None) -> None:
    """Copies that the loop queues with `.to`, and those of `device=`, for a fast and a slow loop."""
    source = write_numbers(tmp_path / "shards", [100, 156], width=50)
    options = {"batch_size": 4, "num_workers": 2, "prefetch_batches": 1, "transform": {"npy": slow}, "device": device}
    wrong: dict[tuple[int, float], int] = {}
    numbers: list[int] = []
    with make(source, **options) as loader:
        for late_by, pause_s in ((1, 0.01), (4, 0)):
            queued: deque[tuple[Any, Any, Any]] = deque()
            copied: list[tuple[Any, Any]] = []
            for values, labels in loader:
                if device is None:
                    values, labels = (tensor.to("cuda", non_blocking=True) for tensor in (values, labels))
                queued.append((torch.cuda.current_stream().record_event(), values, labels))
                del values, labels
                time.sleep(pause_s)
                if len(queued) > late_by:
                    event, *batch = queued.popleft()
                    event.run()
                    copied.append(tuple(batch))
            cuda.run()
            copied += [(values, labels) for _, values, labels in queued]
            wrong[late_by, pause_s] = sum(bool((values != labels[:, None]).any()) for values, labels in copied)
            numbers += [int(label) for _, labels in copied for label in labels]
        assert cuda.ever_locked < 2 * 64, "slots go round"
        assert cuda.waits == 0, "next() does not wait for the device"
    gc.collect()
    assert cuda.locked == {}
    assert wrong == dict.fromkeys(wrong, 0)
    assert numbers == 2 * list(range(256))
    assert cuda.too_early == 0


def test_a_context_is_made_for_the_first_batch_and_on_no_other_device(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the program sets its device or names it in `.to`."""
    cuda = LateCuda(monkeypatch, devices=3)
    with make(source, num_workers=1, device=None) as loader:
        assert len(loader) == 6
        batches = iter(loader)
        assert not torch.cuda.is_initialized()
        torch.cuda.set_device(2)
        next(batches)
        assert cuda.contexts == {2}
        del batches
    cuda = LateCuda(monkeypatch, devices=3)
    model = torch.ones(1).to("cuda:1")
    with make(source, num_workers=1, device=None) as loader:
        for values, _ in loader:
            values.to("cuda:1", non_blocking=True)
    assert cuda.contexts == {1}
    assert model.numel() == 1
