"""Batches on a device, with a stand-in that copies as late as it may; tests/gpu has the same on a GPU."""

from __future__ import annotations

import gc
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice
from make_shards import write_numbers
from processes import children
from transforms import raise_on_33

from streamload import StreamLoader
from streamload.errors import TransformError
from streamload.feeder.messages import Ready
from streamload.trainer.epoch_iterator import EpochIterator

TOTAL = 60
BATCH = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("device") / "shards", [25, 35])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    late = LateDevice()
    monkeypatch.setattr("streamload.loader.device_for", lambda wanted: late if wanted == "cuda" else None)
    return late


def make(source: str, **options: Any) -> StreamLoader:
    common = {"batch_size": BATCH, "fields": ("npy", "cls"), "num_workers": 0, "prefetch_batches": 6, "device": "cuda"}
    return StreamLoader(source, **{**common, **options})


def begin(loader: StreamLoader, ready: int = 0) -> EpochIterator:
    """A pass, for which so many batches are here already."""
    begun = iter(loader)
    messages: list[Any] = []
    while sum(len(message.batches) for message in messages) < ready:
        messages.append(begun.connection.receive(30))
    begun.connection.put_back(messages)
    return begun


@pytest.mark.parametrize("late_by", [1, 4])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_batch_arrives_whole_however_late_it_is_copied(
    source: str, device: LateDevice, workers: int, late_by: int
) -> None:
    with make(source, num_workers=workers) as loader:
        for _ in range(3):
            unread: list[Any] = []
            got = []
            for batch in loader:
                unread.append(batch)
                if len(unread) == late_by:
                    got += [[device.read(tensor) for tensor in values] for values in unread]
                    unread.clear()
            got += [[device.read(tensor) for tensor in values] for values in unread]
            assert sum((labels for _, labels in got), []) == list(range(TOTAL))
            assert sum((values for values, _ in got), []) == [[number] * 3 for number in range(TOTAL)]
        assert device.waits == 0, "next() does not wait for the device"
    assert device.too_early == 0
    assert (device.ever_locked > 0) == (workers > 0)
    gc.collect()
    assert device.locked == {}


async def test_in_an_event_loop(source: str, device: LateDevice) -> None:
    async with make(source, num_workers=1) as loader:
        assert [number async for batch in loader for number in device.read(batch[1])] == list(range(TOTAL))
    assert device.too_early == 0


def test_slots_go_round(source: str, device: LateDevice) -> None:
    with make(source, num_workers=1, prefetch_batches=1) as loader:
        for _ in range(20):
            for batch in loader:
                device.read(batch[0])
        assert device.ever_locked < 40, "of 120 batches"


def test_the_batch_ahead_is_copied_but_not_given(source: str, device: LateDevice) -> None:
    with make(source) as loader:
        batches = begin(loader, ready=3)
        positions, begun = [], []
        for batch in batches:
            positions.append(loader.state_dict()["position"])
            begun.append(device.begun)
            assert device.read(batch[1])[0] == positions[-1] - BATCH
            assert loader.statistics().samples == positions[-1]
    assert positions == [10, 20, 30, 40, 50, 60]
    assert begun[:2] == [2, 3], "the second is in flight when the first is given, and so on"
    with make(source) as again:
        batches = begin(again, ready=2)
        next(batches)
        state = again.state_dict()
        assert device.begun > begun[-1] + 1
    with make(source) as resumed:
        resumed.load_state_dict(state)
        assert device.read(next(iter(resumed))[1])[0] == 10


def test_the_next_epoch_that_was_begun_ahead_is_not_lost(source: str, device: LateDevice) -> None:
    with make(source, num_workers=1, prefetch_batches=20) as loader:
        batches = iter(loader)
        messages: list[Any] = []
        while not any(isinstance(message, Ready) and message.last for message in messages[:-1]):
            messages.append(batches.connection.receive(30))
        batches.connection.put_back(messages)
        assert [number for batch in batches for number in device.read(batch[1])] == list(range(TOTAL))
        assert [number for batch in loader for number in device.read(batch[1])] == list(range(TOTAL))


def test_a_pass_that_is_left_gives_everything_back(source: str, device: LateDevice) -> None:
    loader = make(source, num_workers=1)
    batches = begin(loader, ready=1)
    given = next(batches)
    assert len(device.stream) > 0
    del batches
    assert len(device.stream) == 0, "it was waited for before memory was freed"
    assert device.too_early == 0
    assert device.read(given[1]) == list(range(10)), "what was given stays"
    loader.close()
    gc.collect()
    assert device.locked == {}


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_the_end_of_the_loader_waits_for_the_last_copies(source: str, device: LateDevice, how: str) -> None:
    loader = make(source)
    last = list(loader)[-1]
    assert len(device.stream) > 0
    if how == "closed":
        loader.close()
    else:
        del loader
        gc.collect()
    assert len(device.stream) == 0
    assert device.too_early == 0
    assert device.read(last[1]) == list(range(50, 60))


def test_a_bad_sample_is_raised_when_all_before_it_were_given(source: str, device: LateDevice) -> None:
    with make(source, fields=("cls",), transform={"cls": raise_on_33}) as loader:
        batches = begin(loader, ready=4)
        got = []
        with pytest.raises(TransformError):
            for batch in batches:
                got += device.read(batch[0])
        assert got == list(range(30))
        assert loader.state_dict()["position"] == 30
        assert len(device.stream) == 0
    assert device.too_early == 0


def test_samples_count_as_skipped_when_their_batch_is_given(source: str, device: LateDevice) -> None:
    with make(source, fields=("cls",), transform={"cls": raise_on_33}, on_error="skip") as loader:
        skipped = []
        for batch in begin(loader, ready=4):
            assert len(device.read(batch[0])) == (9 if len(skipped) == 3 else 10)
            skipped.append(len(loader.skipped))
    assert skipped == [0, 0, 0, 1, 1, 1]


def test_no_room_on_the_device_for_the_batch_ahead(source: str, device: LateDevice) -> None:
    device.fails_at = 2
    with make(source) as loader:
        batches = begin(loader, ready=3)
        assert device.read(next(batches)[1])[0] == 0
        assert device.begun == 2
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        assert loader.state_dict()["position"] == 10
        assert [device.read(batch[1])[0] for batch in loader] == [10, 20, 30, 40, 50], "and it goes on from there"


@pytest.mark.exhaustive
def test_what_was_copied_ahead_when_the_feeder_dies_is_neither_lost_nor_given_twice(
    source: str, device: LateDevice
) -> None:
    with make(source, num_workers=1, batch_size=2, prefetch_batches=1, collate_fn=collate_late) as loader:
        batches = begin(loader, ready=2)
        got = [device.read(next(batches)["label"])[0]]
        assert device.begun == 2
        (feeder,) = children("streamload.feeder")
        feeder.send_signal(signal.SIGKILL)
        feeder.wait(10)
        got += [device.read(batch["label"])[0] for batch in batches]
        assert loader.statistics().restarted_workers == 1
    assert got == list(range(0, TOTAL, 2))
    assert device.too_early == 0


def collate_late(samples: list[Any]) -> dict[str, Any]:
    """Slowly, behind the first few batches: so most of them are not made yet when their feeder is killed."""
    if samples[0][1] > 20:
        time.sleep(0.05)
    return collate(samples)


def collate(samples: list[Any]) -> dict[str, Any]:
    labels = [label for _, label in samples]
    return {
        "label": torch.tensor(labels),
        "names": [str(label) for label in labels],
        "ragged": [torch.full((label % 4,), label) for label in labels],
        "pair": (len(labels), np.array(labels)),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_collate_fn_makes(source: str, device: LateDevice, workers: int) -> None:
    with make(source, num_workers=workers, collate_fn=collate) as loader:
        for number, batch in enumerate(loader):
            labels = list(range(number * BATCH, (number + 1) * BATCH))
            assert device.read(batch["label"]) == labels
            assert batch["names"] == [str(label) for label in labels]
            assert [device.read(tensor) for tensor in batch["ragged"]] == [[label] * (label % 4) for label in labels]
            assert batch["pair"][0] == BATCH
            assert batch["pair"][1].tolist() == labels, "an array stays on the host"
        assert device.waits == 0
    assert device.too_early == 0


def test_dicts_with_keys_and_rows_of_other_dtypes(source: str, device: LateDevice) -> None:
    def alternate(sample: dict[str, Any]) -> dict[str, Any]:
        kind = np.float32 if sample["cls"] >= 30 else np.int64
        return {**sample, "npy": sample["npy"].astype(kind)}

    with make(source, fields=None, transform=alternate) as loader:
        for number, batch in enumerate(loader):
            assert batch["__key__"][0] == f"{number * BATCH:06d}"
            assert device.read(batch["npy"])[0] == [number * BATCH] * 3
            assert batch["npy"].dtype == (torch.float32 if number >= 3 else torch.int64)


def test_without_a_device_nothing_is_copied(source: str, device: LateDevice) -> None:
    with make(source, device="cpu") as loader:
        assert [int(batch[1][0]) for batch in loader] == [0, 10, 20, 30, 40, 50]
    assert device.begun == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="device='cuda', but torch sees no CUDA device"):
        StreamLoader(source, device="cuda")
