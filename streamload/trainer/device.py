"""Batches for a device: copied on a stream of their own, and their host memory kept until the copy is done."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from streamload.decode.batch_layout import is_named_tuple
from streamload.trainer.page_locked import HostRegistry, cuda_registry

__all__ = ["Mover", "device_for"]


class Copying(Protocol):
    """Copies that were begun together, and that the device makes when it comes to them."""

    def passed(self) -> bool:
        """Whether they are done, so that nothing reads the host's memory any more; it does not wait."""

    def wait(self) -> None:
        """Wait until they are done."""

    def give(self, copies: Sequence[torch.Tensor]) -> None:
        """Make the copies ready for the caller's current stream: that waits for them, the caller does not."""


class Device(Protocol):
    """What a device must offer."""

    def registry(self) -> HostRegistry | None:
        """What page-locks memory for it, if anything does."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Copying]:
        """Begin to copy tensors in the host's memory, which has to stay as it is until that has `passed`.

        Returns:
            The copies, in the same order, not to be used before they are given; and what knows of their progress.

        Raises:
            RuntimeError: it cannot be done (torch.OutOfMemoryError); then nothing reads the host's memory any more.
        """


@dataclass(frozen=True, slots=True)
class _CudaCopying:
    event: torch.cuda.Event
    device: torch.device

    def passed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def give(self, copies: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self.event)
        for tensor in filter(_is_dense, copies):
            # Their memory belongs to the stream of the copies: this keeps it from being used again while the work
            # that the loop has queued still reads it.
            tensor.record_stream(stream)


class CudaDevice:
    """A CUDA device. What it needs there is made when it is first used, so the process may still choose its device.

    Args:
        device: without an index it is the current device at the first use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def registry(self) -> HostRegistry | None:
        """The CUDA runtime's; that it is this device which is asked keeps it from making room on another one."""
        runtime = cuda_registry()
        if runtime is None:
            return None
        register, unregister = runtime.register, runtime.unregister

        def register_here(address: int, size_bytes: int, flags: int) -> int:
            with torch.cuda.device(self._resolved()):
                return register(address, size_bytes, flags)

        def unregister_here(address: int) -> int:
            with torch.cuda.device(self._resolved()):
                return unregister(address)

        return HostRegistry(register_here, unregister_here)

    def begin(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Copying]:
        """Begin to copy tensors, on a stream of its own."""
        device = self._resolved()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        stream = self._stream
        # Sparse tensors and the like know no streams: they are copied here and now, on the caller's.
        copies = [
            tensor if _is_dense(tensor) and tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors
        ]
        try:
            with torch.cuda.stream(stream):
                copies = [copy.to(device, non_blocking=True) if copy.device.type == "cpu" else copy for copy in copies]
                event = torch.cuda.Event()
                event.record(stream)
        except BaseException:
            stream.synchronize()  # those that were begun still read the host's memory
            raise
        return copies, _CudaCopying(event, device)

    def _resolved(self) -> torch.device:
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        return self._device


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def device_for(device: Any) -> Device | None:
    """What `device=` stands for: None for the host itself.

    Raises:
        TypeError, ValueError: it is no device, one that cannot be copied to, or one that is not there.
    """
    if device is None:
        return None
    wanted = _parsed(device)
    if wanted.type == "cpu":
        return None
    if wanted.type != "cuda":
        raise ValueError(
            f'device={device!r} must be a CUDA device, "cpu" or None; for other devices leave it out, and move each '
            f"batch in the loop with .to({wanted.type!r})"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r}, but torch sees no CUDA device here (torch.cuda.is_available() is False); leave it "
            "out for batches in the host's memory"
        )
    count = torch.cuda.device_count()
    if wanted.index is not None and wanted.index >= count:
        raise ValueError(f"device={device!r}, but torch sees {count} CUDA device{'s' * (count != 1)}, counted from 0")
    return CudaDevice(wanted)


def _parsed(device: Any) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if isinstance(device, bool) or not isinstance(device, str | int):
        raise TypeError(f'device={device!r} must be a torch.device, a string such as "cuda:0", a number, or None')
    if isinstance(device, int):
        if device < 0:
            raise ValueError(f"device={device!r} must be a CUDA device's number, counted from 0")
        return torch.device("cuda", device)
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f'device={device!r} is no device; "cuda" or "cuda:0" would be one') from error


@dataclass(frozen=True, slots=True)
class Moving:
    """A batch that is being copied to a device."""

    batch: Any
    copies: list[torch.Tensor]
    copying: Copying

    def give(self) -> Any:
        """The batch, ready to be used on the caller's current stream."""
        self.copying.give(self.copies)
        return self.batch


_Held = deque[tuple[Copying, list[torch.Tensor]]]


class Mover:
    """Moves batches to a device, and keeps what they are copied from until that is done.

    It neither waits nor works by itself: `finish` is to be called now and then. When it is dropped, it waits for the
    copies that are in flight.

    Args:
        device: where to.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: _Held = deque()
        # At exit nothing is unmapped, so nothing has to be waited for.
        weakref.finalize(self, _wait_for, self._held).atexit = False

    def begin(self, batch: Any) -> Moving:
        """Begin to move a batch: the tensors in its mappings, lists and tuples. All else stays as it is.

        The caller is not to keep `batch`: its memory is free for others when the copies are done and `finish` has
        noticed.

        Raises:
            RuntimeError: as `Device.begin`.
        """
        tensors: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(batch, collect)
        copies, copying = self._device.begin(tensors)
        self._held.append((copying, tensors))
        following = iter(copies)
        return Moving(map_tensors(batch, lambda _: next(following)), copies, copying)

    def finish(self) -> None:
        """Let go of the host's memory of all copies that are done; it does not wait."""
        while self._held and self._held[0][0].passed():
            self._held.popleft()

    def close(self) -> None:
        """Wait for the copies that are in flight, and release the host's memory. It can be used again."""
        _wait_for(self._held)


def _wait_for(held: _Held) -> None:
    try:
        for copying, _ in held:
            copying.wait()
    finally:
        held.clear()


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest with every tensor changed; containers are new, all else is the same object.

    Args:
        value: tensors, in mappings, lists, tuples and named tuples.
        change: called with each tensor, in an order that depends on the nest alone.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return change(value)
    if kind is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map_tensors(item, change) for item in value)
    if is_named_tuple(kind):
        return kind(*(map_tensors(item, change) for item in value))
    if isinstance(value, MutableMapping):
        changed = copy(value)  # so that it keeps its class and whatever else it holds
        for key in value:
            changed[key] = map_tensors(value[key], change)
        return changed
    return value
