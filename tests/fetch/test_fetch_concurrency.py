"""How many requests at once: doubled in a round trip until one is refused, then slowly up, halved once in one."""

from __future__ import annotations

import pytest

from streamload.fetch.concurrency import Concurrency


def a_round_of_success(concurrency: Concurrency) -> None:
    for _ in range(limit := concurrency.limit):
        concurrency.succeeded(limit)


@pytest.mark.parametrize(("most", "limit"), [(64, 32), (10, 10), (1, 1), (1000, 32)])
def test_it_starts_at_32_or_what_memory_allows(most: int, limit: int) -> None:
    assert Concurrency(most=most).limit == limit


def test_nothing_at_once_is_refused() -> None:
    with pytest.raises(ValueError, match="most is 0"):
        Concurrency(most=0)


def succeed_at_the_limit(concurrency: Concurrency, times: int) -> None:
    for _ in range(times):
        concurrency.succeeded(concurrency.limit)


def test_it_doubles_in_a_round_trip_until_a_request_is_refused_up_to_64() -> None:
    concurrency = Concurrency(start=8)
    succeed_at_the_limit(concurrency, 8)
    assert concurrency.limit == 16
    succeed_at_the_limit(concurrency, 100)
    assert concurrency.limit == 64


def test_it_grows_by_one_in_a_round_trip_once_a_request_was_refused_up_to_64() -> None:
    concurrency = Concurrency()
    concurrency.throttled(1.0, 2.0)
    assert concurrency.limit == 16
    a_round_of_success(concurrency)
    assert concurrency.limit == 17
    for _ in range(100):
        a_round_of_success(concurrency)
    assert concurrency.limit == 64


def test_it_does_not_grow_beyond_what_memory_allows() -> None:
    concurrency = Concurrency(most=33)
    for _ in range(3):
        a_round_of_success(concurrency)
    assert concurrency.limit == 33


def test_it_does_not_grow_while_fewer_run_than_may() -> None:
    concurrency = Concurrency()
    for _ in range(1000):
        concurrency.succeeded(31)
    assert concurrency.limit == 32


def test_a_round_trip_that_is_refused_halves_once() -> None:
    concurrency = Concurrency()
    for sent in range(32):
        concurrency.throttled(sent_s=sent * 0.001, now_s=0.05 + sent * 0.001)
    assert concurrency.limit == 16
    concurrency.throttled(sent_s=0.0501, now_s=0.1)
    assert concurrency.limit == 8


def test_it_never_falls_below_one_and_comes_up_again() -> None:
    concurrency = Concurrency()
    for time_s in range(20):
        concurrency.throttled(sent_s=time_s, now_s=time_s + 0.5)
    assert concurrency.limit == 1
    a_round_of_success(concurrency)
    assert concurrency.limit == 2


def test_refusal_starts_the_counting_of_successes_anew() -> None:
    concurrency = Concurrency(start=4)
    for _ in range(3):
        concurrency.succeeded(4)
    concurrency.throttled(1.0, 2.0)
    concurrency.succeeded(2)
    assert concurrency.limit == 2
