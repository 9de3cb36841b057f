"""Means, deviations and histograms of numbers that come in pieces, against NumPy over all of them."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from streamload_tools.moments import Moments

RANDOM = np.random.default_rng(0)


def in_pieces(values: NDArray[Any], cuts: list[int]) -> Moments:
    pieces = [piece for piece in np.split(values, sorted(cut % len(values) for cut in cuts)) if len(piece)]
    return reduce(Moments.merged, map(Moments.of, pieces))


@pytest.mark.parametrize(
    "values",
    [
        RANDOM.integers(0, 256, (3000, 3), dtype=np.uint8),
        RANDOM.integers(100, 120, (3000, 3), dtype=np.uint8),
        RANDOM.integers(-(2**15), 2**15, (3000, 1)).astype(np.int16),
        RANDOM.integers(0, 2, (3000, 1)).astype(bool),
        1e8 + RANDOM.normal(size=(3000, 1)),
        (1e8 + RANDOM.normal(size=(3000, 2))).astype(np.float32),
        1e-30 * RANDOM.lognormal(size=(3000, 1)),
        np.full((3000, 1), -3.25),
        np.zeros((3000, 1), np.float16),
        np.concatenate([RANDOM.normal(size=(1500, 1)), 1e30 * RANDOM.normal(size=(1500, 1))]),
    ],
)
def test_pieces_give_what_numpy_says_of_all(values: NDArray[Any]) -> None:
    numbers = values.astype(np.float64)
    for cuts in ([], [7], list(range(1, 3000, 41))):
        found = in_pieces(values, cuts)
        assert found.count.tolist() == [3000] * values.shape[1]
        np.testing.assert_allclose(found.mean, numbers.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.std, numbers.std(0), rtol=1e-6)
        assert found.least.tolist() == numbers.min(0).tolist()
        assert found.most.tolist() == numbers.max(0).tolist()
        for channel in range(found.channels):
            width = np.ldexp(1.0, int(found.exponent[channel]))
            edges = (found.first[channel] + np.arange(257)) * width
            assert found.bins[channel].tolist() == np.histogram(numbers[:, channel], edges)[0].tolist()


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=2, max_size=40),
    st.lists(st.integers(0, 1000), max_size=5),
)
def test_histograms_do_not_depend_on_the_pieces(numbers: list[float], cuts: list[int]) -> None:
    values = np.array(numbers)[:, None]
    found, whole = in_pieces(values, cuts), Moments.of(values)
    assert found.bins.sum() == len(numbers)
    assert (found.least, found.most) == (whole.least, whole.most)
    if found.exponent == whole.exponent:
        assert (found.first, found.bins.tolist()) == (whole.first, whole.bins.tolist())


def test_what_is_not_finite_is_counted_and_nothing_else() -> None:
    found = in_pieces(np.array([[1.0], [np.nan], [3.0], [np.inf], [-np.inf]]), [1, 2])
    assert (found.count.tolist(), found.not_finite.tolist()) == ([2], [3])
    assert (found.mean.tolist(), found.std.tolist()) == ([2.0], [1.0])
    nothing = Moments.of(np.array([[np.nan]]))
    assert nothing.merged(nothing).count.tolist() == [0]


def test_bytes_get_a_bin_each() -> None:
    values = RANDOM.integers(0, 256, (5000, 1), dtype=np.uint8)
    found = in_pieces(values, [100, 1000])
    assert (found.exponent.tolist(), found.first.tolist()) == ([0], [0])
    assert found.bins[0].tolist() == np.bincount(values[:, 0], minlength=256).tolist()


def test_json_keeps_every_bit() -> None:
    found = Moments.of(RANDOM.normal(size=(100, 2)))
    assert Moments.from_json(found.as_json()).as_json() == found.as_json()


@pytest.mark.parametrize("values", [np.array([["a"]]), np.array([[1j]])])
def test_other_values_than_numbers_are_refused(values: NDArray[Any]) -> None:
    with pytest.raises(TypeError, match="no real numbers"):
        Moments.of(values)
