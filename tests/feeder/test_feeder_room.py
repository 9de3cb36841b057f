"""A feeder whose budget is used up waits for nobody who waits for it, and says so where nothing can go on."""

from __future__ import annotations

import pytest
from feeder_by_hand import FeederByHand, with_feeder

from streamload.decode.failure import error_from
from streamload.errors import StorageError
from streamload.feeder.calls import COUNT_SAMPLES
from streamload.feeder.messages import Call, EpochStart, Failed
from streamload.fetch.parts import PART_BYTES

ONE_PART_BYTES = 10_000_000
"""Room for one part and not for two."""
THREE_PARTS_BYTES = 26_000_000
BATCH_BYTES = 1_000_000
"""Three of them do not fit beside three parts, one does."""


def failure(by_hand: FeederByHand) -> Exception:
    (failed,) = (message for message in by_hand.sent if isinstance(message, Failed))
    return error_from(failed.failure)


def test_a_batch_that_never_fits_is_an_error_when_those_before_it_are_announced(url: str) -> None:
    """Whether the trainer has taken them does not matter."""

    async def body(by_hand: FeederByHand) -> None:
        (task,) = await by_hand.begin(1)
        await by_hand.settled()
        assert by_hand.fetcher.stalled
        assert by_hand.kinds() == []
        by_hand.answer(task)
        await by_hand.settled()
        assert by_hand.kinds() == ["Ready", "Failed"]
        assert isinstance(failure(by_hand), StorageError)
        assert "too small" in str(failure(by_hand))

    with_feeder(url, body, batch_size=1, budget_bytes=ONE_PART_BYTES)


def test_a_trainer_that_takes_its_time_is_waited_for(url: str) -> None:
    """What later batches need does not fit, but the next one needs only what is there, and that the trainer goes on."""

    async def body(by_hand: FeederByHand) -> None:
        (task,) = await by_hand.begin(1)
        by_hand.answer(task, size_bytes=2 * BATCH_BYTES)
        await by_hand.settled()
        assert by_hand.fetcher.stalled
        assert by_hand.kinds() == ["Ready"]
        assert len(by_hand.pool.tasks) == 1, "no other batch may be outstanding"
        by_hand.take_all()
        await by_hand.dealt_out(2)

    with_feeder(url, body, batch_size=1, budget_bytes=2 * PART_BYTES + 3 * 2 * BATCH_BYTES)


def test_a_scan_that_had_to_wait_for_a_worker_is_not_waited_for_when_it_is_over(plain_url: str) -> None:
    async def body(by_hand: FeederByHand) -> None:
        await by_hand.begin(0)
        by_hand.pool.full = True
        await by_hand.until(lambda: by_hand.fetcher.arrived_from(0, 0)[0] > 0)
        assert by_hand.pool.scans == []
        by_hand.pool.full = False
        by_hand.feeder.on_room()
        by_hand.scan(by_hand.pool.scans[0])
        (task,) = await by_hand.dealt_out(1)
        by_hand.slots.more_bytes = 2 * ONE_PART_BYTES
        by_hand.answer(task)
        by_hand.take_all()
        await by_hand.work_until(lambda: "Failed" in by_hand.kinds(), answered=1, scanned=1)
        assert "too small" in str(failure(by_hand))

    with_feeder(plain_url, body, batch_size=1, budget_bytes=2 * ONE_PART_BYTES)


def test_counting_waits_for_the_batches_that_are_being_made(plain_url: str) -> None:
    """What they are made of makes room for what is still to be scanned."""

    async def body(by_hand: FeederByHand) -> None:
        await by_hand.begin(0)
        await by_hand.until(lambda: len(by_hand.pool.scans) > 0)
        by_hand.scan(by_hand.pool.scans[0])
        await by_hand.dealt_out(1)
        by_hand.slots.more_bytes = 2 * ONE_PART_BYTES
        await by_hand.settled()
        for scanned in by_hand.pool.scans[1:]:
            by_hand.scan(scanned)
        await by_hand.settled()
        assert by_hand.fetcher.stalled
        by_hand.feeder.handle(Call(0, COUNT_SAMPLES))
        assert "Failed" not in by_hand.kinds()
        by_hand.slots.more_bytes = 0
        scans = len(by_hand.pool.scans)
        await by_hand.work_until(lambda: "Answer" in by_hand.kinds(), answered=0, scanned=scans)

    with_feeder(plain_url, body, batch_size=1, budget_bytes=2 * ONE_PART_BYTES)


def test_what_is_known_is_counted_whatever_there_is_room_for(url: str) -> None:
    async def body(by_hand: FeederByHand) -> None:
        await by_hand.begin(1)
        await by_hand.settled()
        assert by_hand.fetcher.stalled
        by_hand.feeder.handle(Call(0, COUNT_SAMPLES))
        assert by_hand.kinds() == ["Answer"]

    with_feeder(url, body, batch_size=1, budget_bytes=ONE_PART_BYTES, works_ahead=True)


def test_what_orphaned_tasks_of_another_epoch_read_is_waited_for_and_no_error(url: str) -> None:
    async def body(by_hand: FeederByHand) -> None:
        tasks = await by_hand.begin(1)
        answered = 0
        while tasks[answered].epoch == 0:
            by_hand.answer(tasks[answered])
            by_hand.take_all()
            answered += 1
            await by_hand.until(lambda: len(tasks) > answered)
        await by_hand.settled()
        orphaned = tasks[answered:]
        by_hand.feeder.handle(EpochStart(5, 3, 0, 1))
        await by_hand.settled()
        assert by_hand.fetcher.stalled
        for task in orphaned:
            assert "Failed" not in by_hand.kinds()
            by_hand.answer(task)
        await by_hand.until(lambda: tasks[-1].epoch == 5)

    with_feeder(url, body, batch_size=1, budget_bytes=2 * ONE_PART_BYTES, works_ahead=True)


def test_room_is_reserved_for_batches_that_do_not_exist_yet(url: str) -> None:
    """All parts would fit beside the one batch that there is."""

    async def body(by_hand: FeederByHand) -> None:
        (task,) = await by_hand.begin(1)
        by_hand.pool.full = True  # no other batch is begun
        by_hand.answer(task, size_bytes=BATCH_BYTES)
        by_hand.take_all()
        await by_hand.settled()
        by_hand.feeder.on_room()
        await by_hand.settled()
        window = by_hand.fetcher.window
        assert by_hand.slots.held_bytes() < 2 * BATCH_BYTES
        assert 0 < window.used_bytes <= window.budget_bytes - 3 * BATCH_BYTES

    with_feeder(url, body, batch_size=1, budget_bytes=THREE_PARTS_BYTES, works_ahead=True)


def test_parts_that_are_needed_later_are_freed_where_batches_grow(url: str) -> None:
    async def body(by_hand: FeederByHand) -> None:
        (task,) = await by_hand.begin(1)
        window = by_hand.fetcher.window
        await by_hand.until(lambda: window.used_bytes > 2 * PART_BYTES and not window.in_flight())
        by_hand.slots.more_bytes = window.budget_bytes - 2 * PART_BYTES
        by_hand.pool.full = True  # else what is dealt next holds its parts
        by_hand.answer(task)
        assert window.used_bytes <= 2 * PART_BYTES

    with_feeder(url, body, batch_size=1, budget_bytes=THREE_PARTS_BYTES)


@pytest.mark.parametrize(("budget_bytes", "at_once"), [(200_000_000, {0, 1}), (THREE_PARTS_BYTES, {0})])
def test_compressed_shards_are_decompressed_side_by_side_where_there_is_room(
    gz_url: str, budget_bytes: int, at_once: set[int]
) -> None:
    async def body(by_hand: FeederByHand) -> None:
        by_hand.feeder.handle(Call(0, COUNT_SAMPLES))
        await by_hand.until(lambda: {shard for scan in by_hand.pool.scans for shard in scan.shards} == at_once)
        await by_hand.settled()
        assert {shard for scan in by_hand.pool.scans for shard in scan.shards} == at_once

    with_feeder(gz_url, body, batch_size=1, budget_bytes=budget_bytes)


def test_a_batch_that_gets_no_slot_is_an_error_and_not_left_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others are being made, which is when an error of planning waits."""

    async def body(by_hand: FeederByHand) -> None:
        await by_hand.begin(1)
        by_hand.pool.full = True
        take, calls = by_hand.slots.take, []

        def fails_once(size_bytes: int) -> int:
            calls.append(size_bytes)
            if len(calls) == 1:
                raise OSError(24, "Too many open files")
            return take(size_bytes)

        monkeypatch.setattr(by_hand.slots, "take", fails_once)
        by_hand.answer(by_hand.pool.tasks[0])
        by_hand.pool.full = False
        by_hand.feeder.on_room()
        await by_hand.until(lambda: bool(calls))
        await by_hand.settled()
        assert "Failed" in by_hand.kinds()

    with_feeder(url, body, batch_size=1, budget_bytes=200_000_000)
