"""Derive randomness from counters: every draw is a pure function of seed, epoch, purpose and counter.

The generator is Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
which maps a key of two words and a counter of four words to four random words. The order uses only these raw words,
which the paper fixes; the methods of `numpy.random.Generator` may change between versions of NumPy.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORDS_PER_COUNTER = 4
_TO_UNIT_INTERVAL = 2.0**-53


def philox_key(seed: int, epoch: int, purpose: str) -> NDArray[np.uint64]:
    """Return the key (two words) for one purpose in one epoch: a BLAKE2b digest, equal on every platform."""
    text = f"streamload order 1|{int(seed)}|{int(epoch)}|{purpose}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


class CounterDraws:
    """A Philox generator that can be set to any counter, at a seventh of the cost of a new generator."""

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self.bits = np.random.Philox(key=key)
        self._counter = [0] * _WORDS_PER_COUNTER
        self._state: Any = {  # in lists, which NumPy reads faster than arrays
            **self.bits.state,
            "state": {"counter": self._counter, "key": key.tolist()},
            "buffer": [0] * _WORDS_PER_COUNTER,
            "buffer_pos": _WORDS_PER_COUNTER,  # nothing is buffered: the next draw starts at the counter
        }

    def set_counter(self, low: int, second: int, third: int = 0, fourth: int = 0) -> None:
        """Set the counter; the next draw starts there."""
        self._counter[:] = low, second, third, fourth
        self.bits.state = self._state

    def words(self, shard: int, first: int, count: int, pass_number: int = 0) -> NDArray[np.uint64]:
        """Return one random word for each of `count` samples of a shard, from sample `first` on, uint64[count]."""
        block, offset = divmod(first, _WORDS_PER_COUNTER)
        self.set_counter(block, shard, pass_number)
        return self.bits.random_raw(offset + count)[offset:]


def as_uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the upper 53 bits of each word as a float64 in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * _TO_UNIT_INTERVAL


def permutation(seed: int, epoch: int, n: int, purpose: str = "shards") -> NDArray[np.int64]:
    """Return a permutation of `range(n)` for one epoch, int64[n]: the stable argsort of n random words."""
    draws = CounterDraws(philox_key(seed, epoch, purpose))
    draws.set_counter(0, 0)
    return np.argsort(draws.bits.random_raw(n), kind="stable").astype(np.int64, copy=False)


class SampleRandomness:
    """Seed each sample's transform in one epoch, independently of workers, ranks and order.

    A sample is identified by its shard's number in the listing, its number in the shard, and how often it occurred
    earlier in the epoch.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._for_generator = CounterDraws(philox_key(seed, epoch, "transform generator"))
        self._for_seeds = CounterDraws(philox_key(seed, epoch, "transform seeds"))
        self._generator = np.random.Generator(self._for_generator.bits)

    def generator(self, shard: int, sample: int, repeat: int = 0) -> np.random.Generator:
        """Return the sample's generator: one shared object, which the next call sets to another sample."""
        self._for_generator.set_counter(0, sample, shard, repeat)
        return self._generator

    def seeds(self, shard: int, sample: int, repeat: int = 0) -> tuple[int, int, int]:
        """Return the sample's seeds for `random` (64 bits), NumPy's legacy functions (32 bits) and torch (63 bits)."""
        self._for_seeds.set_counter(0, sample, shard, repeat)
        python, legacy, torch = self._for_seeds.bits.random_raw(3).tolist()
        return python, legacy >> 32, torch >> 1
