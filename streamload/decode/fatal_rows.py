"""Which rows have ended two workers each, and when it is of no use to go on."""

from __future__ import annotations

from dataclasses import replace

from streamload.dataset.table import MISSING
from streamload.decode.tasks import RowTask
from streamload.errors import WorkerError
from streamload.fetch.tables import Tables

__all__ = ["MOST_IN_A_ROW", "FatalRows"]

MOST_IN_A_ROW = 8
"""So many rows one after the other, and none made between them: it is not the rows then, and each costs two workers."""


class FatalRows:
    """What is remembered of rows that are not tried again."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, str]] = {}  # by batch
        self._in_a_row = 0

    def note(self, task: RowTask, row: int, reason: str) -> bool:
        """A row has ended its second worker.

        Returns:
            Whether to give up: `MOST_IN_A_ROW` rows did so, and no other was made between them.
        """
        for piece, start in task.pieces_and_starts():
            if start <= row < start + piece.rows:
                self._first.setdefault(piece.batch, (piece.first_row + row - start, reason))
        one_before_was_made = row > 0 and row - 1 not in task.fatal_rows
        self._in_a_row = 1 if one_before_was_made else self._in_a_row + 1
        return self._in_a_row >= MOST_IN_A_ROW

    def done(self, task: RowTask) -> None:
        """A task has come back; of a row that was tried in it, it does not matter whether it has failed."""
        if not self._in_a_row:
            return
        untried = {**task.fatal_rows, **task.rows_behind_fatal}
        last = next((row for row in reversed(range(len(task.table))) if row not in untried), None)
        if last is not None:
            self._in_a_row = min(self._in_a_row, len(task.table) - 1 - last)

    def known(self, task: RowTask) -> RowTask:
        """The task, knowing which of its rows lie behind one of these in the same batch."""
        if not self._first:
            return task
        behind: dict[int, str] = {}
        for piece, start in task.pieces_and_starts():
            fatal_row, reason = self._first.get(piece.batch, (piece.first_row + piece.rows, ""))
            first = max(0, fatal_row + 1 - piece.first_row)
            behind.update(dict.fromkeys(range(start + first, start + piece.rows), reason))
        return replace(task, rows_behind_fatal=behind) if behind else task


def hopeless_error(task: RowTask, row: int, how: str, tables: Tables) -> WorkerError:
    """The error to end a pass with that is given up, for the last of the rows; `how` its second worker ended."""
    shard, columns = int(task.table.shards[row]), task.table.columns()
    table = tables.find(shard)
    offset = int(columns[0].offsets[row]) if columns else MISSING
    return WorkerError(
        f"samples have ended two workers each, {MOST_IN_A_ROW} in a row with none made between them, so no other is "
        "tried: look at the transform, at the decoders, at what they load, and at the memory that workers may take. At "
        f"the last of them the second worker {how}",
        url=tables.url(shard),
        key=None if table is None else table.key(int(task.table.samples[row])),
        offset=None if offset == MISSING else offset,
    )
