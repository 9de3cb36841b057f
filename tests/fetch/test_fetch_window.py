"""The window: what is needed sooner comes first, and what is in use is never freed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lines_run import lines_of

from streamload.fetch.parts import part_key
from streamload.fetch.window import PartWindow


def keys(*numbers: int) -> list[int]:
    return [part_key(0, number) for number in numbers]


def batch(window: PartWindow, *numbers: int) -> list[int]:
    wanted = keys(*numbers)
    window.plan(wanted)
    return wanted


def fetch(window: PartWindow, size: int = 10, other: int = 0) -> int | None:
    """Fetch the next part if there is room; its number."""
    key = window.next_missing()
    dropped = None if key is None else window.room_for(size, other)
    if key is None or dropped is None:
        return None
    for each in dropped:
        window.drop(each)
    window.admit(key, size)
    window.arrive(key, size)
    return key


def test_parts_come_in_the_order_of_the_batches_that_need_them() -> None:
    window = PartWindow(1000)
    batch(window, 3, 1)
    batch(window, 1, 2)
    assert [fetch(window) for _ in range(4)] == [*keys(3, 1, 2), None]


def test_nothing_is_admitted_beyond_the_budget_whatever_else_takes_of_it() -> None:
    window = PartWindow(35)
    batch(window, 0, 1, 2, 3)
    assert [fetch(window, other=5) for _ in range(4)] == [*keys(0, 1, 2), None]
    assert window.used_bytes == 30


def test_a_part_whose_turn_comes_back_is_evicted_once() -> None:
    """Counted twice, it would make room for two."""
    window = PartWindow(20)
    window.plan(keys(0), turn=5)
    fetch(window)
    window.plan(keys(0), turn=3)  # another rank's
    window.start(keys(0))
    window.release(keys(0))
    assert list(window.evictable()) == keys(0)


def test_what_a_batch_uses_stays_until_it_is_made() -> None:
    window = PartWindow(20)
    first = batch(window, 0, 1)
    batch(window, 2)
    assert [fetch(window), fetch(window)] == first
    window.start(first)
    assert fetch(window) is None
    window.release(first)
    assert fetch(window) == keys(2)[0]
    assert not window.is_present(first[0])


def test_what_an_epoch_holds_stays_until_it_is_passed() -> None:
    window = PartWindow(10)
    first = batch(window, 0)
    batch(window, 1)
    fetch(window)
    window.start(first)
    window.hold([first[0]])
    window.release(first)
    assert fetch(window) is None
    window.release([first[0]])
    assert fetch(window) == keys(1)[0]


def test_what_is_left_from_before_gives_way_even_if_a_later_batch_needs_it_again() -> None:
    window = PartWindow(20)
    last_epoch = batch(window, 8, 9)
    fetch(window)
    fetch(window)
    window.start(last_epoch)
    window.release(last_epoch)
    first, second = batch(window, 1), batch(window, 9)
    batch(window, 8)
    assert fetch(window) == first[0], "8 goes, which is needed last"
    assert window.are_present(second)
    window.start(first)
    assert fetch(window) is None, "9 is needed sooner than 8"
    window.release(first)
    assert fetch(window) == keys(8)[0], "and it is fetched again in its turn"


def test_a_part_in_flight_makes_no_room_for_batches_where_an_earlier_one_lies() -> None:
    """It would come, be needed later than the one that has gone, and go for that in its turn, without end."""
    window = PartWindow(40)
    early, middle, late = (batch(window, number)[0] for number in (0, 1, 2))
    assert [fetch(window), window.next_missing()] == [early, middle]
    window.admit(middle, 10)
    assert list(window.evictable_for_others()) == []
    window.arrive(middle, 10)
    assert list(window.evictable_for_others()) == [], "the next one is needed later than both"
    assert fetch(window) == late
    assert list(window.evictable_for_others()) == [late, middle, early]


def test_what_nobody_needs_goes_before_what_is_reserved() -> None:
    window = PartWindow(20)
    batch(window, 5)
    fetch(window)
    unneeded = batch(window, 6)
    fetch(window)
    window.cancel(unneeded)
    window.request(keys(7)[0], scan=0)
    assert fetch(window) == keys(7)[0]
    assert window.is_present(keys(5)[0])


def test_what_is_cancelled_is_not_fetched() -> None:
    window = PartWindow(100)
    cancelled = batch(window, 0)
    batch(window, 1)
    window.cancel(cancelled)
    assert fetch(window) == keys(1)[0]
    assert window.next_missing() is None


def test_parts_that_lie_on_the_disk_are_dropped_as_soon_as_nobody_needs_them() -> None:
    window = PartWindow(100)
    wanted = batch(window, 0, 1)
    for key in wanted:
        window.admit(key, 10)
        window.arrive(key, 0)
    assert window.take_free() == []
    window.start(wanted)
    window.release(wanted)
    assert sorted(window.take_free()) == wanted
    assert window.take_free() == []


@settings(deadline=None, max_examples=200)
@given(
    batches=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True), min_size=1, max_size=25),
    budget=st.integers(4, 14),
    ahead=st.integers(1, 8),
    data=st.data(),
)
def test_every_batch_gets_its_parts_within_any_budget_that_holds_one(
    batches: list[list[int]], budget: int, ahead: int, data: st.DataObject
) -> None:
    """Whatever is planned ahead and however batches end, the next batch is served, and the budget kept."""
    window = PartWindow(10 * budget)
    planned: list[list[int]] = []
    dealt: list[list[int]] = []
    left = [keys(*numbers) for numbers in batches]
    while left or planned or dealt:
        while left and len(planned) < ahead:
            planned.append(batch(window, *(key for key in left.pop(0))))
        while fetch(window) is not None:
            assert window.used_bytes <= window.budget_bytes
        if planned and window.are_present(planned[0]):
            window.start(planned[0])
            dealt.append(planned.pop(0))
        else:
            assert dealt, "nothing is in flight, and the next batch is not served"
        for each in dealt:
            assert window.are_present(each), "what is in use was freed"
        if dealt and (not planned or data.draw(st.booleans()) or not window.are_present(planned[0])):
            window.release(dealt.pop(0))
    assert window.bytes_kept_from_next() == 0
    assert window.waiting == 0


def kept(window: PartWindow, shard: int, *numbers: int) -> list[int]:
    """Parts of a shard that have come, whose rows are not planned yet; shards are scanned in the order of numbers."""
    wanted = [part_key(shard, number) for number in numbers]
    for key in wanted:
        window.request(key, scan=shard)
    assert [fetch(window) for _ in wanted] == wanted
    for key in wanted:
        window.keep(key, scan=shard)
        window.withdraw(key)
    return wanted


def test_what_is_kept_for_rows_to_come_makes_room_for_a_batch_the_last_shard_first() -> None:
    window = PartWindow(40)
    sooner, later = kept(window, 1, 0, 1), kept(window, 2, 0, 1)
    batch(window, 0)
    assert fetch(window) == keys(0)[0]
    assert [key for key in (*sooner, *later) if not window.is_present(key)] == later[1:]


def test_what_is_kept_makes_room_for_the_scan_of_an_earlier_shard_and_not_of_a_later_one() -> None:
    window = PartWindow(20)
    middle = kept(window, 2, 0, 1)
    for shard, comes in ((3, False), (1, True)):
        wanted = part_key(shard, 0)
        window.request(wanted, scan=shard)
        assert fetch(window) == (wanted if comes else None)
        window.withdraw(wanted)
    assert window.is_present(middle[0])
    assert not window.is_present(middle[1])


def test_a_batch_comes_before_all_scans_and_takes_their_room() -> None:
    window = PartWindow(20)
    scanned = [part_key(1, number) for number in range(3)]
    for key in scanned:
        window.request(key, scan=0)
    assert [fetch(window), fetch(window), fetch(window)] == [*scanned[:2], None]
    (planned,) = batch(window, 0)
    assert fetch(window) == planned
    assert [window.is_present(key) for key in scanned] == [True, False, False]
    window.start([planned])
    window.release([planned])
    assert fetch(window) == scanned[1], "fetched again in its turn"


def test_a_part_that_failed_is_not_fetched_again_until_it_is_tried_again() -> None:
    window = PartWindow(20)
    (key,) = batch(window, 0)
    window.admit(key, 10)
    window.fail(key)
    batch(window, 0)
    assert window.next_missing() is None
    window.try_again([key])
    assert window.next_missing() == key
    window.admit(key, 10)
    window.drop(key)
    assert window.next_missing() == key, "what did not come is still needed"


def test_parts_on_the_way_to_another_come_first_and_stay_as_long_as_there_is_room() -> None:
    window = PartWindow(20)
    batch(window, 2)
    assert window.need_before(keys(0, 1), keys(2)[0])
    assert [fetch(window), fetch(window)] == keys(0, 1)
    assert not window.need_before(keys(0, 1), keys(2)[0])
    assert fetch(window) == keys(2)[0]
    assert [window.is_present(key) for key in keys(0, 1, 2)] == [False, True, True]


def test_what_is_kept_outlives_what_nobody_needs() -> None:
    window = PartWindow(30)
    first = batch(window, 0)
    assert fetch(window) == first[0]
    window.start(first)
    parts = kept(window, 1, 0, 1)
    window.release(first)
    batch(window, 5)
    assert fetch(window) == keys(5)[0]
    assert window.are_present(parts)
    assert not window.is_present(first[0])
    window.unkeep(parts[0])
    batch(window, 6)
    fetch(window)
    assert [window.is_present(part) for part in parts] == [False, True]


def test_making_room_does_not_look_at_all_that_is_there() -> None:
    """A large budget is full of what nobody needs, and each part that comes takes the place of one of these."""

    def lines_for_one_more(parts: int) -> int:
        window = PartWindow(10 * parts)
        for number in range(parts):
            used = batch(window, number)
            fetch(window)
            window.start(used)
            window.release(used)
        batch(window, parts)
        return lines_of(lambda: fetch(window))

    assert lines_for_one_more(1000) < 2 * lines_for_one_more(10)
