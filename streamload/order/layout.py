"""The shards of one epoch concatenated: from a position to the shard and the sample that lie there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from streamload.order.randomness import CounterDraws, as_uniforms
from streamload.text import counted

UNKNOWN = -1
ENDLESS = 1 << 62
"""The end of what has no end yet."""

_SHARDS_PER_STEP = 4_096
_WORTH_COUNTING = 4


class ShardCounts:
    """How many samples each shard holds, as far as known; filled in while shards are scanned.

    A shard whose count is unknown may be known to hold some samples at least: those that were found so far. Shards
    are named by their number in the listing.
    """

    def __init__(self, n_shards: int) -> None:
        self._values = np.full(n_shards, UNKNOWN, np.int64)
        self._n_unknown = n_shards
        self.values: NDArray[np.int64] = self._values.view()
        """int64[n_shards], -1 where unknown; read-only, and kept up to date by `set`."""
        self.values.flags.writeable = False
        self._least: dict[int, int] = {}
        self.changes = 0
        """How often something has become known: plans that wait for counts may go on when it is another number."""

    @classmethod
    def of(cls, counts: Iterable[int]) -> ShardCounts:
        """The counts of all shards, known from the start (for example from an index).

        Raises:
            ValueError: a count is negative.
        """
        known = np.fromiter(counts, np.int64)
        if bool((known < 0).any()):
            raise ValueError(
                f"a shard cannot hold {counted(int(known.min()), 'sample')}; leave unknown counts out with set()"
            )
        made = cls(len(known))
        made._values[:] = known
        made._n_unknown = 0
        return made

    def __len__(self) -> int:
        """The number of shards."""
        return len(self._values)

    def set(self, shard: int, count: int) -> None:
        """Record what a scan found. Idempotent.

        Raises:
            ValueError: the count is negative, or is not the one recorded before, or fewer than were found before.
        """
        known = int(self._values[shard])
        if count < self.least(shard):
            raise ValueError(f"shard {shard} cannot hold {counted(count, 'sample')}")
        if known not in (UNKNOWN, count):
            raise ValueError(f"shard {shard} was known to hold {counted(known, 'sample')} and now holds {count}")
        self._values[shard] = count
        self.changes += 1
        self._n_unknown -= known == UNKNOWN
        self._least.pop(shard, None)

    def at_least(self, shard: int, count: int) -> None:
        """Record that a shard holds so many samples, and perhaps more. Where its count is known this says nothing.

        Raises:
            ValueError: fewer than were found before, or more than the shard holds.
        """
        known = int(self._values[shard])
        if known == UNKNOWN and count >= self.least(shard):
            self._least[shard] = count
            self.changes += 1
        elif count < 0 or count > known:
            raise ValueError(f"shard {shard} cannot hold {counted(count, 'sample')} or more")

    def least(self, shard: int) -> int:
        """How many samples of a shard of unknown count were found so far; 0 where the count is known."""
        return self._least.get(shard, 0)

    @property
    def complete(self) -> bool:
        """Whether the counts of all shards are known."""
        return self._n_unknown == 0

    @property
    def total(self) -> int:
        """The number of samples in all shards.

        Raises:
            RuntimeError: some counts are unknown.
        """
        if not self.complete:
            raise RuntimeError(f"the counts of {self._n_unknown} of {counted(len(self), 'shard')} are unknown")
        return int(self._values.sum())


class ShardSequence:
    """The shards in an epoch's order, concatenated as far as their counts are known.

    The first shard of unknown count is built in part: as many samples as were found of it so far.

    Attributes:
        order: int64[n_shards], the shards as they follow each other.
        known_shards: how many shards, from the first on, are built whole.
        known_end: how many samples are built, those of the open last shard among them.
    """

    needs_all = False
    has_repeats = False

    def __init__(self, order: NDArray[np.int64], counts: ShardCounts, key: NDArray[np.uint64]) -> None:
        self.order = order
        self.known_shards = 0
        self.known_end = 0
        self._counts = counts
        self._edges = np.zeros(len(order) + 1, np.int64)
        self._place: NDArray[np.int64] | None = None
        self._draws = CounterDraws(key)
        self.extend()

    @property
    def complete(self) -> bool:
        """Whether all shards are built, so that `known_end` is the number of samples of the epoch."""
        return self.known_shards == len(self.order)

    @property
    def edges(self) -> NDArray[np.int64]:
        """int64[known_shards + 1], shard `order[i]` lies at the positions `edges[i]:edges[i + 1]`.

        An open last shard begins at the last edge and has no end here.
        """
        return self._edges[: self.known_shards + 1]

    @property
    def whole_end(self) -> int:
        """How many samples the shards hold that are built whole."""
        return int(self._edges[self.known_shards])

    def places_of(self, shard: int) -> list[tuple[int, int]] | None:
        """Where a shard's samples lie, as start and end; None if none are built. The open last shard has no end."""
        if self._place is None:
            self._place = np.empty(len(self.order), np.int64)
            self._place[self.order] = np.arange(len(self.order))
        place = int(self._place[shard])
        if place > self.known_shards or (place == self.known_shards and self.known_end == self.whole_end):
            return None
        return [(int(self._edges[place]), ENDLESS if place == self.known_shards else int(self._edges[place + 1]))]

    def samples_at(self, start: int, end: int) -> tuple[int, int]:
        """The samples of a shard, as start and end, that stand at positions of it."""
        place = int(np.searchsorted(self.edges, start, side="right")) - 1
        shard_start = int(self._edges[place])
        return start - shard_start, end - shard_start

    def extend(self) -> None:
        """Append the shards whose counts have become known, and as much of the next one as was found."""
        while not self.complete:
            start = self.known_shards
            if self._counts.values[self.order[start]] == UNKNOWN:
                self.known_end = self.whole_end + self._counts.least(int(self.order[start]))
                self._edges[start + 1] = self.known_end
                return
            values = self._counts.values[self.order[start : start + _SHARDS_PER_STEP]]
            unknown = np.flatnonzero(values == UNKNOWN)
            values = values[: unknown[0]] if len(unknown) else values
            end = start + len(values)
            self._edges[start + 1 : end + 1] = self.whole_end + np.cumsum(values)
            self.known_shards, self.known_end = end, int(self._edges[end])

    def unknown(self, n_shards: int, limit: int) -> list[int]:
        """The shards of unknown count among the next `n_shards` not built whole, in order, at most `limit`."""
        following = self.order[self.known_shards : self.known_shards + n_shards]
        unknown: NDArray[np.int64] = following[self._counts.values[following] == UNKNOWN]
        return [int(shard) for shard in unknown[:limit]]

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each position (below `known_end`) the shard and the number of the sample in the shard, int64 each."""
        edges = self.edges
        index = np.searchsorted(edges, positions, side="right") - 1
        return self.order[index], positions - edges[index]

    def repeats(self, _positions: NDArray[np.int64]) -> None:
        """No sample comes twice."""

    def uniforms(self, first: int, count: int) -> NDArray[np.float64]:
        """One draw in [0, 1) for each of the positions `first` to `first + count`, float64[count].

        A draw belongs to the sample (shard, number in shard) and not to the position.
        """
        words = np.empty(count, np.uint64)
        end = first + count
        first_shard, end_shard = np.searchsorted(self.edges, (first, end), side="right").tolist()
        shards = self.order[first_shard - 1 : end_shard].tolist()
        edges = self._edges[first_shard - 1 : end_shard + 1].tolist()
        for shard, shard_start, shard_end in zip(shards, edges[:-1], edges[1:], strict=True):
            drawn_start, drawn_end = max(shard_start, first), min(shard_end, end)
            if drawn_start < drawn_end:
                words[drawn_start - first : drawn_end - first] = self._draws.words(
                    shard, drawn_start - shard_start, drawn_end - drawn_start
                )
        return as_uniforms(words)


def distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the different ones of numbers that are not negative, ascending.

    As `np.unique`, which imports `numpy.ma`: 20 ms of each process before its first batch.
    """
    if len(numbers) and int(numbers.max()) < _WORTH_COUNTING * len(numbers):
        return np.flatnonzero(np.bincount(numbers))
    ascending = np.sort(numbers)
    return np.concatenate((ascending[:1], ascending[1:][np.diff(ascending) > 0]))
