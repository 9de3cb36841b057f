from functools import partial

import numpy as np
import order_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.order.lanes import SlidingShuffle
from streamload.order.randomness import philox_key

KEY = philox_key(1, 0, "window")
small_blocks = partial(SlidingShuffle, first_block=3, full_blocks=(8, 32))
"""So that short lanes cross many blocks."""


def hashed_draws(first: int, count: int) -> np.ndarray:
    return oracle.drawn(KEY, 0, first, count)


def coarse_draws(first: int, count: int) -> np.ndarray:
    """Few distinct values, so that many keys are equal."""
    return np.floor(oracle.drawn(KEY, 0, first, count) * 4) / 4


def stream(draws, window: int, length: int, first_number: int = 0) -> SlidingShuffle:
    made = small_blocks(draws, window, first_number)
    made.grow(length, True)
    return made


def outputs(draws, window: int, length: int, first_number: int = 0) -> list[int]:
    return stream(draws, window, length, first_number).take(np.arange(first_number, length)).tolist()


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 200), st.sampled_from([hashed_draws, coarse_draws]))
def test_outputs_are_in_the_order_of_keys(length, window, draws):
    assert outputs(draws, window, length) == oracle.lane_outputs(draws(0, length).tolist(), window)


@pytest.mark.parametrize("draws", [hashed_draws, coarse_draws])
@pytest.mark.parametrize("window", [0, 1, 7, 50, 400])
def test_stream_started_anywhere_is_the_tail_of_the_whole(draws, window):
    whole = outputs(draws, window, 300)
    for first in range(0, 301, 7):
        assert outputs(draws, window, 300, first) == whole[first:]


@settings(deadline=None)
@given(st.data())
def test_numbers_may_be_skipped(data):
    window = data.draw(st.integers(0, 30))
    whole = outputs(hashed_draws, window, 300)
    made = stream(hashed_draws, window, 300)
    numbers = sorted(data.draw(st.sets(st.integers(0, 299), max_size=12)))
    cut = data.draw(st.integers(0, len(numbers)))
    for part in (numbers[:cut], numbers[cut:]):
        assert made.take(np.array(part, np.int64)).tolist() == [whole[n] for n in part]


def test_a_far_jump_draws_no_more_than_two_windows_and_a_block():
    drawn = []

    def draws(first, count):
        drawn.extend(range(first, first + count))
        return hashed_draws(first, count)

    made = stream(draws, 20, 10**9)
    made.take(np.array([5]))
    drawn.clear()
    made.take(np.array([10**8]))
    assert min(drawn) == 10**8 - 20
    assert max(drawn) < 10**8 + 20 + 32


def test_the_same_far_out_wherever_the_stream_starts():
    far = 2 * 10**9
    first = stream(hashed_draws, 10_000, far + 10**6, far - 7).take(np.arange(far, far + 100)).tolist()
    second = stream(hashed_draws, 10_000, far + 10**6, far).take(np.arange(far, far + 100)).tolist()
    assert first == second
    assert len(set(first)) == 100


@settings(deadline=None)
@given(st.integers(1, 100), st.lists(st.integers(0, 20), max_size=30), st.sampled_from([hashed_draws, coarse_draws]))
def test_a_growing_lane_finalizes_exactly_what_no_later_sample_can_precede(window, steps, draws):
    length = sum(steps)
    keys = [p + u * window for p, u in enumerate(draws(0, length).tolist())]
    whole = oracle.lane_outputs(draws(0, length).tolist(), window)
    made, known_end, found = small_blocks(draws, window), 0, []
    for step in steps:
        known_end += step
        made.grow(known_end, False)
        finalized = made.finalize(10**6)
        assert finalized == sum(key <= known_end for key in keys[:known_end])
        found += made.take(np.arange(len(found), finalized)).tolist()
    made.grow(known_end, True)
    assert made.finalize(10**6) == length
    assert found + made.take(np.arange(len(found), length)).tolist() == whole
