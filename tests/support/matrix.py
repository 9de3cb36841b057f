"""Which combinations of parameters are tested always: few, in which every two values still meet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def matrix(parameters: Iterable[tuple[Any, ...]]) -> list[Any]:
    """All of these combinations, for `parametrize`; those that bring no new pair of values are marked `exhaustive`.

    So every value of every parameter is tested always, and so is each pair of values of two parameters that occurs in
    any of them. Combinations of three are tested by `make test-all`.
    """
    left = list(parameters)
    found, met = [], set[Any]()
    while left:
        best = max(left, key=lambda values: len(_pairs(values) - met))  # of equals the first, so the same each time
        left.remove(best)
        found.append(best if _pairs(best) - met else exhaustive(best))
        met |= _pairs(best)
    return found


def exhaustive(values: tuple[Any, ...]) -> Any:
    """A combination that is tested by `make test-all` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def _pairs(values: tuple[Any, ...]) -> set[Any]:
    named = [(place, repr(value)) for place, value in enumerate(values)]
    return set(combinations(named, 2))


EVERY = pytest.mark.parametrize("every", [19, exhaustive((1,))])
"""Of a long row of places every 19th is tested always (which comes round to every place in a block), else all."""
