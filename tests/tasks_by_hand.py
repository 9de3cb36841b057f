"""Tasks made by hand for tests of those who do them: small shards in memory, and the task that asks for their rows."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.batch_layout import Layout
from streamload.decode.batch_maker import BatchMaker
from streamload.decode.collate import build_batch
from streamload.decode.field_reader import ShardReader
from streamload.decode.row_table import ColumnKind, RowTable
from streamload.decode.tasks import Job, Piece, PieceDone, RowsDone, RowTask
from streamload.decode.values import load_values
from streamload.index.listing import Shard
from streamload.memory.slots import HeapSlots, MappedSlots, SlotMemory, SlotPool
from streamload.tar.table import MISSING

Sample = Mapping[str, bytes]


def job(**changes: Any) -> Job:
    """A job that decodes and nothing else, but for the changes."""
    plain: dict[str, Any] = {
        "fields": None,
        "decode": True,
        "transform": None,
        "collate_fn": None,
        "worker_init_fn": None,
        "on_error": "raise",
        "seed": 0,
    }
    return Job(**{**plain, **changes})


def npy(value: Any) -> bytes:
    """The bytes of an npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(value))
    return buffer.getvalue()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


class Shelf(ShardReader):
    """Samples laid into shards, `per_shard` of them in each: what the feeder would know, and what a worker reads."""

    def __init__(self, samples: Sequence[Sample], per_shard: int = 1000) -> None:
        self.samples = list(samples)
        self.per_shard = per_shard
        self._shards: list[bytes] = []
        self._places: list[dict[str, tuple[int, int]]] = []
        for first in range(0, len(self.samples), per_shard):
            content = bytearray(b"head")
            for sample in self.samples[first : first + per_shard]:
                self._places.append({})
                for name, payload in sample.items():
                    self._places[-1][name] = len(content), len(payload)
                    content += payload + b"/"
            self._shards.append(bytes(content))

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        return self._shards[shard][start : start + size_bytes]

    def size_bytes(self, shard: int) -> int:
        return len(self._shards[shard])

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        return np.frombuffer(self._shards[shard], np.uint8), offsets

    def url(self, shard: int) -> str:
        return f"/data/{shard}.tar"

    def write(self, folder: Path) -> tuple[Shard, ...]:
        """The shards as files, listed."""
        listed = []
        for number, content in enumerate(self._shards):
            path = folder / f"{number}.tar"
            path.write_bytes(content)
            listed.append(Shard(str(path), path.name, len(content), path.stat().st_mtime_ns, str(folder)))
        return tuple(listed)

    def task(
        self,
        names: Sequence[str] | None = None,
        rows: Sequence[int] | None = None,
        *,
        batches: Sequence[int] | None = None,
        first_slot: int = 0,
        crc32: Sequence[int] | None = None,
        **changes: Any,
    ) -> RowTask:
        """A task for some rows (all by default), divided into batches of the lengths given (one by default)."""
        chosen = list(range(len(self.samples)) if rows is None else rows)
        if names is None:
            fields = sorted({name for row in chosen for name in self.samples[row]})
            changes.setdefault("keys", tuple(f"key{row}" for row in chosen))
        else:
            fields = list(names)
        lengths = [len(chosen)] if batches is None else batches
        pieces = tuple(Piece(number, first_slot + number, 0, length) for number, length in enumerate(lengths))
        plain: dict[str, Any] = {
            "number": 0,
            "epoch": 0,
            "table": self.table(fields, chosen, crc32),
            "keys": None,
            "pieces": pieces,
            "capacity": max(lengths),
            "whole": False,
        }
        return RowTask(**{**plain, **changes})

    def table(self, names: Sequence[str], rows: Sequence[int], crc32: Sequence[int] | None = None) -> RowTable:
        alternatives = [tuple(name.split(";")) for name in names]
        kinds = tuple(
            ColumnKind(name, fields, len(fields) > 1, crc32 is not None)
            for name, fields in zip(names, alternatives, strict=True)
        )
        table = RowTable.empty(len(rows), kinds)
        table.shards[:] = [row // self.per_shard for row in rows]
        table.samples[:] = [row % self.per_shard for row in rows]
        for column in table.columns():
            for number, row in enumerate(rows):
                found = [which for which, field in enumerate(column.alternatives) if field in self._places[row]]
                place = self._places[row][column.alternatives[found[0]]] if found else (MISSING, 0)
                column.offsets[number], column.sizes[number] = place
                if column.which is not None:
                    column.which[number] = found[0] if found else 0
            if column.crc32 is not None:
                column.crc32[:] = crc32
        return table


def numbered(count: int) -> list[dict[str, bytes]]:
    """Samples that know their number, as `cls` and in an array of three."""
    return [{"cls": b"%d" % number, "npy": npy(np.full(3, number, np.int32))} for number in range(count)]


def slots_for(task: RowTask) -> HeapSlots:
    slots = HeapSlots()
    for _ in range(max(piece.slot for piece in task.pieces) + 1):
        slots.take(1)
    return slots


def run(work: Job, shelf: Shelf, task: RowTask) -> tuple[RowsDone, HeapSlots]:
    """Do one task here and now."""
    slots = slots_for(task)
    return BatchMaker(work, slots).run(task, shelf, [-1, -1]), slots


def values_of(done: PieceDone, slots: SlotMemory) -> list[list[Any]]:
    """The columns of values of unlike sizes of a piece."""
    return [] if done.values is None else load_values(done.values, slots.at_least(done.piece.slot, done.size_bytes))


def batch_of(
    done: PieceDone, slots: SlotMemory, layout: bytes | None = None, values: list[list[Any]] | None = None
) -> Any:
    """The batch of a piece that is a whole batch, or of which all values of unlike sizes are given."""
    pickled = done.layout or layout
    assert pickled is not None, f"there is no batch: {done}"
    found: Layout = pickle.loads(pickled)
    memory = slots.at_least(done.piece.slot, found.offsets()[1])
    rows = done.rows if done.whole else done.piece.rows
    return build_batch(found, memory, rows, values_of(done, slots) if values is None else values)


def mapped_batch(done: PieceDone, slots: SlotPool) -> Any:
    """The batch of a piece, read through a mapping of its slot, as a trainer does."""
    mapped = MappedSlots()
    mapped.add(done.piece.slot, os.dup(slots.descriptor(done.piece.slot)))
    try:
        return batch_of(done, mapped)
    finally:
        mapped.close()


def only_batch(work: Job, shelf: Shelf, task: RowTask) -> Any:
    """The batch of a task that is to go well."""
    done, slots = run(work, shelf, task)
    (piece,) = done.pieces
    assert piece.failures == ()
    assert not piece.layout_mismatch
    return batch_of(piece, slots)
