"""The values of a batch that are no arrays: pickled into its slot behind the arrays where they are large, else inline.

What lies in the slot passes no socket and no heap of the feeder's, and counts as the batch's memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import cloudpickle

from streamload.memory.mapped import Bytes
from streamload.memory.slots import SlotMemory

__all__ = ["INLINE_BYTES", "InSlot", "dump_values", "load_values", "store_values"]

INLINE_BYTES = 64 << 10
"""Up to this size values travel with the message."""


class InSlot(NamedTuple):
    """Where in its batch's slot a pickle lies."""

    start: int
    size_bytes: int


class _Chunks:
    """Takes what a pickler writes; large `bytes` come as they are, without a copy."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def write(self, data: bytes | memoryview) -> None:
        self.chunks.append(data if type(data) is bytes else bytes(data))


def dump_values(values: Any) -> bytes:
    """A pickle; classes that only the user's script defines need cloudpickle, which is an order slower."""
    return b"".join(_pickled(values))


def _pickled(values: Any) -> list[bytes]:
    taken = _Chunks()
    try:
        pickle.Pickler(taken, pickle.HIGHEST_PROTOCOL).dump(values)
    except (pickle.PicklingError, AttributeError, TypeError):
        taken = _Chunks()
        cloudpickle.Pickler(taken).dump(values)
    return taken.chunks


def store_values(values: list[Any], slots: SlotMemory, slot: int, start: int, *, may_use_slot: bool) -> bytes | InSlot:
    """Pickle values to where they travel.

    Args:
        values: of the batch, or of some of its rows.
        slots: gives the memory.
        slot: the batch's.
        start: the end of its arrays.
        may_use_slot: nobody else writes behind these.

    Returns:
        The pickle, or where it lies.
    """
    chunks = _pickled(values)
    size_bytes = sum(map(len, chunks))
    if not may_use_slot or size_bytes <= INLINE_BYTES:
        return b"".join(chunks)
    _copy(chunks, slots.at_least(slot, start + size_bytes)[start : start + size_bytes])
    return InSlot(start, size_bytes)


def _copy(chunks: Iterable[bytes], memory: Bytes) -> None:
    target, start = memoryview(memory.data), 0
    for chunk in chunks:
        target[start : start + len(chunk)] = chunk
        start += len(chunk)


def load_values(stored: bytes | InSlot, memory: Bytes) -> Any:
    """The values, on this process's heap; `memory` is that of the slot."""
    if isinstance(stored, InSlot):
        return pickle.loads(memory[stored.start : stored.start + stored.size_bytes].data)
    return pickle.loads(stored)
