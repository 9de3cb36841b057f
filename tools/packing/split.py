"""Which image goes into which split, and in which order; pure and repeatable.

Randomness comes from the raw output of NumPy's Philox, which NumPy keeps the same between its versions, unlike the
methods of `Generator`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPLIT_NAME", "order_of", "parse_split", "permutation", "split_by_class"]

SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""What a split may be called, since its folder is called so."""

_ORDER, _SPLIT = 0, 1  # what a stream of random numbers is for


def parse_split(text: str) -> dict[str, float]:
    """`train=0.9,val=0.1` to names and fractions.

    Raises:
        ValueError: something else; the message says what.
    """
    fractions: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        if not equals or not SPLIT_NAME.fullmatch(name):
            raise ValueError(f"{part.strip()!r} is not of the form NAME=FRACTION, as in train=0.9,val=0.1")
        try:
            fraction = float(number)
        except ValueError:
            raise ValueError(f"the fraction of {name!r} is {number!r}, which is no number") from None
        if not 0 <= fraction <= 1:
            raise ValueError(f"the fraction of {name!r} is {number}, and must be between 0 and 1")
        if name in fractions:
            raise ValueError(f"the split {name!r} comes twice")
        fractions[name] = fraction
    total = sum(fractions.values())
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise ValueError(f"the fractions add up to {total:g}, and must add up to 1")
    return fractions


def permutation(count: int, seed: int, *stream: int) -> NDArray[np.int64]:
    """int64[count], a permutation of `range(count)` that depends on the seed and on the stream's numbers alone."""
    words = np.array([*stream, 0, 0, 0][:4], np.uint64)
    raw = np.random.Philox(key=np.array([seed, 0x5348415244494659], np.uint64), counter=words).random_raw(count)
    return np.argsort(raw, kind="stable")


def order_of(count: int, seed: int) -> NDArray[np.int64]:
    """int64[count], the shuffled order in which samples are packed."""
    return permutation(count, seed, 0, 0, 0, _ORDER)


def split_by_class(labels: Sequence[int], fractions: Mapping[str, float], seed: int) -> dict[str, list[int]]:
    """Divide the samples of each class at random, each split getting its share of each class.

    A class with at least as many samples as there are splits of nonzero fraction gives each of those at least one.

    Args:
        labels: the class of each sample.
        fractions: the share of each split; they add up to 1.
        seed: 64 bits; equal seeds give equal splits.

    Returns:
        For each split the positions in `labels`, ascending.
    """
    chosen: dict[str, list[int]] = {name: [] for name in fractions}
    if not labels:
        return chosen
    all_labels = np.asarray(labels, np.int64)
    by_class = np.argsort(all_labels, kind="stable")
    found, starts = np.unique(all_labels[by_class], return_index=True)
    for label, members in zip(found.tolist(), np.split(by_class, starts[1:]), strict=True):
        shuffled = members[permutation(len(members), seed, 0, 0, label % 2**64, _SPLIT)]
        taken = 0
        for name, share in zip(fractions, _shares(len(members), list(fractions.values())), strict=True):
            chosen[name] += shuffled[taken : taken + share].tolist()
            taken += share
    return {name: sorted(positions) for name, positions in chosen.items()}


def _shares(count: int, fractions: list[float]) -> list[int]:
    """Whole numbers that add up to `count`, near `count * fraction`, none of them 0 if that is possible."""
    quotas = [count * fraction for fraction in fractions]
    least = [1 if fraction > 0 and count >= sum(f > 0 for f in fractions) else 0 for fraction in fractions]
    shares = [max(low, math.floor(quota + 1e-9)) for low, quota in zip(least, quotas, strict=True)]
    numbers = range(len(fractions))
    while sum(shares) > count:
        shares[max((n for n in numbers if shares[n] > least[n]), key=lambda n: shares[n] - quotas[n])] -= 1
    while sum(shares) < count:
        shares[max((n for n in numbers if fractions[n] > 0), key=lambda n: quotas[n] - shares[n])] += 1
    return shares
