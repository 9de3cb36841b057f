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
    """What is remembered of rows that are not tried again.

    Args:
        ends_pass: the first of them ends the pass. Then what lies behind it in its batch, or in its task, is not tried:
            each row might end two workers more, and the error would come after minutes.
    """

    def __init__(self, *, ends_pass: bool) -> None:
        self._ends_pass = ends_pass
        self._first: dict[int, tuple[int, str]] = {}  # by batch
        self._in_a_row = 0

    def note(self, task: RowTask, row: int, reason: str) -> RowTask | None:
        """A row has ended its second worker.

        Returns:
            The task to try again without what is not tried any more; or None, to give up: `MOST_IN_A_ROW` rows did so,
            and no other was made between them.
        """
        one_before_was_made = row > 0 and row - 1 not in task.untried
        self._in_a_row = 1 if one_before_was_made else self._in_a_row + 1
        if self._in_a_row >= MOST_IN_A_ROW:
            return None
        last = row
        if self._ends_pass:
            last = len(task.table) - 1
            for piece, start in task.pieces_and_starts():
                if start <= row < start + piece.rows:
                    self._first.setdefault(piece.batch, (piece.first_row + row - start, reason))
        return replace(task, untried={**dict.fromkeys(range(row, last + 1), reason), **task.untried})

    def done(self, task: RowTask) -> None:
        """A task has come back; of a row that was tried in it, it does not matter whether it has failed."""
        if not self._in_a_row:
            return
        last = next((row for row in reversed(range(len(task.table))) if row not in task.untried), None)
        if last is not None:
            self._in_a_row = min(self._in_a_row, len(task.table) - 1 - last)

    def known(self, task: RowTask) -> RowTask:
        """The task, without its rows that lie behind one of these in a batch of which another task had a part."""
        if not self._first:
            return task
        behind: dict[int, str] = {}
        for piece, start in task.pieces_and_starts():
            fatal_row, reason = self._first.get(piece.batch, (piece.first_row + piece.rows, ""))
            first = max(0, fatal_row + 1 - piece.first_row)
            behind.update(dict.fromkeys(range(start + first, start + piece.rows), reason))
        return replace(task, untried={**behind, **task.untried}) if behind else task


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
