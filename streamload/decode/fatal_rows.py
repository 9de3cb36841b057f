"""Which rows have ended two workers each."""

from __future__ import annotations

from dataclasses import replace

from streamload.decode.tasks import RowTask

__all__ = ["FatalRows"]


class FatalRows:
    """What is remembered of rows that are not tried again.

    Args:
        ends_pass: the first of them ends the pass. Then what lies behind it in its batch, or in its task, is not tried:
            each row might end two workers more, and the error would come after minutes.
    """

    def __init__(self, *, ends_pass: bool) -> None:
        self._ends_pass = ends_pass
        self._first: dict[int, tuple[int, str]] = {}  # by batch

    def note(self, task: RowTask, row: int, reason: str) -> RowTask:
        """A row has ended its second worker; the task to try again, without what is not tried any more."""
        last = row
        if self._ends_pass:
            last = len(task.table) - 1
            for piece, start in task.pieces_and_starts():
                if start <= row < start + piece.rows:
                    self._first.setdefault(piece.batch, (piece.first_row + row - start, reason))
        return replace(task, untried={**dict.fromkeys(range(row, last + 1), reason), **task.untried})

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
