"""The shards of one epoch concatenated: from a position to the shard and the sample that lie there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from streamload.order.randomness import CounterDraws, as_uniforms
from streamload.text import counted

IntArray = NDArray[np.int64]

UNKNOWN = -1
ENDLESS = 1 << 62
"""An end that is not known yet."""

_SHARDS_PER_STEP = 4_096
_WORTH_COUNTING = 4


class ShardCounts:
    """The number of samples in each shard, by its number in the listing; filled in while shards are scanned.

    Attributes:
        values: int64[n_shards], -1 if unknown; read-only, and kept up to date by `set`.
        changes: grows whenever something has become known: plans that wait for counts may go on.
    """

    def __init__(self, n_shards: int) -> None:
        self._values = np.full(n_shards, UNKNOWN, np.int64)
        self._n_unknown = n_shards
        self.values: IntArray = self._values.view()
        self.values.flags.writeable = False
        self._least: dict[int, int] = {}
        self.changes = 0

    @classmethod
    def of(cls, counts: Iterable[int]) -> ShardCounts:
        """Make the counts of shards that are all known, from an index for example."""
        known = np.fromiter(counts, np.int64)
        made = cls(len(known))
        made._values[:] = known
        made._n_unknown = 0
        return made

    def __len__(self) -> int:
        """The number of shards."""
        return len(self._values)

    def set(self, shard: int, count: int) -> None:
        """Record the count of a scanned shard. Idempotent.

        Raises:
            ValueError: another count was recorded before, or more samples were found.
        """
        known = int(self._values[shard])
        if known not in (UNKNOWN, count) or count < self.least(shard):
            raise ValueError(f"shard {shard} cannot hold {counted(count, 'sample')}: other counts were found before")
        self._values[shard] = count
        self.changes += 1
        self._n_unknown -= known == UNKNOWN
        self._least.pop(shard, None)

    def at_least(self, shard: int, count: int) -> None:
        """Record that a shard of unknown count holds some samples, and perhaps more.

        Raises:
            ValueError: more samples were found before, or the shard has fewer.
        """
        known = int(self._values[shard])
        if known == UNKNOWN and count >= self.least(shard):
            self._least[shard] = count
            self.changes += 1
        elif count < 0 or count > known:
            raise ValueError(f"shard {shard} cannot hold {counted(count, 'sample')} or more")

    def least(self, shard: int) -> int:
        """Return how many samples of a shard of unknown count were found so far; 0 if the count is known."""
        return self._least.get(shard, 0)

    @property
    def complete(self) -> bool:
        """Whether the counts of all shards are known."""
        return self._n_unknown == 0

    @property
    def total(self) -> int:
        """The number of samples in all shards; RuntimeError if some counts are unknown."""
        if not self.complete:
            raise RuntimeError(f"the counts of {self._n_unknown} of {counted(len(self), 'shard')} are unknown")
        return int(self._values.sum())


class ShardSequence:
    """The shards in an epoch's order, concatenated as far as their counts are known.

    The first shard of unknown count is built in part, with the samples that were found of it so far.

    Attributes:
        order: int64[n_shards], the shards as they follow each other.
        known_shards: the number of shards that are built whole, from the first on.
        edges: int64[known_shards + 1], shard `order[i]` lies at the positions `edges[i]:edges[i + 1]`.
        known_end: the number of samples that are built, those of the open last shard included.
        whole_end: the number of samples in the shards that are built whole.
        complete: all shards are built, so `known_end` is the number of samples of the epoch.
    """

    needs_all = False
    has_repeats = False

    def __init__(self, order: IntArray, counts: ShardCounts, key: NDArray[np.uint64]) -> None:
        self.order = order
        self.known_shards = 0
        self._counts = counts
        self._all_edges = np.zeros(len(order) + 1, np.int64)
        self._place: IntArray | None = None
        self._draws = CounterDraws(key)
        self.extend()

    def extend(self) -> None:
        """Append the shards whose counts have become known, and as much of the next one as was found."""
        start = self.known_shards
        while start < len(self.order):
            if self._counts.values[self.order[start]] == UNKNOWN:
                self._all_edges[start + 1] = self._all_edges[start] + self._counts.least(int(self.order[start]))
                break
            values = self._counts.values[self.order[start : start + _SHARDS_PER_STEP]]
            unknown = np.flatnonzero(values == UNKNOWN)
            values = values[: unknown[0]] if len(unknown) else values
            end = start + len(values)
            self._all_edges[start + 1 : end + 1] = self._all_edges[start] + np.cumsum(values)
            start = end
        self.known_shards, self.complete = start, start == len(self.order)
        self.known_end = int(self._all_edges[min(start + 1, len(self.order))])
        self.edges = self._all_edges[: start + 1]
        self.whole_end = int(self.edges[-1])

    def unknown(self, n_shards: int, limit: int) -> list[int]:
        """Return the shards of unknown count among the next `n_shards` not built whole, in order, at most `limit`."""
        following = self.order[self.known_shards : self.known_shards + n_shards]
        unknown: IntArray = following[self._counts.values[following] == UNKNOWN]
        return [int(shard) for shard in unknown[:limit]]

    def places_of(self, shard: int) -> list[tuple[int, int]] | None:
        """Return the start and end of a shard's samples; None if none are built. An open last shard is endless."""
        if self._place is None:
            self._place = np.empty(len(self.order), np.int64)
            self._place[self.order] = np.arange(len(self.order))
        place = int(self._place[shard])
        if place > self.known_shards or (place == self.known_shards and self.known_end == self.whole_end):
            return None
        return [(int(self.edges[place]), ENDLESS if place == self.known_shards else int(self.edges[place + 1]))]

    def samples_at(self, start: int, end: int) -> tuple[int, int]:
        """Return the samples of a shard, as start and end, that stand at positions of it."""
        shard_start = int(self.edges[int(np.searchsorted(self.edges, start, side="right")) - 1])
        return start - shard_start, end - shard_start

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return for each position (below `known_end`) the shard and the number of the sample in it, int64 each."""
        index = np.searchsorted(self.edges, positions, side="right") - 1
        return self.order[index], positions - self.edges[index]

    def repeats(self, _positions: IntArray) -> None:
        """Return None: no sample comes twice."""

    def uniforms(self, first: int, count: int) -> NDArray[np.float64]:
        """Draw from [0, 1) for each of the positions `first` to `first + count`, float64[count].

        A draw belongs to the sample (shard, number in shard) and not to the position.
        """
        words = np.empty(count, np.uint64)
        end = first + count
        first_shard, end_shard = np.searchsorted(self.edges, (first, end), side="right").tolist()
        shards = self.order[first_shard - 1 : end_shard].tolist()
        edges = self._all_edges[first_shard - 1 : end_shard + 1].tolist()
        for shard, shard_start, shard_end in zip(shards, edges[:-1], edges[1:], strict=True):
            drawn_start, drawn_end = max(shard_start, first), min(shard_end, end)
            if drawn_start < drawn_end:
                words[drawn_start - first : drawn_end - first] = self._draws.words(
                    shard, drawn_start - shard_start, drawn_end - drawn_start
                )
        return as_uniforms(words)


def distinct(numbers: IntArray) -> IntArray:
    """Return the different ones of numbers that are not negative, ascending.

    As `np.unique`, which imports `numpy.ma`: 20 ms of each process before its first batch.
    """
    if len(numbers) and int(numbers.max()) < _WORTH_COUNTING * len(numbers):
        return np.flatnonzero(np.bincount(numbers))
    ascending = np.sort(numbers)
    return np.concatenate((ascending[:1], ascending[1:][np.diff(ascending) > 0]))
