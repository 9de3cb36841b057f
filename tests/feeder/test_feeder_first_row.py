"""The layout of all batches is learned from one row, whichever epoch that is of."""

from __future__ import annotations

from feeder_by_hand import FeederByHand, with_feeder


def test_the_next_epoch_does_not_begin_while_the_layout_is_still_to_be_learned(url: str) -> None:
    """It would learn another one from a first row of its own, and rows of one batch would be written by both."""

    async def body(by_hand: FeederByHand) -> None:
        (first,) = await by_hand.begin(1)
        assert len(first.table) == 1
        await by_hand.settled()
        assert by_hand.pool.tasks == [first], "its epoch has this batch only, but another one must not begin yet"
        by_hand.answer(first)
        await by_hand.until(lambda: by_hand.pool.tasks[-1].epoch == 1)
        rows = sum(len(task.table) for task in by_hand.pool.tasks if task.epoch == 0)
        assert rows == 4

    with_feeder(url, body, batch_size=4, budget_bytes=50_000_000, works_ahead=True)
