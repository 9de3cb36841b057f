"""How large tasks are: about thirty milliseconds, whatever that is in rows, within bounds of memory and latency."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.schedule.lookahead import MAX_RUN_ROWS
from streamload.schedule.scheduler import TaskSize, task_size


def size(
    row_s: float | None, batch_rows: int, slot_bytes: int = 1000, *, capacity: int = 4, whole: bool = False
) -> TaskSize:
    return task_size(row_s, batch_rows, slot_bytes, capacity=capacity, prefetch_batches=4, whole=whole)


@pytest.mark.parametrize(
    ("row_s", "batch_rows", "parts", "run"),
    [
        (1e-3, 100, 2, 1),  # 100 ms for two workers: a part for each
        (1e-3, 31, 2, 1),
        (1e-3, 30, 1, 1),  # not cut
        (1e-2, 128, 13, 1),  # a hundred at most
        (1.0, 8, 8, 1),  # a row at a time
        (1e-3, 15, 1, 2),
        (1e-3, 10, 1, 3),
        (1e-5, 64, 1, 46),
        (1e-5, 2, 1, 85),  # 512 batches in all
        (1e-9, MAX_RUN_ROWS, 1, 1),
    ],
)
def test_tasks_take_about_thirty_milliseconds(row_s: float, batch_rows: int, parts: int, run: int) -> None:
    found = size(row_s, batch_rows)
    assert (found.parts, found.run) == (parts, run)


def test_many_workers_get_smaller_parts() -> None:
    assert size(1e-3, 128, capacity=8).parts == 4
    assert size(1e-3, 128, capacity=64).parts == 13  # ten milliseconds at least


@given(workers=st.integers(1, 64), row_s=st.floats(1e-6, 0.1), rows=st.integers(1, 1000))
def test_no_worker_gets_two_parts_of_a_batch_while_parts_are_short(workers: int, row_s: float, rows: int) -> None:
    found = size(row_s, rows, capacity=2 * workers)
    assert found.parts <= workers or row_s * rows / workers > 0.1 * (1 - 1e-9)


def test_before_anything_is_known_a_batch_is_cut_for_every_worker() -> None:
    assert size(None, 128).parts == 4
    assert size(None, 2).parts == 2
    assert size(None, 128, whole=True) == TaskSize(1, 1, 6)


def test_what_must_not_be_cut_is_not_cut() -> None:
    assert size(0.1, 100, whole=True).parts == 1
    assert size(1e-6, 10, whole=True).run > 1


def test_runs_of_large_batches_are_held_to_20_mebibytes() -> None:
    assert size(1e-6, 64, 1 << 20).run == 20
    assert size(1e-6, 64, 1 << 20, capacity=16).run == 20
    assert size(1e-6, 64, 1 << 30).run == 1


@given(
    row_s=st.none() | st.floats(0, 10),
    batch_rows=st.integers(1, 10_000),
    slot_bytes=st.integers(1, 1 << 32),
    capacity=st.integers(1, 300),
    prefetch=st.integers(1, 100),
    whole=st.booleans(),
)
def test_no_worker_is_idle_and_everything_is_bounded(
    row_s: float | None, batch_rows: int, slot_bytes: int, capacity: int, prefetch: int, whole: bool
) -> None:
    found = task_size(row_s, batch_rows, slot_bytes, capacity=capacity, prefetch_batches=prefetch, whole=whole)
    assert 1 <= found.parts <= batch_rows
    assert found.run >= 1
    assert found.parts == 1 or found.run == 1
    assert found.outstanding * found.parts >= found.run * (capacity + 2), "enough tasks for all, and one to spare"
    assert found.outstanding >= prefetch
    assert found.outstanding <= max(prefetch, capacity + 2, 512)
    if found.run > 1:
        assert found.run * batch_rows <= MAX_RUN_ROWS
        assert found.run * slot_bytes <= 20 << 20
