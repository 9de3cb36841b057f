"""The account of parts: what is needed sooner comes first, and what is in use is never freed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lines_run import lines_of

from streamload.fetch.ledger import PartLedger
from streamload.fetch.parts import part_key


def keys(*numbers: int) -> list[int]:
    return [part_key(0, number) for number in numbers]


def batch(ledger: PartLedger, *numbers: int) -> list[int]:
    wanted = keys(*numbers)
    ledger.reserve(wanted)
    ledger.want(wanted)
    return wanted


def fetch(ledger: PartLedger, size: int = 10, other: int = 0) -> int | None:
    """Fetch the next part if there is room; its number."""
    key = ledger.next_wanted()
    dropped = None if key is None else ledger.room_for(size, other)
    if key is None or dropped is None:
        return None
    for each in dropped:
        ledger.dropped(each)
    ledger.admitted(key, size)
    ledger.arrived(key, size)
    return key


def test_parts_come_in_the_order_of_the_batches_that_need_them() -> None:
    ledger = PartLedger(1000)
    batch(ledger, 3, 1)
    batch(ledger, 1, 2)
    assert [fetch(ledger) for _ in range(4)] == [*keys(3, 1, 2), None]


def test_nothing_is_admitted_beyond_the_budget_whatever_else_takes_of_it() -> None:
    ledger = PartLedger(35)
    batch(ledger, 0, 1, 2, 3)
    assert [fetch(ledger, other=5) for _ in range(4)] == [*keys(0, 1, 2), None]
    assert ledger.used_bytes == 30


def test_what_a_batch_uses_stays_until_it_is_made() -> None:
    ledger = PartLedger(20)
    first = batch(ledger, 0, 1)
    batch(ledger, 2)
    assert [fetch(ledger), fetch(ledger)] == first
    ledger.use(first)
    assert fetch(ledger) is None
    ledger.release(first)
    assert fetch(ledger) == keys(2)[0]
    assert not ledger.is_present(first[0])


def test_what_an_epoch_holds_stays_until_it_is_passed() -> None:
    ledger = PartLedger(10)
    first = batch(ledger, 0)
    batch(ledger, 1)
    fetch(ledger)
    ledger.use(first)
    ledger.hold([first[0]])
    ledger.release(first)
    assert fetch(ledger) is None
    ledger.release([first[0]])
    assert fetch(ledger) == keys(1)[0]


def test_what_is_left_from_before_gives_way_even_if_a_later_batch_needs_it_again() -> None:
    ledger = PartLedger(20)
    last_epoch = batch(ledger, 8, 9)
    fetch(ledger)
    fetch(ledger)
    ledger.use(last_epoch)
    ledger.release(last_epoch)
    first, second = batch(ledger, 1), batch(ledger, 9)
    batch(ledger, 8)
    assert fetch(ledger) == first[0], "8 goes, which is needed last"
    assert ledger.are_present(second)
    ledger.use(first)
    assert fetch(ledger) is None, "9 is needed sooner than 8"
    ledger.release(first)
    assert fetch(ledger) == keys(8)[0], "and it is fetched again in its turn"


def test_what_nobody_needs_goes_before_what_is_reserved() -> None:
    ledger = PartLedger(20)
    batch(ledger, 5)
    fetch(ledger)
    unneeded = batch(ledger, 6)
    fetch(ledger)
    ledger.cancel(unneeded)
    ledger.hold(keys(7))
    ledger.want(keys(7))
    assert fetch(ledger) == keys(7)[0]
    assert ledger.is_present(keys(5)[0])


def test_what_is_cancelled_is_not_fetched() -> None:
    ledger = PartLedger(100)
    cancelled = batch(ledger, 0)
    batch(ledger, 1)
    ledger.cancel(cancelled)
    assert fetch(ledger) == keys(1)[0]
    assert ledger.next_wanted() is None


def test_parts_that_lie_on_the_disk_are_dropped_as_soon_as_nobody_needs_them() -> None:
    ledger = PartLedger(100)
    wanted = batch(ledger, 0, 1)
    for key in wanted:
        ledger.admitted(key, 10)
        ledger.arrived(key, 0)
    assert ledger.take_free() == []
    ledger.use(wanted)
    ledger.release(wanted)
    assert sorted(ledger.take_free()) == wanted
    assert ledger.take_free() == []


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
    ledger = PartLedger(10 * budget)
    planned: list[list[int]] = []
    dealt: list[list[int]] = []
    left = [keys(*numbers) for numbers in batches]
    while left or planned or dealt:
        while left and len(planned) < ahead:
            planned.append(batch(ledger, *(key for key in left.pop(0))))
        while fetch(ledger) is not None:
            assert ledger.used_bytes <= ledger.budget_bytes
        if planned and ledger.are_present(planned[0]):
            ledger.use(planned[0])
            dealt.append(planned.pop(0))
        else:
            assert dealt, "nothing is in flight, and the next batch is not served"
        for each in dealt:
            assert ledger.are_present(each), "what is in use was freed"
        if dealt and (not planned or data.draw(st.booleans()) or not ledger.are_present(planned[0])):
            ledger.release(dealt.pop(0))
    assert ledger.kept_from_next_bytes() == 0
    assert ledger.waiting == 0


def kept(ledger: PartLedger, shard: int, *numbers: int) -> list[int]:
    """Parts of a shard that have come, whose rows are not planned yet."""
    wanted = [part_key(shard, number) for number in numbers]
    ledger.hold(wanted)
    ledger.want(wanted)
    assert [fetch(ledger) for _ in wanted] == wanted
    for key in wanted:
        ledger.keep(key)
    ledger.release(wanted)
    return wanted


def test_what_is_kept_for_rows_to_come_makes_room_for_a_batch_the_last_shard_first() -> None:
    ledger = PartLedger(40)
    ledger.expect_rows(1)
    ledger.expect_rows(2)
    sooner, later = kept(ledger, 1, 0, 1), kept(ledger, 2, 0, 1)
    batch(ledger, 0)
    assert fetch(ledger) == keys(0)[0]
    assert [key for key in (*sooner, *later) if not ledger.is_present(key)] == later[1:]


def test_what_is_kept_makes_room_for_the_scan_of_an_earlier_shard_and_not_of_a_later_one() -> None:
    ledger = PartLedger(20)
    for shard in (1, 2, 3):
        ledger.expect_rows(shard)
    middle = kept(ledger, 2, 0, 1)
    for shard, comes in ((3, False), (1, True)):
        wanted = part_key(shard, 0)
        ledger.hold([wanted])
        ledger.want([wanted])
        assert fetch(ledger) == (wanted if comes else None)
        if not comes:
            ledger.release([wanted])
    assert ledger.is_present(middle[0])
    assert not ledger.is_present(middle[1])


def test_what_is_kept_outlives_what_nobody_needs() -> None:
    ledger = PartLedger(30)
    first = batch(ledger, 0)
    ledger.expect_rows(1)
    assert fetch(ledger) == first[0]
    ledger.use(first)
    parts = kept(ledger, 1, 0, 1)
    ledger.release(first)
    batch(ledger, 5)
    assert fetch(ledger) == keys(5)[0]
    assert ledger.are_present(parts)
    assert not ledger.is_present(first[0])
    ledger.unkeep(parts[0])
    batch(ledger, 6)
    fetch(ledger)
    assert [ledger.is_present(part) for part in parts] == [False, True]


def test_making_room_does_not_look_at_all_that_is_there() -> None:
    """A large budget is full of what nobody needs, and each part that comes takes the place of one of these."""

    def lines_for_one_more(parts: int) -> int:
        ledger = PartLedger(10 * parts)
        for number in range(parts):
            used = batch(ledger, number)
            fetch(ledger)
            ledger.use(used)
            ledger.release(used)
        batch(ledger, parts)
        return lines_of(lambda: fetch(ledger))

    assert lines_for_one_more(1000) < 2 * lines_for_one_more(10)
