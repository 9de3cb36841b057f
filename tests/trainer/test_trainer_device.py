"""Moving batches to a device: what moves, when it may be used, and when the host's memory is free again."""

from __future__ import annotations

import gc
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from late_device import LateDevice

from streamload.memory.slots import SlotPool, SlotReader
from streamload.trainer.device import CudaDevice, Mover, device_for, map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


class Described(UserDict[str, Any]):
    """A mapping with something besides its items."""

    note = ""


def test_tensors_move_and_all_else_stays() -> None:
    device = LateDevice()
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
    moved = Mover(device).begin(batch).give()
    device.run()
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
    found: list[int] = []

    def find(tensor: torch.Tensor) -> torch.Tensor:
        found.append(id(tensor))
        return tensor

    map_tensors(moved, find)
    assert len(found) == 10
    assert set(found) == device.of.keys()
    assert torch.equal(batch["image"], torch.ones(2, 3)), "the batch itself is as it was"


@pytest.mark.parametrize("batch", [None, "text", [], {}, (1, 2), {"a": [b"bytes"]}])
def test_a_batch_without_tensors_passes(batch: Any) -> None:
    mover = Mover(LateDevice())
    assert mover.begin(batch).give() == batch


@contextmanager
def slots() -> Iterator[tuple[SlotPool, SlotReader]]:
    pool, reader = SlotPool(), SlotReader()
    yield pool, reader
    reader.close()
    pool.close()


def lease(pool: SlotPool, reader: SlotReader, value: int) -> torch.Tensor:
    slot = pool.take(64)
    reader.add(slot, pool.descriptor(slot))
    memory = reader.lease(slot)
    memory[:] = value
    return torch.from_numpy(memory[:8])


def test_a_slot_is_released_when_its_copy_is_done_and_not_before() -> None:
    device = LateDevice()
    mover = Mover(device)
    with slots() as (pool, reader):
        moving = [mover.begin({"x": lease(pool, reader, value)}) for value in (1, 2, 3)]
        given = moving[0].give()
        mover.finish()
        assert reader.released == []
        assert device.read(given["x"]) == [1] * 8
        assert reader.released == [], "nobody has asked yet"
        mover.finish()
        assert reader.released == [0]
        device.run()
        mover.finish()
        assert reader.released == [0, 1, 2]
        assert device.waits == 0
        assert [device.read(batch.give()["x"])[0] for batch in moving[1:]] == [2, 3]
    assert device.too_early == 0


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_copies_in_flight_at_the_end_are_waited_for(how: str) -> None:
    device = LateDevice()
    mover = Mover(device)
    with slots() as (pool, reader):
        for value in (1, 2):
            mover.begin([lease(pool, reader, value)])
        if how == "closed":
            mover.close()
            mover.close()
        else:
            del mover
        assert sorted(reader.released) == [0, 1]
    assert device.too_early == 0
    assert device.waits == 2


def test_a_batch_without_room_on_the_device_frees_what_was_copied() -> None:
    mover = Mover(LateDevice(fails_at=1))
    with slots() as (pool, reader):
        with pytest.raises(RuntimeError, match="out of memory"):
            mover.begin([lease(pool, reader, 1)])
        gc.collect()  # the traceback refers to itself
        assert reader.released == [0]


# -- what `device=` may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_host_is_no_device(device: Any) -> None:
    assert device_for(device) is None


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("mps", ValueError, "device='mps' must be a CUDA device, \"cpu\" or None; .* .to\\('mps'\\)"),
        (torch.device("meta"), ValueError, "must be a CUDA device"),
        ("gpu0", ValueError, "device='gpu0' is no device"),
        (True, TypeError, "device=True must be"),
        (1.0, TypeError, "device=1.0 must be"),
        (-1, ValueError, "device=-1 must be"),
        ("cuda:2", ValueError, "device='cuda:2', but torch sees 2 CUDA devices, counted from 0"),
        (2, ValueError, "device=2, but torch sees 2 CUDA devices"),
    ],
)
def test_wrong_devices_are_refused(
    device: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(error, match=message):
        device_for(device)
    assert isinstance(device_for("cuda"), CudaDevice)
    assert isinstance(device_for(1), CudaDevice)
    assert isinstance(device_for(torch.device("cuda:1")), CudaDevice)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_without_cuda_that_is_said(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="but torch sees no CUDA device here"):
        device_for(device)


# -- the calls of torch.cuda, on a torch.cuda that only writes them down --------------------------------------------


class Written:
    """torch.cuda's streams and events, as far as they are used, and tensors that say what is done to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.inside: list[str] = []
        self.full = False
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(self, f"own {device}"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: _Event(self))
        monkeypatch.setattr(torch.cuda, "stream", self._within)
        monkeypatch.setattr(torch.cuda, "device", self._within)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream(self, f"current {device}"))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    @contextmanager
    def _within(self, what: Any) -> Iterator[None]:
        self.inside.append(str(what))
        yield
        self.inside.pop()


class _Stream:
    def __init__(self, written: Written, name: str) -> None:
        self.written, self.name = written, name

    def __str__(self) -> str:
        return self.name

    def wait_event(self, event: _Event) -> None:
        self.written.log.append(f"{self} waits for {event.recorded_on}")

    def synchronize(self) -> None:
        self.written.log.append(f"host waits for {self}")


class _Event:
    recorded_on = ""

    def __init__(self, written: Written) -> None:
        self.written = written

    def record(self, stream: _Stream) -> None:
        self.recorded_on = str(stream)
        self.written.log.append(f"event on {stream}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.written.log.append("host waits for event")


class _Tensor:
    layout = torch.strided
    is_nested = False

    def __init__(self, written: Written, name: str, device: str = "cpu") -> None:
        self.written, self.name, self.device = written, name, torch.device(device)

    def __str__(self) -> str:
        return self.name

    def to(self, device: torch.device, non_blocking: bool = False) -> _Tensor:
        if self.written.full and self.name == "b":
            raise RuntimeError("out of memory")
        how = "non-blocking" if non_blocking else "blocking"
        self.written.log.append(f"{self.name} to {device} {how} within {self.written.inside}")
        copy = _Tensor(self.written, f"{self.name}'", str(device))
        copy.layout = self.layout
        return copy

    def record_stream(self, stream: _Stream) -> None:
        self.written.log.append(f"{self.name} used on {stream}")


def test_cuda_is_called_in_the_right_order(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch)
    device = CudaDevice(torch.device("cuda"))
    sparse = _Tensor(written, "s")
    sparse.layout = torch.sparse_coo
    tensors: Any = [_Tensor(written, "a"), sparse, _Tensor(written, "b")]
    copies, copying = device.begin(tensors)
    assert [str(copy) for copy in copies] == ["a'", "s'", "b'"]
    assert written.log == [
        "s to cuda:1 blocking within []",
        "a to cuda:1 non-blocking within ['own cuda:1']",
        "b to cuda:1 non-blocking within ['own cuda:1']",
        "event on own cuda:1",
    ]
    written.log.clear()
    assert copying.passed()
    copying.give(copies)
    assert written.log == [
        "current cuda:1 waits for own cuda:1",
        "a' used on current cuda:1",
        "b' used on current cuda:1",
    ]
    copying.wait()
    assert written.log[-1] == "host waits for event"


def test_when_cuda_fails_what_was_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch)
    written.full = True
    tensors: Any = [_Tensor(written, "a"), _Tensor(written, "b")]
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaDevice(torch.device("cuda:0")).begin(tensors)
    assert written.log[-1] == "host waits for own cuda:0"


def test_memory_is_locked_for_the_device_that_it_is_copied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(monkeypatch)

    class Runtime:
        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            written.log.append(f"lock {address} {size_bytes} {flags} within {written.inside}")
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            written.log.append(f"unlock {address} within {written.inside}")
            return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    registry = CudaDevice(torch.device("cuda")).registry()
    assert registry is not None
    assert (registry.register(8, 4096, 1), registry.unregister(8)) == (0, 0)
    assert written.log == ["lock 8 4096 1 within ['cuda:1']", "unlock 8 within ['cuda:1']"]
