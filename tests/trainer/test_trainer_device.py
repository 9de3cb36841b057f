"""Moving batches to a device: what moves, when it may be used, and when the host's memory is free again."""

from __future__ import annotations

import os
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from late_cuda import LateCuda

from streamload.memory.slots import SlotPool, SlotReader
from streamload.trainer.device import Cuda, device_for, map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


class Described(UserDict[str, Any]):
    """A mapping with something besides its items."""

    note = ""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    return LateCuda(monkeypatch)


def test_tensors_move_and_all_else_stays(cuda: LateCuda) -> None:
    array, thing = np.arange(3), object()
    described = Described({"x": torch.tensor([1, 2])})
    described.note = "kept"
    batch = {
        "image": torch.ones(2, 3),
        "names": ["a", "b"],
        "pair": Pair(torch.tensor(1), b"bytes"),
        "nest": (1, None, [torch.tensor([2.5]), {"deep": torch.tensor([True])}]),
        "ragged": [torch.arange(2), torch.arange(0), torch.arange(5)],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "array": array,
        "thing": thing,
        "ordered": OrderedDict(b=torch.tensor(3), a="text"),
        "described": described,
    }
    moved = Cuda(torch.device("cuda")).move(batch)()
    cuda.run()
    assert moved["array"] is array
    assert moved["thing"] is thing
    assert moved["names"] == ["a", "b"]
    assert (type(moved["pair"]), moved["pair"].right, int(moved["pair"].left)) == (Pair, b"bytes", 1)
    assert type(moved["nest"]) is tuple
    assert moved["nest"][2][1]["deep"].tolist() == [True]
    assert [value.tolist() for value in moved["ragged"]] == [[0, 1], [], [0, 1, 2, 3, 4]]
    assert moved["half"].dtype == torch.bfloat16
    assert list(moved["ordered"]) == ["b", "a"]
    assert type(moved["ordered"]) is OrderedDict
    assert (type(moved["described"]), moved["described"].note) == (Described, "kept")
    found: list[torch.Tensor] = []
    map_tensors(moved, found.append)  # type: ignore[arg-type]
    assert len(found) == cuda.begun == 10
    assert torch.equal(batch["image"], torch.ones(2, 3)), "the batch itself is as it was"


def test_a_sparse_tensor_is_copied_on_the_stream_of_the_caller(cuda: LateCuda) -> None:
    moved = Cuda(torch.device("cuda")).move([torch.eye(2).to_sparse(), torch.ones(1)])()
    assert [cuda.copied_on(tensor) is torch.cuda.current_stream() for tensor in moved] == [True, False]


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool()
    yield pool
    pool.close()


def lease(pool: SlotPool, reader: SlotReader, slot: int) -> torch.Tensor:
    """A delivered batch of ones."""
    if pool.announce(slot, 64):
        reader.add(slot, pool.descriptors[slot])
    pool.record_taken(1)
    memory = reader.lease(slot)
    memory[:] = 1
    return torch.from_numpy(memory[:8])


def test_copies_to_every_device_in_use_are_waited_for(monkeypatch: pytest.MonkeyPatch, pool: SlotPool) -> None:
    cuda = LateCuda(monkeypatch, devices=3)
    ours = Cuda()
    reader = SlotReader(ours.lock, ours.fence)
    slot = pool.take()
    lease(pool, reader, slot).to("cuda:2", non_blocking=True)
    assert reader.take_released() == ()
    torch.cuda.current_stream(0).run()  # type: ignore[attr-defined]
    assert reader.take_released() == ()
    torch.cuda.current_stream(2).run()  # type: ignore[attr-defined]
    assert reader.take_released() == (slot,)
    assert cuda.contexts == {0, 2}
    reader.close()


def test_a_slot_that_grows_is_locked_again(cuda: LateCuda, pool: SlotPool) -> None:
    reader = SlotReader(Cuda().lock)
    slot = pool.take()
    kept = lease(pool, reader, slot)
    os.ftruncate(pool.descriptors[slot], 12_288)
    reader.add(slot, pool.descriptors[slot])
    reader.lease(slot)
    assert list(cuda.locked.values()) == [4096, 12288], "the old mapping lives on under the kept batch"
    del kept
    assert list(cuda.locked.values()) == [12288]
    reader.close()
    assert cuda.locked == {}


def test_memory_that_cuda_refuses_is_never_unlocked(cuda: LateCuda, pool: SlotPool) -> None:
    cuda.refuses = 2
    reader = SlotReader(Cuda().lock)
    lease(pool, reader, pool.take())
    reader.close()
    assert cuda.ever_locked == 0


# -- what `device=` may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "device='mps' must be a CUDA device, \"cpu\" or None; .* .to\\('mps'\\)"),
        (torch.device("meta"), "must be a CUDA device"),
        ("gpu0", "device='gpu0' is not a device"),
        (True, "device=True is not a device"),
        (1.0, "device=1.0 is not a device"),
        (-1, "device=-1 is not a device"),
        ("cuda:2", "device='cuda:2', but torch sees 2 CUDA devices, counted from 0"),
        (2, "device=2, but torch sees 2 CUDA devices"),
    ],
)
def test_wrong_devices_are_refused(device: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        device_for(device)
    assert device_for(None) is device_for(torch.device("cpu")) is None
    assert device_for("cuda") == torch.device("cuda")
    assert device_for(1) == device_for(torch.device("cuda:1")) == torch.device("cuda:1")
