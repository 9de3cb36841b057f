"""Parts of a batch, which several feeders have made, as one batch in one slot."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

from streamload.decode.batch_layout import Layout, slot_views
from streamload.decode.tasks import StoredValues
from streamload.decode.values import dump_values
from streamload.memory.mapped import Bytes
from streamload.memory.slots import ALIGNMENT_BYTES, round_up
from streamload.schedule.epoch import FailedRow, Part, ReadyBatch

__all__ = ["ReceivedBatch", "Unmergeable", "merge", "write"]

_MOST_LAYOUTS = 1000


class ReceivedBatch(NamedTuple):
    """A batch, or a part of one, in a slot of the relay's; `memory` is what it uses of the slot."""

    batch: ReadyBatch
    memory: Bytes

    @property
    def rows(self) -> int:
        """How many rows it has been made of, those that failed among them."""
        return sum(part.rows for part in self.batch.parts)


class Unmergeable(Exception):  # noqa: N818 - it is no error: the batch is made by one feeder then
    """The rows of the parts don't make a batch as they are, so what becomes of them is for whoever collates them all.

    That are rows that are not alike, and those that a feeder has collated as a batch of their own and left some out.
    """


class Merge(NamedTuple):
    """How parts become a batch.

    Attributes:
        batch: but for its slot.
        layout: of it; None where all rows have failed.
    """

    batch: ReadyBatch
    layout: Layout | None


class Layouts:
    """Layouts by their pickles, which are the same ones for almost every batch."""

    def __init__(self) -> None:
        self._loaded: dict[bytes, Layout] = {}
        self._dumped: dict[tuple[bytes, int], bytes] = {}

    def load(self, pickled: bytes) -> Layout:
        """The layout of a pickle."""
        layout = self._loaded.get(pickled)
        if layout is None:
            self._bound()
            layout = self._loaded[pickled] = pickle.loads(pickled)
        return layout

    def with_capacity(self, pickled: bytes, rows: int) -> bytes:
        """The pickle of the same layout with room for so many rows."""
        found = self._dumped.get((pickled, rows))
        if found is None:
            self._bound()
            found = self._dumped[pickled, rows] = dump_values(self.load(pickled).with_capacity(rows))
        return found

    def _bound(self) -> None:
        if len(self._loaded) + len(self._dumped) > _MOST_LAYOUTS:  # batches of ever new shapes
            self._loaded.clear()
            self._dumped.clear()


_layouts = Layouts()


def merge(parts: Sequence[ReceivedBatch]) -> Merge:
    """Find out what batch the parts make, in their order; `Merge.batch` lacks its slot.

    Raises:
        Unmergeable: they make none as they are.
    """
    rows = sum(part.rows for part in parts)
    failed = _moved_failures(parts)
    if any(
        row.failure.kind == "CollateError" or (part.batch.dropped_already and part.batch.failed)
        for part in parts
        for row in part.batch.failed
    ):
        raise Unmergeable
    layout = _common_layout(parts)
    pickled = next((part.batch.layout for part in parts if part.batch.layout and not part.batch.nothing_left), None)
    size_bytes, merged = 0, []
    if layout is not None:
        layout = layout.with_capacity(rows)
        size_bytes = layout.offsets()[1]
    for part in parts:
        moved, size_bytes = _moved_values(part, size_bytes)
        merged += moved
    batch = parts[0].batch._replace(
        slot=-1,
        size_bytes=size_bytes,
        layout=None if pickled is None else _layouts.with_capacity(pickled, rows),
        rows=rows,
        parts=tuple(merged),
        failed=tuple(failed),
        dropped_already=False,
    )
    return Merge(batch, layout)


def write(parts: Sequence[ReceivedBatch], merge: Merge, memory: Bytes) -> None:
    """Copy the parts to the memory of a slot for the batch, at least `merge.batch.size_bytes`."""
    if merge.layout is None:
        return
    views = slot_views(merge.layout, memory, merge.batch.rows)
    row, end_bytes = 0, merge.layout.offsets()[1]
    for part in parts:
        if part.batch.layout is not None and not part.batch.nothing_left:  # else there is nothing in its slot
            layout = _layouts.load(part.batch.layout)
            for view, own in zip(views, slot_views(layout, part.memory, part.rows), strict=True):
                view[row : row + part.rows] = own
            if _has_values(part):
                values = part.memory[layout.offsets()[1] :]
                memory[end_bytes : end_bytes + len(values)] = values
                end_bytes += round_up(len(values), ALIGNMENT_BYTES)
        row += part.rows


def _common_layout(parts: Sequence[ReceivedBatch]) -> Layout | None:
    found: Layout | None = None
    for part in parts:
        if part.batch.layout is None or part.batch.nothing_left:
            continue
        layout = _layouts.load(part.batch.layout)
        if layout.capacity is None or part.batch.rows != part.rows:
            raise Unmergeable
        if found is not None and layout.with_capacity(1) != found:
            raise Unmergeable
        found = layout.with_capacity(1)
    return found


def _moved_failures(parts: Sequence[ReceivedBatch]) -> list[FailedRow]:
    moved, before = [], 0
    for part in parts:
        for row in part.batch.failed:
            moved.append(row._replace(failure=row.failure._replace(row=row.failure.row + before)))
        before += part.rows
    return moved


def _has_values(part: ReceivedBatch) -> bool:
    return any(each.values is not None for each in part.batch.parts)


def _moved_values(part: ReceivedBatch, end_bytes: int) -> tuple[list[Part], int]:
    """The part's parts with their values behind `end_bytes` of another slot; and where they end there."""
    if part.batch.layout is None or not _has_values(part):
        return list(part.batch.parts), end_bytes
    begin_bytes = _layouts.load(part.batch.layout).offsets()[1]
    by_bytes = end_bytes - begin_bytes
    moved = []
    for each in part.batch.parts:
        values = each.values
        if values is not None:
            columns = tuple(column._replace(start=column.start + by_bytes) for column in values.columns)
            values = StoredValues(values.copied_bytes, columns)
        moved.append(Part(each.rows, values))
    return moved, end_bytes + round_up(len(part.memory) - begin_bytes, ALIGNMENT_BYTES)
