"""Rows that end two workers each: neither they nor what lies behind them is tried again."""

from __future__ import annotations

from tasks_by_hand import Shelf, numbered

from streamload.decode.tasks import RowTask
from streamload.workers.process_pool import FatalRows

ROWS = 20
SHELF = Shelf(numbered(5 * ROWS), per_shard=ROWS)


def task_of(rows: int, number: int) -> RowTask:
    return SHELF.task(("cls",), range(number * rows, (number + 1) * rows), number=number, first_slot=0)


def test_where_one_ends_the_pass_nothing_behind_it_in_its_task_or_batch_is_tried() -> None:
    fatal = FatalRows(ends_pass=True)
    task = task_of(4, 0)
    again = fatal.note(task, 1, "why")
    assert again.untried == {1: "why", 2: "why", 3: "why"}
    (piece,) = task.pieces
    behind = task._replace(number=1, pieces=(piece._replace(first_row=4),))
    assert set(fatal.known(behind).untried) == {0, 1, 2, 3}
    before = task._replace(number=2, pieces=(piece._replace(batch=piece.batch + 1),))
    assert fatal.known(before).untried == {}
