"""Parts that take far longer than their fellows: when they are asked for again, and which of the two counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from virtual_time import run_in_virtual_time

from streamload.errors import ShardChangedError, StorageError
from streamload.fetch.hedged_requests import HedgedRequests, download_with_second
from streamload.storage.download import Downloaded, Watch


def sent(at_s: float, requested_bytes: int = 100) -> Watch:
    watch = Watch()
    watch.sent(at_s, requested_bytes)
    return watch


def test_with_few_to_compare_with_none_is_late() -> None:
    hedged_requests = HedgedRequests()
    for _ in range(4):
        hedged_requests.answered(0.1)
    assert hedged_requests.late_at(sent(10.0)) is None
    hedged_requests.answered(0.1)
    assert hedged_requests.late_at(sent(10.0)) == pytest.approx(10.3)


def test_an_answer_is_late_after_three_times_the_median_and_never_before_a_fifth_of_a_second() -> None:
    hedged_requests = HedgedRequests()
    for wait_s in (0.01, 0.02, 0.03, 5.0, 10.0):
        hedged_requests.answered(wait_s)
    assert hedged_requests.late_at(sent(10.0)) == pytest.approx(10.2)
    for _ in range(10):
        hedged_requests.answered(1.0)
    assert hedged_requests.late_at(sent(10.0)) == pytest.approx(13.0)


def test_only_the_latest_count() -> None:
    hedged_requests = HedgedRequests()
    for wait_s in [1.0] * 1000 + [0.1] * 64:
        hedged_requests.answered(wait_s)
    assert hedged_requests.late_at(sent(0.0)) == pytest.approx(0.3)


def test_a_body_is_judged_by_its_size() -> None:
    hedged_requests = HedgedRequests()
    for size in (100, 200, 300, 400, 500):
        hedged_requests.finished(transfer_s=size / 100, transferred_bytes=size)
    hedged_requests.finished(0.0, 0)
    watch = sent(0.0, requested_bytes=1000)
    assert hedged_requests.late_at(watch) is None
    watch.answered(5.0, requested_bytes=50)
    assert hedged_requests.late_at(watch) == pytest.approx(5.0 + 3 * 0.5)


def test_a_download_between_two_tries_is_not_late() -> None:
    hedged_requests = HedgedRequests()
    for _ in range(5):
        hedged_requests.answered(0.1)
    assert hedged_requests.late_at(Watch()) is None


def test_second_requests_are_few_and_one_among_few_parts_is_possible() -> None:
    hedged_requests = HedgedRequests()
    assert [hedged_requests.allows() for _ in range(6)] == [True] * 4 + [False] * 2
    allowed = 0
    for _ in range(1000):
        hedged_requests.started()
        allowed += hedged_requests.allows()
    assert 49 <= allowed <= 50
    for _ in range(1000):
        hedged_requests.started()
    assert sum(hedged_requests.allows() for _ in range(100)) == 8


# -- two downloads beside each other

WHOLE = Downloaded(0, 10, 1, 0)


class Race:
    """Downloads that end after so long, with a result or an error, and may have brought bytes before."""

    def __init__(self, *ends: tuple[float, Exception | None, bool]) -> None:
        self.ends = ends
        self.late = asyncio.Event()
        self.requested: list[float] = []
        self.ended: list[tuple[int, str]] = []

    def request(self) -> tuple[Watch, Coroutine[Any, Any, Downloaded]]:
        number, watch = len(self.requested), Watch()
        self.requested.append(asyncio.get_running_loop().time() - 1000)
        after_s, error, brings = self.ends[number]
        watch.received_bytes = int(brings)

        async def one() -> Downloaded:
            try:
                await asyncio.sleep(after_s)
            except asyncio.CancelledError:
                self.ended.append((number, "cancelled"))
                raise
            self.ended.append((number, "ended"))
            if error is not None:
                raise error
            return Downloaded(0, 10, 1, number)

        return watch, one()

    def run(self, *late_s: float, then: Callable[[asyncio.Task[Downloaded]], None] | None = None) -> int:
        """When it is late; returns the number of the download that counts."""

        async def main() -> int:
            for at_s in late_s:
                asyncio.get_running_loop().call_later(at_s, self.late.set)
            task = asyncio.create_task(download_with_second(self.request, self.late))
            if then is not None:
                asyncio.get_running_loop().call_later(2.5, then, task)
            try:
                return (await task).throttled
            finally:
                assert len(asyncio.all_tasks()) == 1, "everything has ended"

        return run_in_virtual_time(main())


def test_without_lateness_there_is_one_request() -> None:
    race = Race((5.0, None, True))
    assert race.run() == 0
    assert race.requested == [0.0]


def test_the_second_wins_and_the_first_is_cancelled() -> None:
    race = Race((10.0, None, False), (1.0, None, True))
    assert race.run(2.0) == 1
    assert race.requested == [0.0, 2.0]
    assert race.ended == [(1, "ended"), (0, "cancelled")]


def test_the_first_may_still_win() -> None:
    race = Race((3.0, None, True), (5.0, None, True))
    assert race.run(2.0) == 0
    assert race.ended == [(0, "ended"), (1, "cancelled")]


def test_a_second_that_is_late_too_is_asked_for_once_more() -> None:
    race = Race((10.0, None, False), (10.0, None, False), (1.0, None, True))
    assert race.run(2.0, 4.0) == 2
    assert race.requested == [0.0, 2.0, 4.0]


def test_a_second_that_fails_leaves_the_first_alone() -> None:
    race = Race((10.0, None, False), (1.0, StorageError("down"), False))
    assert race.run(2.0) == 0


def test_a_first_that_fails_waits_for_a_second_that_brings_bytes() -> None:
    assert Race((3.0, StorageError("down"), True), (5.0, None, True)).run(2.0) == 1


def test_a_first_that_fails_does_not_wait_for_a_second_without_a_byte() -> None:
    race = Race((3.0, StorageError("first"), True), (500.0, None, False))
    with pytest.raises(StorageError, match="first"):
        race.run(2.0)
    assert race.ended == [(0, "ended"), (1, "cancelled")]


def test_where_all_fail_it_is_the_first_error_that_counts() -> None:
    with pytest.raises(StorageError, match="first"):
        Race((3.0, StorageError("first"), True), (5.0, StorageError("second"), True)).run(2.0)


def test_a_shard_that_changed_is_changed_whoever_finds_out() -> None:
    with pytest.raises(ShardChangedError):
        Race((10.0, None, True), (1.0, ShardChangedError("changed"), False)).run(2.0)


def test_cancelling_ends_both() -> None:
    race = Race((10.0, None, True), (10.0, None, True))
    with pytest.raises(asyncio.CancelledError):
        race.run(2.0, then=lambda task: task.cancel())
    assert sorted(race.ended) == [(0, "cancelled"), (1, "cancelled")]
