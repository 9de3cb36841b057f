"""The window: what is needed sooner comes first, and what is in use is never freed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.fetch.window import PartWindow, part_key


def lines_of(action: Callable[[], object]) -> int:
    """The lines that an action runs, each as often as it is run; calls and returns count as lines too."""
    lines = 0

    def count(*_: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


def keys(*numbers: int) -> list[int]:
    return [part_key(0, number) for number in numbers]


def batch(window: PartWindow, *numbers: int) -> list[int]:
    wanted = keys(*numbers)
    window.plan(wanted)
    return wanted


def fetch(window: PartWindow, size: int = 10) -> int | None:
    """Fetch the next part if there is room; its number."""
    key = next(iter(window.missing), None)
    dropped = None if key is None else window.room_for(key, size)
    if key is None or dropped is None:
        return None
    for each in dropped:
        window.drop(each)
    window.admit(key, size)
    window.arrive(key, size)
    return key


@settings(deadline=None)
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
            planned.append(batch(window, *left.pop(0)))
        while fetch(window) is not None:
            assert window.used_bytes <= window.budget_bytes
        if planned and window.are_present(planned[0]):
            window.hold(planned[0])
            window.unplan(planned[0])
            dealt.append(planned.pop(0))
        else:
            assert dealt, "nothing is in flight, and the next batch is not served"
        for each in dealt:
            assert window.are_present(each), "what is in use was freed"
        if dealt and (not planned or data.draw(st.booleans()) or not window.are_present(planned[0])):
            window.release(dealt.pop(0))
    assert not window.missing.ranks
    window.plan(keys(99))
    assert window.room_for(*keys(99), window.budget_bytes) is not None


def test_making_room_does_not_look_at_all_that_is_there() -> None:
    """A large budget is full of what nobody needs, and each part that comes takes the place of one of these."""

    def lines_for_one_more(parts: int) -> int:
        window = PartWindow(10 * parts)
        for number in range(parts):
            used = batch(window, number)
            fetch(window)
            window.hold(used)
            window.unplan(used)
            window.release(used)
        batch(window, parts)
        return lines_of(lambda: fetch(window))

    assert lines_for_one_more(1000) < 2 * lines_for_one_more(10)
