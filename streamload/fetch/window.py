"""Divide shards into parts, and decide which part to fetch next and which to evict for it."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

PART_BYTES = 8 << 20
"""Size of all parts of an uncompressed shard but the last. Larger parts would need fewer requests, each with its
latency; smaller ones would be released sooner, since a part is held as long as one of its samples is needed."""

NUMBER_BITS = 32
"""Bits of a part's number in its key, below those of the shard."""


def part_key(shard: int, number: int) -> int:
    """Return an integer that identifies a shard's part."""
    return shard << NUMBER_BITS | number


def shard_and_number(key: int) -> tuple[int, int]:
    """Return a key's shard, and the part's number."""
    return key >> NUMBER_BITS, key & (1 << NUMBER_BITS) - 1


def part_edges(number: int, shard_bytes: int | None) -> tuple[int, int]:
    """Return a part's start and end, clipped to the shard if its size is known."""
    start = number * PART_BYTES
    end = start + PART_BYTES
    return start, end if shard_bytes is None else min(end, shard_bytes)


# Turns, in ascending order: held parts, planned batches (each with a turn for every part), scans, unneeded parts.
_HELD = 0
_FIRST_BATCH, _TURNS_OF_BATCH = 1, 1 << 20
_FIRST_SCAN = 1 << 60
LAST = (1 << 62) - 1
"""The turn of a part that is needed after all others."""
_NEVER = 1 << 62

# A heap may hold this many more outdated entries than current ones.
_MOST_OUTDATED = 64


def raise_first(errors: Mapping[int, Exception], numbers: Iterable[int]) -> None:
    """Raise the error of the first number that has one."""
    for number in numbers if errors else ():
        if number in errors:
            raise errors[number].with_traceback(None)  # a traceback would grow each time


class _Queue:
    """Yield parts in the order of their ranks, from a heap that may also hold outdated entries.

    Attributes:
        ranks: the current rank of each part.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def put(self, key: int, rank: tuple[int, int]) -> None:
        if self.ranks.get(key) == rank:
            return
        self.ranks[key] = rank
        if len(self._heap) > 2 * len(self.ranks) + _MOST_OUTDATED:
            self._heap = [(rank, key) for key, rank in self.ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def __iter__(self) -> Iterator[int]:
        """Yield the parts, lowest rank first; the queue must not change meanwhile."""
        popped: list[tuple[tuple[int, int], int]] = []
        try:
            while self._heap:
                rank, key = entry = heapq.heappop(self._heap)
                # An entry occurs twice if the rank was changed and changed back.
                if self.ranks.get(key) == rank and entry not in popped[-1:]:
                    popped.append(entry)
                    yield key
        finally:
            for entry in popped:
                heapq.heappush(self._heap, entry)


class PartWindow:
    """Track the parts that are present, in flight or needed, by their keys.

    A part's *turn* is its next use: now, if it is *held*; else the first planned batch that needs it; else a scan of
    its shard, after all batches; else never. The missing part with the first turn is fetched next. Only parts of later
    turns are evicted for it, the last turn first; among unneeded parts, the longest unneeded first. Parts in memory
    stay as long as there is room.

    Args:
        budget_bytes: maximum bytes of present and in-flight parts.

    Attributes:
        used_bytes: the bytes of all present and in-flight parts.
        sizes: the bytes of each present or in-flight part.
        present: the parts in memory, or in a file.
        of_shard: the present and in-flight parts of each shard.
        kept: present parts that rows of a scanned shard will need, with their turns for eviction.
        missing: needed parts that are neither present, in flight nor failed, by turn: the first is fetched next.
        free: unneeded present parts that take no memory; to be dropped.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.sizes: dict[int, int] = {}
        self.present: set[int] = set()
        self.of_shard: dict[int, set[int]] = {}
        self._errors: dict[int, Exception] = {}
        # The needs of parts, which determine their turns.
        self._holds: Counter[int] = Counter()
        self._turns = itertools.count(_FIRST_BATCH, _TURNS_OF_BATCH)
        self._planned: dict[int, deque[int]] = {}  # ascending
        self._requested: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        # Derived from the needs, by `_update` alone.
        self.missing = _Queue()
        self.free: set[int] = set()
        self._evictable = _Queue()
        self._clock = itertools.count()

    def are_present(self, keys: Iterable[int]) -> bool:
        """Return True if all these parts are present; raise the error of a failed one."""
        raise_first(self._errors, keys)
        return self.present.issuperset(keys)

    def turn_of(self, key: int) -> int:
        """Return a part's turn, for comparison with other parts."""
        if key in self._holds:
            return _HELD
        planned = self._planned.get(key)
        return min(planned[0] if planned else _NEVER, self._requested.get(key, _NEVER))

    # -- needs -----------------------------------------------------------------------------------------------------

    def plan(self, keys: Iterable[int]) -> None:
        """Append to the plan a batch that needs these parts in this order."""
        turn = next(self._turns)
        for number, key in enumerate(keys):
            self._planned.setdefault(key, deque()).append(turn + min(number, _TURNS_OF_BATCH - 1))
            self._update(key)

    def unplan(self, keys: Iterable[int], index: int = 0) -> None:
        """Undo a `plan` of parts: the first (0) once its batch holds them, the last (-1) if its batch is cancelled."""
        for key in keys:
            turns = self._planned[key]
            del turns[index]
            if not turns:
                del self._planned[key]
            self._update(key)

    def hold(self, keys: Iterable[int]) -> None:
        """Hold parts, until `release` has been called as often."""
        for key in keys:
            self._holds[key] += 1
            self._update(key)

    def release(self, keys: Iterable[int]) -> None:
        """Undo `hold` once."""
        for key in keys:
            self._holds[key] -= 1
            if self._holds[key] <= 0:
                del self._holds[key]
            self._update(key)

    def request(self, key: int, scan: int | None) -> None:
        """Request a part for a scan (later scans have larger numbers), or, with None, after all else. Idempotent."""
        self._requested[key] = LAST if scan is None else _FIRST_SCAN + scan
        self._update(key)

    def withdraw(self, key: int) -> None:
        """Undo `request`, if any."""
        self._requested.pop(key, None)
        self._update(key)

    def keep(self, key: int, scan: int) -> None:
        """Keep a present part for the rows of a scan, until a part of an earlier turn needs the room."""
        self.kept[key] = _FIRST_SCAN + scan
        self._update(key)

    def unkeep(self, key: int) -> None:
        """Undo `keep`, if any."""
        self.kept.pop(key, None)
        self._update(key)

    def unkeep_all(self) -> None:
        """Undo every `keep`."""
        for key in list(self.kept):
            self.unkeep(key)

    # -- arrival and eviction --------------------------------------------------------------------------------------

    def evictable(self, key: int) -> Iterator[int]:
        """Yield the parts that may be evicted for a part: those of later turns, last first."""
        turn = self.turn_of(key)
        for other in self._evictable:
            if -self._evictable.ranks[other][0] <= turn:
                return
            yield other

    def room_for(self, key: int, size_bytes: int) -> list[int] | None:
        """Return the parts to evict for a part of a given size; None if it cannot fit."""
        lacking_bytes = self.used_bytes + size_bytes - self.budget_bytes
        evicted: list[int] = []
        if lacking_bytes <= 0 or not size_bytes:
            return evicted
        for each in self.evictable(key):
            lacking_bytes -= self.sizes[each]
            evicted.append(each)
            if lacking_bytes <= 0:
                return evicted
        return None

    def admit(self, key: int, size_bytes: int) -> None:
        """Count a part as in flight, or add bytes to a part in flight."""
        self.sizes[key] = self.sizes.get(key, 0) + size_bytes
        self.of_shard.setdefault(shard_and_number(key)[0], set()).add(key)
        self.used_bytes += size_bytes
        self._update(key)

    def arrive(self, key: int, size_bytes: int) -> None:
        """Mark a part in flight as present, with its actual size."""
        self.used_bytes += size_bytes - self.sizes[key]
        self.sizes[key] = size_bytes
        self.present.add(key)
        if self._requested.get(key) == LAST:
            del self._requested[key]
        self._update(key)

    def drop(self, key: int) -> None:
        """Remove a part that is present or in flight; a needed part is fetched again at its turn."""
        shard = shard_and_number(key)[0]
        self.kept.pop(key, None)
        self.present.discard(key)
        if key in self.sizes:
            self.used_bytes -= self.sizes.pop(key)
            self.of_shard[shard].discard(key)
            if not self.of_shard[shard]:
                del self.of_shard[shard]
        self._update(key)

    def fail(self, key: int, error: Exception) -> None:
        """Mark a part as failed; it is not retried until `retry_failed`."""
        self._errors[key] = error
        self.drop(key)

    def retry_failed(self) -> None:
        """Clear errors, so that failed parts are fetched again if they are needed."""
        failed = list(self._errors)
        self._errors.clear()
        for key in failed:
            self._update(key)

    def _update(self, key: int) -> None:
        """Requeue a part after its needs or its presence changed."""
        turn = self.turn_of(key)
        self.free.discard(key)
        if turn == _NEVER or key in self.sizes or key in self._errors:
            self.missing.ranks.pop(key, None)
        else:
            self.missing.put(key, (turn, key))
        if turn == _HELD or key not in self.present:
            self._evictable.ranks.pop(key, None)
            return
        turn = min(turn, self.kept.get(key, _NEVER))
        if turn != _NEVER:
            self._evictable.put(key, (-turn, -key))
            return
        if not self.sizes[key]:
            self.free.add(key)
        if self._evictable.ranks.get(key, (0, 0))[0] != -_NEVER:  # else it keeps its place among the unneeded parts
            self._evictable.put(key, (-_NEVER, next(self._clock)))
