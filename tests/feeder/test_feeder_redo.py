"""What a task reads stays until it is over, and none is done again for nobody."""

from __future__ import annotations

import pytest
from feeder_by_hand import FeederByHand, with_feeder

from streamload.decode.tasks import RowTask
from streamload.feeder.messages import EpochStart
from streamload.fetch.parts import parts_of_rows

BUDGET_BYTES = 50_000_000


def parts_of(task: RowTask) -> list[int]:
    return parts_of_rows(task.table.places())


def may_be_given_back(by_hand: FeederByHand) -> set[int]:
    return set(by_hand.fetcher.window.evictable())


async def a_batch_made_again_and_delivered(by_hand: FeederByHand) -> RowTask:
    """The first batch is cut, and begun again while one of its tasks is in flight; that task."""
    first, *_ = await by_hand.begin(1)
    by_hand.answer(first)
    await by_hand.until(lambda: len(by_hand.pool.tasks) >= 3)
    layout_mismatch, orphaned = by_hand.pool.tasks[1:3]
    assert {piece.batch for task in (first, layout_mismatch, orphaned) for piece in task.pieces} == {0}
    by_hand.answer(layout_mismatch, layout_mismatch=True)
    await by_hand.until(lambda: any(task.whole for task in by_hand.pool.tasks))
    (whole,) = (task for task in by_hand.pool.tasks if task.whole and task.pieces[0].batch == 0)
    by_hand.answer(whole, whole=True)
    assert len(by_hand.batches()) == 1
    return orphaned


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_a_task_reads_stays_until_it_is_over_though_its_batch_was_made_again(
    url: str, *, comes_back: bool
) -> None:
    """Else a worker would find zeros there, and run the user's code on them."""

    async def body(by_hand: FeederByHand) -> None:
        orphaned = await a_batch_made_again_and_delivered(by_hand)
        of_others = {key for task in by_hand.pool.tasks if task.pieces[0].batch > 0 for key in parts_of(task)}
        first_part = set(parts_of(by_hand.pool.tasks[0]))
        held = set(parts_of(orphaned)) - first_part - of_others
        assert held
        assert first_part <= may_be_given_back(by_hand), "what others have read may go"
        assert not held & may_be_given_back(by_hand)
        if comes_back:
            by_hand.answer(orphaned)
        else:
            by_hand.pool.lose(orphaned)
        assert held <= may_be_given_back(by_hand)
        assert [*by_hand.pool.returned] == by_hand.pool.again == [], "it is not done for nobody"

    with_feeder(url, body, batch_size=3, budget_bytes=BUDGET_BYTES)


def test_what_tasks_of_an_abandoned_epoch_read_stays_until_they_are_done(url: str) -> None:
    async def body(by_hand: FeederByHand) -> None:
        tasks = await by_hand.begin(1)
        answered = 0
        while tasks[answered].epoch == 0:
            by_hand.answer(tasks[answered])
            by_hand.take_all()
            answered += 1
            await by_hand.until(lambda: len(tasks) > answered)
        first = tasks[answered].pieces[0].batch
        orphaned = [task for task in tasks[answered:] if task.pieces[0].batch == first]
        by_hand.feeder.handle(EpochStart(5, 3, 0, 1))  # it needs the last part alone
        await by_hand.until(lambda: tasks[-1].epoch == 5)
        held = {0, 1}
        assert held <= {key for task in orphaned for key in parts_of(task)}
        assert not held & may_be_given_back(by_hand)
        for task in tasks[answered:]:
            if task.epoch == 1:
                by_hand.answer(task)
        assert held <= may_be_given_back(by_hand)

    with_feeder(url, body, batch_size=3, budget_bytes=BUDGET_BYTES, works_ahead=True)
