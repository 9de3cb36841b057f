"""The last part of a task: its rows go to the slots of their batches, or through the user's `collate_fn`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
from numpy.typing import NDArray

from streamload.batch.collate import MisfitError, Rows, choose_rows, torch_collate, write_rows
from streamload.batch.differences import difference_between
from streamload.batch.layout import (
    ArrayLeaf,
    Layout,
    MappingNode,
    Node,
    SequenceNode,
    describe_batch,
    describe_rows,
    slot_views,
)
from streamload.dataset.table import MISSING
from streamload.decode.failure import Attempt, failure_here, failure_of, in_words
from streamload.decode.seeding import GlobalSeeds, RowRandomness
from streamload.decode.tasks import Job, Piece, PieceDone, RowFailure, RowTask
from streamload.memory.slots import SlotMemory

__all__ = ["PieceCollator"]

_IRREGULAR = (MisfitError, TypeError, RecursionError)
"""Rows that are unlike each other, of classes that only torch knows, or nested too deeply."""

_COLLATE_STREAM = 1 << 40
"""Keeps the random numbers of a `collate_fn` apart from those of the batch's first sample."""


class PieceCollator:
    """Collates the rows of tasks.

    Args:
        job: for its `collate_fn` and `on_error`.
        slots: where to write.
        seeds: set before a `collate_fn` runs, from the batch's first sample.
        in_callers_process: exceptions stay what they are, with their tracebacks.
    """

    def __init__(self, job: Job, slots: SlotMemory, seeds: GlobalSeeds, *, in_callers_process: bool = False) -> None:
        self._failure_of = failure_here if in_callers_process else failure_of
        self._job = job
        self._slots = slots
        self._seeds = seeds
        self._layout: Layout | None = None

    def fix_layout(self, layout: bytes) -> None:
        """The layout of all batches of rows from now on."""
        self._layout = pickle.loads(layout)

    def places(self, task: RowTask, child: int | str) -> list[NDArray[Any]] | None:
        """Where one value of each row will lie, so that it can be made there.

        Args:
            task: the rows.
            child: which of the values that a row is made of: its number in a tuple, its key in a dict.

        Returns:
            A writable array for each row, or None where that is not known or the value is no array.
        """
        layout = self._layout
        leaf = None if layout is None or task.whole else _child(layout.tree, child)
        if layout is None or not isinstance(leaf, ArrayLeaf) or leaf.torch_dtype is not None:
            return None
        places: list[NDArray[Any]] = []
        for piece in task.pieces:
            memory = self._slots.at_least(piece.slot, layout.offsets()[1])
            view = slot_views(layout, memory, layout.capacity)[leaf.number]
            places.extend(view[piece.first_row : piece.first_row + piece.rows])
        return places

    def collate(
        self, task: RowTask, rows: Rows, failures: Mapping[int, RowFailure], randomness: RowRandomness
    ) -> tuple[PieceDone, ...]:
        """Write a task's rows, and say what became of each piece."""
        done, start = [], 0
        for piece in task.pieces:
            end = start + piece.rows
            failed = {row - start: each for row, each in failures.items() if start <= row < end} if failures else {}
            part = rows if piece.rows == rows.count else rows.slice(start, end)
            if task.whole:
                table = task.table
                first = int(table.shards[start]), int(table.samples[start]), int(table.copies[start])
                done.append(self._whole_batch(piece, part, failed, randomness, first))
            else:
                done.append(self._rows_of_batch(piece, part, failed, task.capacity))
            start = end
        return tuple(done)

    def _rows_of_batch(self, piece: Piece, rows: Rows, failed: Mapping[int, RowFailure], capacity: int) -> PieceDone:
        """Write rows in place, as the fixed layout has it; a row that failed holds the bytes of another one."""
        failures = _in_batch(failed, piece) if failed else ()
        good = next((row for row in range(rows.count) if row not in failed), None) if failed else 0
        if good is None:
            return PieceDone(piece, failures=failures)
        try:
            layout = self._layout or describe_rows(rows.row(good)).with_capacity(capacity)
            if failed:
                rows = rows.take([row if row not in failed else good for row in range(rows.count)])
            size_bytes = layout.offsets()[1]
            besides = write_rows(layout, rows, self._slots.at_least(piece.slot, size_bytes), piece.first_row)
            return PieceDone(
                piece,
                layout=None if self._layout else _dumps(layout),
                size_bytes=size_bytes,
                besides=_dumps(besides) if besides else None,
                failures=failures,
            )
        except _IRREGULAR:
            return PieceDone(piece, misfit=True)

    def _whole_batch(
        self,
        piece: Piece,
        rows: Rows,
        failed: Mapping[int, RowFailure],
        randomness: RowRandomness,
        first: tuple[int, int, int],
    ) -> PieceDone:
        failures = _in_batch(failed, piece)
        if failed:
            chosen = choose_rows(rows.count, failed, self._job.on_error)
            if not chosen or self._job.on_error == "raise" or any(failure.fatal for failure in failures):
                return PieceDone(piece, whole=True, failures=failures)
            rows = rows.take(chosen)
        returned = False
        with Attempt() as attempt:
            if self._job.collate_fn is None:
                return self._regular_batch(piece, rows, failures)
            self._seeds.seed(randomness, first[0] + _COLLATE_STREAM, *first[1:])
            batch = self._job.collate_fn(rows.as_list())
            returned = True
            return self._lay_down(piece, batch, failures)
        error = attempt.error
        assert error is not None
        difference = difference_between(rows) if self._job.collate_fn is None else ""
        if self._job.collate_fn is not None:
            happened = "returned what cannot be sent to the training process:" if returned else "raised"
            said = f"collate_fn {happened} {in_words(error)} (for the batch that begins with this sample)"
        else:
            said = f"the batch that begins with this sample cannot be collated: {difference or in_words(error)}"
        failure = RowFailure(
            row=piece.first_row,
            kind="CollateError",
            message=said,
            field=None,
            fatal=True,
            cause=None
            if difference
            else self._failure_of(error),  # torch's words say less, in a page of its own frames
            shard=first[0],
            sample=first[1],
            offset=MISSING,
        )
        return PieceDone(piece, whole=True, failures=(*failures, failure))

    def _regular_batch(self, piece: Piece, rows: Rows, failures: tuple[RowFailure, ...]) -> PieceDone:
        """A batch whose rows are alike, if not like those of other batches; else torch decides what becomes of it."""
        try:
            layout = describe_rows(rows.row(0)).with_capacity(rows.count)
            size_bytes = layout.offsets()[1]
            besides = write_rows(layout, rows, self._slots.at_least(piece.slot, size_bytes), 0)
            return PieceDone(
                piece,
                whole=True,
                layout=_dumps(layout),
                size_bytes=size_bytes,
                rows=rows.count,
                besides=_dumps(besides) if besides else None,
                failures=failures,
            )
        except _IRREGULAR:
            pass
        return self._lay_down(piece, torch_collate(rows), failures)

    def _lay_down(self, piece: Piece, batch: Any, failures: tuple[RowFailure, ...]) -> PieceDone:
        """Lay whatever a `collate_fn` returned into the slot."""
        layout, arrays, besides = describe_batch(batch)
        size_bytes = layout.offsets()[1]
        if arrays:
            memory = self._slots.at_least(piece.slot, size_bytes)
            for view, array in zip(slot_views(layout, memory, None), arrays, strict=True):
                view[...] = array
        return PieceDone(
            piece,
            whole=True,
            layout=_dumps(layout),
            size_bytes=size_bytes,
            besides=_dumps(besides) if besides else None,
            failures=failures,
        )


def _child(tree: Node, child: int | str) -> Node | None:
    if isinstance(tree, MappingNode) and child in tree.keys:
        return tree.children[tree.keys.index(child)]
    if isinstance(tree, SequenceNode) and isinstance(child, int) and child < len(tree.children):
        return tree.children[child]
    return None


def _in_batch(failed: Mapping[int, RowFailure], piece: Piece) -> tuple[RowFailure, ...]:
    return tuple(replace(failure, row=piece.first_row + row) for row, failure in sorted(failed.items()))


def _dumps(value: Any) -> bytes:
    """A pickle; classes that only the user's script defines need cloudpickle, which is an order slower."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled: bytes = cloudpickle.dumps(value)
        return pickled
