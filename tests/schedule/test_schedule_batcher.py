"""The batcher: whole batches, each once, in order where that is asked for, and never more than there is room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamload.schedule.batcher import Batcher, OpenBatch

Made = Batcher[str, str]


def opened(batcher: Made, count: int, rows: int = 2) -> list[OpenBatch[str, str]]:
    return [batcher.open(rows, f"source {number}", slot=10 + number, end=100 + number) for number in range(count)]


def complete(batch: OpenBatch[str, str]) -> None:
    batch.rows_done = batch.rows


def test_batches_come_in_order_however_they_get_complete() -> None:
    batcher = Made(in_order=True)
    batches = opened(batcher, 4)
    complete(batches[1])
    assert batcher.take_complete() == []
    complete(batches[0])
    assert batcher.take_complete() == batches[:2]
    complete(batches[3])
    assert batcher.take_complete() == []
    complete(batches[2])
    assert batcher.take_complete() == batches[2:]
    assert batcher.take_complete() == []


def test_no_two_batches_have_one_number_though_an_epoch_is_begun_again() -> None:
    """What is known of a batch, as that it has killed workers, must not be taken for another one's."""
    first = Made(in_order=True)
    numbers = [batch.number for batch in opened(first, 2)]
    given_up = Made(in_order=True, before=first)
    numbers += [batch.number for batch in opened(given_up, 2)]
    given_up.take_all()
    again = Made(in_order=True, before=first)
    numbers += [batch.number for batch in opened(again, 2)]
    assert len(set(numbers)) == 6


def test_out_of_order_batches_come_as_they_get_complete() -> None:
    batcher = Made(in_order=False)
    batches = opened(batcher, 3)
    complete(batches[2])
    assert batcher.take_complete() == [batches[2]]
    complete(batches[0])
    complete(batches[1])
    assert batcher.take_complete() == batches[:2]


@given(st.integers(1, 12).flatmap(lambda count: st.permutations(range(count))), st.booleans())
def test_every_batch_comes_once(order: list[int], in_order: bool) -> None:
    batcher = Made(in_order=in_order)
    batches = opened(batcher, len(order))
    came = []
    for number in order:
        complete(batches[number])
        came += [batch.number for batch in batcher.take_complete()]
    assert came == (sorted(order) if in_order else order)
    assert batcher.empty


def test_a_batch_is_complete_when_all_its_rows_have_come_back() -> None:
    (batch,) = opened(Made(in_order=True), 1, rows=3)
    batch.rows_done = 2
    assert not batch.complete
    batch.rows_done = 3
    assert batch.complete


def test_room_comes_back_when_the_trainer_takes_batches_and_not_before() -> None:
    batcher = Made(in_order=True)
    batches = opened(batcher, 3)
    assert batcher.outstanding == 3
    for batch in batches:
        complete(batch)
    batcher.take_complete()
    assert batcher.outstanding == 3
    assert batcher.empty
    batcher.note_taken(2)
    assert batcher.outstanding == 1


def test_a_late_part_of_a_restarted_batch_is_not_taken_for_a_new_one() -> None:
    """The old slot may still be written to; what comes from there must not count."""
    batcher = Made(in_order=True)
    (batch,) = opened(batcher, 1)
    assert batcher.find(batch.number, 10) is batch
    batch.parts.append("part")
    batch.rows_done = 1
    batch.restart(slot=99)
    assert (batch.parts, batch.rows_done, batch.slot) == ([], 0, 99)
    assert batcher.find(batch.number, 10) is None
    assert batcher.find(batch.number, 99) is batch


def test_a_batch_that_was_given_out_is_not_found_again() -> None:
    batcher = Made(in_order=True)
    (batch,) = opened(batcher, 1)
    complete(batch)
    batcher.take_complete()
    assert batcher.find(batch.number, batch.slot) is None
    assert batcher.find(5, 10) is None


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_are_numbered_through(in_order: bool) -> None:
    batcher = Made(in_order=in_order)
    batches = opened(batcher, 2)
    complete(batches[0])
    batcher.take_complete()
    assert [batch.number for batch in [*batches, *opened(batcher, 1)]] == [0, 1, 2]
    assert (batches[1].source, batches[1].end, batches[1].slot) == ("source 1", 101, 11)
