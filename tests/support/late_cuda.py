"""A stand-in for CUDA behind torch's own calls: copies run as late as they may, and read memory by its address."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

RUBBISH = 77


class LateStream:
    """Work that is queued, and done in order when somebody waits for it."""

    def __init__(self, cuda: LateCuda, device: Any) -> None:
        self.cuda, self.device = cuda, torch.device(device).index
        self.queue: deque[Callable[[], object]] = deque()
        cuda.streams.append(self)

    def record_event(self) -> LateEvent:
        event = LateEvent()
        event.record(self)
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.queue.append(event.run)

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()


class LateEvent:
    """A place in a stream."""

    def __init__(self) -> None:
        self.passed = False
        self.stream: LateStream | None = None

    def record(self, stream: LateStream) -> None:
        stream.cuda.contexts.add(stream.device)
        self.stream = stream
        stream.queue.append(self._pass)

    def query(self) -> bool:
        return self.passed

    def run(self) -> None:
        """Do the work before it."""
        assert self.stream is not None
        while not self.passed:
            self.stream.queue.popleft()()

    def _pass(self) -> None:
        self.passed = True


class LateCuda:
    """Replaces torch's calls of CUDA until the test ends. A copy "on the device" is in the host's memory.

    As with CUDA, memory that is not page-locked has been read when a copy of it was queued.

    Attributes:
        streams: all that were made.
        contexts: the devices with a context.
        locked: what is page-locked: bytes by address.
        ever_locked: how often memory was locked.
        waits: how often the host has waited for a device.
        begun: how many copies were queued.
        fails_at: the number of the copy that there is no memory for, counted from 1.
        too_early: how often memory was unlocked that a queued copy was to read.
        refuses: the error code of page-locking.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> None:
        self.streams: list[LateStream] = []
        self.contexts: set[int] = set()
        self.locked: dict[int, int] = {}
        self.ever_locked = self.waits = self.begun = self.fails_at = self.too_early = self.refuses = 0
        self.current = 0
        self.initialized = False
        self._unread: list[int] = []
        self._used_on: dict[int, LateStream] = {}
        self._copied_on: dict[int, LateStream] = {}
        self._really_to = torch.Tensor.to
        self._current_streams = [LateStream(self, f"cuda:{device}") for device in range(devices)]
        stands_in = {
            "Event": LateEvent,
            "Stream": lambda device=None: LateStream(self, f"cuda:{self._index(device)}"),
            "cudart": self._cudart,
            "current_device": lambda: self.current,
            "current_stream": lambda device=None: self._current_streams[self._index(device)],
            "device": self._within_device,
            "device_count": lambda: devices,
            "is_available": lambda: True,
            "is_initialized": lambda: self.initialized or bool(self.contexts),
            "set_device": lambda device: setattr(self, "current", self._index(device)),
            "stream": self._within_stream,
            "synchronize": self._synchronize,
        }
        for name, replacement in stands_in.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", self.contexts.__contains__, raising=False)
        # Functions, so that tensors are their first argument.
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *a, **k: self._to(tensor, *a, **k))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record_stream(tensor, stream))

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 1, "for every device"
        assert address not in self.locked
        self.contexts.add(self.current)
        if self.refuses:
            return self.refuses
        self.locked[address] = size_bytes
        self.ever_locked += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        end = address + self.locked.pop(address)
        self.too_early += any(address <= unread < end for unread in self._unread)
        return 0

    def read(self, tensor: torch.Tensor) -> Any:
        """What work on the current stream sees now, if that goes on with all that is queued there."""
        stream = self._current_streams[self.current]
        assert self._used_on[id(tensor)] is stream, "its memory is kept for the loop"
        stream.run()
        return tensor.tolist()

    def copied_on(self, copy: torch.Tensor) -> LateStream:
        """The stream of a copy."""
        return self._copied_on[id(copy)]

    def run(self) -> None:
        """Do all work that is queued."""
        for stream in self.streams:
            stream.run()

    def queued(self) -> int:
        """How many copies are queued."""
        return len(self._unread)

    def _to(self, source: torch.Tensor, *arguments: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        to = arguments[0] if arguments else options.get("device")
        if not isinstance(to, str | torch.device) or torch.device(to).type != "cuda":
            return self._really_to(source, *arguments, non_blocking=non_blocking, **options)
        self.begun += 1
        if self.begun == self.fails_at:
            raise RuntimeError("out of memory")
        device = self._index(to)
        self.contexts.add(device)
        stream = self._current_streams[device]
        if source.layout != torch.strided:
            copy = source.clone()
        else:
            copy = torch.full_like(source, RUBBISH)
            self._queue(stream, source, copy)
        if not non_blocking:
            stream.run()
        self._used_on[id(copy)] = self._copied_on[id(copy)] = stream
        return copy

    def _queue(self, stream: LateStream, source: torch.Tensor, copy: torch.Tensor) -> None:
        address = source.data_ptr()
        if not source.numel() or not self._is_locked(address):
            stream.queue.append(partial(copy.copy_, source.clone()))
            return
        # Nothing here refers to the source.
        extent = 1 + sum((size - 1) * step for size, step in zip(source.shape, source.stride(), strict=True))
        shape, strides, dtype = source.shape, source.stride(), source.dtype
        self._unread.append(address)

        def read() -> None:
            self._unread.remove(address)
            if self._is_locked(address):
                memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
                copy.copy_(torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides))

        stream.queue.append(read)

    def _cudart(self) -> LateCuda:
        self.initialized = True
        return self

    def _is_locked(self, address: int) -> bool:
        return any(start <= address < start + size_bytes for start, size_bytes in self.locked.items())

    def _record_stream(self, tensor: torch.Tensor, stream: LateStream) -> None:
        self._used_on[id(tensor)] = stream

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return self.current if index is None else index

    @contextmanager
    def _within_device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self._index(device)
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _within_stream(self, stream: LateStream) -> Iterator[None]:
        before, self._current_streams[stream.device] = self._current_streams[stream.device], stream
        try:
            yield
        finally:
            self._current_streams[stream.device] = before

    def _synchronize(self, device: Any = None) -> None:
        self.waits += 1
        self.contexts.add(self._index(device))
        for stream in self.streams:
            if stream.device == self._index(device):
                stream.run()
