"""Page-lock slots, and copy batches to a CUDA device on a separate stream."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from copy import copy
from typing import Any

import torch

from streamload.decode.collate import is_named_tuple
from streamload.memory.mapped import Bytes

_FOR_EVERY_DEVICE = 1  # cudaHostRegisterPortable


class Cuda:
    """Page-lock slots, and copy batches to a device.

    Torch does not know that the slots are page-locked, so none may be reused before `fence` reports that queued copies
    are done. CUDA is initialized by the first slot or batch, so a program may call `torch.cuda.set_device` after it has
    made the loader.

    Attributes:
        device: the target of copies, if any; without a number, the current device at the first use.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def lock(self, memory: Bytes) -> None:
        """Page-lock a slot until it is unmapped. If CUDA refuses, the slot stays as it is, and copies from it block."""
        if not torch.cuda.is_available():
            return
        device = self._resolved()
        address = memory.ctypes.data
        with torch.cuda.device(device):
            refused = int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, _FOR_EVERY_DEVICE))
        if not refused:
            # The newest finalizer runs first, so this one precedes the finalizer that unmaps the memory.
            weakref.finalize(memory, _unlock, address, device).atexit = False

    def fence(self) -> Callable[[], bool]:
        """Return a function that returns True once all copies queued until now are done.

        The copies are those on the current stream of each device with a CUDA context, and the stream of `move`.
        """
        if not torch.cuda.is_initialized():
            return lambda: True
        streams = [torch.cuda.current_stream(device) for device in _devices_in_use()]
        if self._stream is not None:
            streams.append(self._stream)
        events = [stream.record_event() for stream in streams]
        return lambda: all(event.query() for event in events)

    def move(self, batch: Any) -> Callable[[], Any]:
        """Start copying the tensors in a batch's mappings, lists and tuples. The batch may be dropped at once.

        Returns:
            A function that makes the caller's stream wait for the copies, and returns the batch on the device.

        Raises:
            RuntimeError: a tensor cannot be copied (torch.OutOfMemoryError).
        """
        device = self._resolved()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        stream, callers = self._stream, torch.cuda.current_stream(device)
        copies: list[torch.Tensor] = []

        def begin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested:
                copies.append(tensor.to(device, non_blocking=True))
                return copies[-1]
            with torch.cuda.stream(callers):  # `record_stream` does not support sparse tensors
                return tensor.to(device)

        with torch.cuda.stream(stream):
            moved = map_tensors(batch, begin)
        copied = stream.record_event()

        def wait() -> Any:
            callers = torch.cuda.current_stream(device)
            callers.wait_event(copied)
            for tensor in copies:
                # The copies' memory belongs to the copies' stream. Recording the caller's stream keeps the memory from
                # being reused while work that the loop has queued still reads it.
                tensor.record_stream(callers)
            return moved

        return wait

    def _resolved(self) -> torch.device:
        """Return the device; by default the first in use, else the current one."""
        if self.device is None:
            return torch.device("cuda", next(iter(_devices_in_use()), torch.cuda.current_device()))
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        return self.device


def _devices_in_use() -> list[int]:
    # Private, but public functions create a context if there is none.
    has_context = torch._C._cuda_hasPrimaryContext  # noqa: SLF001
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


def _unlock(address: int, device: torch.device) -> None:
    """Unlock memory once all copies are done."""
    if not torch.cuda.is_initialized():  # this is a fork, where CUDA cannot be used
        return
    with suppress(RuntimeError):  # CUDA has failed before, so no copy is running
        for used in _devices_in_use():
            torch.cuda.synchronize(used)
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def device_for(device: Any) -> torch.device | None:
    """Return the device that `device=` names; None for the host.

    Raises:
        ValueError: `device` is not an available CUDA device.
    """
    if device is None:
        return None
    try:
        wanted = torch.device(f"cuda:{device}" if type(device) is int else device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f'device={device!r} is not a device; give "cuda", "cuda:0" or 0') from error
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
    return wanted


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy nested containers, with `change` applied to every tensor; other objects stay the same."""
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
        changed = copy(value)  # keeps its class and its other attributes
        for key in value:
            changed[key] = map_tensors(value[key], change)
        return changed
    return value
