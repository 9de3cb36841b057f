"""Rows that end two workers each: among others they are left out, and eight of them in a row end it all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tasks_by_hand import Shelf, numbered

from streamload.decode.fatal_rows import MOST_IN_A_ROW, FatalRows
from streamload.decode.tasks import RowTask

ROWS = 20
SHELF = Shelf(numbered(5 * ROWS), per_shard=ROWS)


def task_of(rows: int, number: int) -> RowTask:
    return SHELF.task(("cls",), range(number * rows, (number + 1) * rows), number=number, first_slot=0)


def rows_until_it_is_given_up(rows_of_a_task: int, deadly: set[int]) -> int | None:
    """How many rows end two workers before it is given up, in tasks of so many rows; None: it never is."""
    fatal, found = FatalRows(ends_pass=False), 0
    for number in range(5 * ROWS // rows_of_a_task):
        task = fatal.known(task_of(rows_of_a_task, number))
        for row in range(rows_of_a_task):
            if number * rows_of_a_task + row in deadly:
                found += 1
                again = fatal.note(task, row, "why")
                if again is None:
                    return found
                task = fatal.known(again)
        assert sorted(number * rows_of_a_task + row for row in task.untried) == sorted(
            deadly & set(range(number * rows_of_a_task, (number + 1) * rows_of_a_task))
        )
        fatal.done(task)
    return None


@pytest.mark.parametrize("rows_of_a_task", [1, 4, 5, ROWS])
def test_eight_in_a_row_are_enough_wherever_tasks_end(rows_of_a_task: int) -> None:
    assert rows_until_it_is_given_up(rows_of_a_task, set(range(ROWS))) == MOST_IN_A_ROW
    assert rows_until_it_is_given_up(rows_of_a_task, set(range(ROWS)) - {2}) == 2 + MOST_IN_A_ROW
    assert rows_until_it_is_given_up(rows_of_a_task, set(range(50, 50 + MOST_IN_A_ROW))) == MOST_IN_A_ROW


@pytest.mark.parametrize("rows_of_a_task", [1, 4, 5, ROWS])
def test_rows_among_others_are_left_out_however_many_they_are(rows_of_a_task: int) -> None:
    assert rows_until_it_is_given_up(rows_of_a_task, set(range(0, 100, 2))) is None
    assert rows_until_it_is_given_up(rows_of_a_task, set(range(0, 100, 5))) is None
    assert rows_until_it_is_given_up(rows_of_a_task, {row for row in range(100) if row % MOST_IN_A_ROW}) is None


def test_where_one_ends_the_pass_nothing_behind_it_in_its_task_or_batch_is_tried() -> None:
    fatal = FatalRows(ends_pass=True)
    task = task_of(4, 0)
    again = fatal.note(task, 1, "why")
    assert again is not None
    assert again.untried == {1: "why", 2: "why", 3: "why"}
    (piece,) = task.pieces
    behind = replace(task, number=1, pieces=(piece._replace(first_row=4),))
    assert set(fatal.known(behind).untried) == {0, 1, 2, 3}
    before = replace(task, number=2, pieces=(piece._replace(batch=piece.batch + 1),))
    assert fatal.known(before).untried == {}


def test_a_task_whose_rows_were_not_tried_has_made_none() -> None:
    fatal = FatalRows(ends_pass=True)
    for number in range(MOST_IN_A_ROW):
        again = fatal.note(task_of(4, number), 0, "why")
        assert (again is None) == (number == MOST_IN_A_ROW - 1)
        if again is not None:
            fatal.done(again)
