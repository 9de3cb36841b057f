"""The window: which parts are in memory or in flight, when each is needed next, and which makes room for which.

Nothing here reads, writes or waits.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from streamload.fetch.parts import shard_and_number

_HELD = 0
_AT_ONCE = 1
_SCANS = 1 << 60
_LAST = (1 << 62) - 1
_NEVER = 1 << 62
_MOST_STALE = 64

_PARTS_OF_BATCH = 1 << 20


def raise_first(errors: Mapping[int, Exception], numbers: Iterable[int]) -> None:
    """Raise the error of the first of some numbers that has one."""
    for number in numbers if errors else ():
        if number in errors:
            raise errors[number].with_traceback(None)  # it would grow each time


class _Queue:
    """Parts by rank, the least first: a heap that may hold outdated entries too.

    Attributes:
        ranks: the present rank of each part.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def put(self, key: int, rank: tuple[int, int]) -> None:
        """Add a part, or change its rank."""
        if self.ranks.get(key) == rank:
            return
        self.ranks[key] = rank
        if len(self._heap) > 2 * len(self.ranks) + _MOST_STALE:
            self._heap = [(rank, key) for key, rank in self.ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def discard(self, key: int) -> None:
        """Remove a part, or do nothing."""
        self.ranks.pop(key, None)

    def first(self) -> int | None:
        """Return the part of the least rank; None if there is none."""
        while self._heap:
            rank, key = self._heap[0]
            if self.ranks.get(key) == rank:
                return key
            heapq.heappop(self._heap)
        return None

    def __iter__(self) -> Iterator[int]:
        """Yield the parts by rank; they must not change meanwhile."""
        popped: list[tuple[tuple[int, int], int]] = []
        try:
            while (key := self.first()) is not None:
                entry = heapq.heappop(self._heap)
                if entry not in popped[-1:]:  # an entry comes twice if the rank has changed and changed back
                    popped.append(entry)
                    yield key
        finally:
            for entry in popped:
                heapq.heappush(self._heap, entry)


class PartWindow:
    """The parts, by their keys, that are present, in flight or needed.

    Each part has a *turn*, when it is needed next: now, if it is *held*; else for the first planned batch that needs
    it; else, after all of these, for the scan or the rows of its shard; else never. The missing part with the first
    turn is fetched next. Only parts of later turns are evicted for it: first those that are never needed, the longest
    unneeded first, then those of the last turn. While there is room everything stays.

    Args:
        budget_bytes: the most that parts present or in flight may take together, beside other uses of the budget.

    Attributes:
        used_bytes: what they take.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._present: set[int] = set()
        self._of_shard: dict[int, set[int]] = {}
        self._errors: dict[int, Exception] = {}
        self._changes: Counter[int] = Counter()
        # Why a part is needed: each of these is a turn, or several.
        self._holds: Counter[int] = Counter()
        self._turns = itertools.count()
        self._planned: dict[int, deque[int]] = {}  # ascending
        self._requested: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        # What follows from these, by `_update` alone.
        self._missing = _Queue()
        self._evictable = _Queue()
        self._free: set[int] = set()
        self._clock = itertools.count()

    @property
    def waiting(self) -> int:
        """How many parts are needed and not even in flight."""
        return len(self._missing.ranks)

    @property
    def free(self) -> list[int]:
        """The present parts that are never needed and take no memory; to be dropped."""
        return list(self._free)

    @property
    def shards_present(self) -> int:
        """The number of shards that have a part present or in flight."""
        return len(self._of_shard)

    def changes_of(self, shard: int) -> int:
        """How often a part of a shard has come or gone."""
        return self._changes[shard]

    def in_flight(self) -> set[int]:
        """Return the keys of the parts in flight."""
        return self._sizes.keys() - self._present

    def is_present(self, key: int) -> bool:
        """Return True if a part is in memory, or in a file."""
        return key in self._present

    def are_present(self, keys: Iterable[int]) -> bool:
        """Return True if all of some parts are; raises the error of one that has failed."""
        raise_first(self._errors, keys)
        return self._present.issuperset(keys)

    def turn_of(self, key: int) -> int:
        """Return when a part is needed next, to compare it with others."""
        if key in self._holds:
            return _HELD
        planned = self._planned.get(key)
        return planned[0] if planned else self._requested.get(key, _NEVER)

    def parts_of(self, shard: int) -> set[int]:
        """Return the keys of a shard's parts that are present or in flight."""
        return self._of_shard.get(shard, set())

    def uses(self, shard: int) -> bool:
        """Return True if a part of a shard is present, in flight, or missing."""
        return shard in self._of_shard or any(shard_and_number(key)[0] == shard for key in self._missing.ranks)

    def bytes_kept_from_next(self) -> int:
        """Return the bytes that may not be evicted for the part that is fetched next."""
        return self.used_bytes - sum(self._sizes[key] for key in self.evictable())

    # -- needs -----------------------------------------------------------------------------------------------------

    def plan(self, keys: Iterable[int]) -> None:
        """Note that a batch after all those before needs parts, in this order."""
        at = _AT_ONCE + next(self._turns) * _PARTS_OF_BATCH
        for number, key in enumerate(keys):
            self._planned.setdefault(key, deque()).append(at + min(number, _PARTS_OF_BATCH - 1))
            self._update(key)

    def start(self, keys: Iterable[int]) -> None:
        """Hold parts for the first batch for which they are planned, until they are released."""
        for key in keys:
            self._unplan(key, 0)
            self._holds[key] += 1
            self._update(key)

    def cancel(self, keys: Iterable[int]) -> None:
        """Undo the last `plan` of parts."""
        for key in keys:
            self._unplan(key, -1)
            self._update(key)

    def hold(self, keys: Iterable[int]) -> None:
        """Keep parts until they are released as often as they were held."""
        for key in keys:
            self._holds[key] += 1
            self._update(key)

    def release(self, keys: Iterable[int]) -> None:
        """Undo `hold` or `start` once."""
        for key in keys:
            self._holds[key] -= 1
            if self._holds[key] <= 0:
                del self._holds[key]
            self._update(key)

    def request(self, key: int, scan: int | None) -> None:
        """Fetch a part for a scan (later scans have larger numbers), or for None after all others. Idempotent."""
        self._requested[key] = _LAST if scan is None else _SCANS + scan
        self._update(key)

    def withdraw(self, key: int) -> None:
        """Undo `request`, or do nothing."""
        self._requested.pop(key, None)
        self._update(key)

    def keep(self, key: int, scan: int) -> None:
        """Keep a present part for the rows that a scan will find, until something sooner needs its room."""
        self._kept[key] = _SCANS + scan
        self._update(key)

    def unkeep(self, key: int) -> None:
        """Undo `keep`, or do nothing."""
        self._kept.pop(key, None)
        self._update(key)

    def unkeep_all(self) -> bool:
        """Undo every `keep`; returns True if there was one."""
        kept = list(self._kept)
        for key in kept:
            self.unkeep(key)
        return bool(kept)

    # -- what comes and goes ---------------------------------------------------------------------------------------

    def next_missing(self) -> int | None:
        """Return the part to fetch next; it stays that until it is admitted or not needed any more."""
        return self._missing.first()

    def room_for(self, size_bytes: int, other_bytes: int, key: int | None = None) -> list[int] | None:
        """Return what to evict to make room for bytes of a part, by default the next one; None if there cannot be room.

        `other_bytes` count against the budget, too.
        """
        lacking_bytes = self.used_bytes + size_bytes + other_bytes - self.budget_bytes
        if lacking_bytes <= 0:
            return []
        evicted = []
        for each in self.evictable(key):
            lacking_bytes -= self._sizes[each]
            evicted.append(each)
            if lacking_bytes <= 0:
                return evicted
        return None

    def evictable(self, for_key: int | None = None) -> Iterator[int]:
        """Yield the parts that may be evicted for one, by default the next: those needed later, the last first."""
        for_key = self.next_missing() if for_key is None else for_key
        turn = _HELD if for_key is None else self.turn_of(for_key)
        for key in self._evictable:
            if -self._evictable.ranks[key][0] <= turn:
                return
            yield key

    def admit(self, key: int, size_bytes: int) -> None:
        """Count a part that is in flight from now on."""
        self._sizes[key] = size_bytes
        self._of_shard.setdefault(shard_and_number(key)[0], set()).add(key)
        self.used_bytes += size_bytes
        self._update(key)

    def grow(self, key: int, size_bytes: int) -> None:
        """Count more bytes for a part in flight."""
        self._sizes[key] += size_bytes
        self.used_bytes += size_bytes

    def arrive(self, key: int, size_bytes: int) -> None:
        """Note that a part in flight is present, and how many bytes it takes."""
        self.used_bytes += size_bytes - self._sizes[key]
        self._sizes[key] = size_bytes
        self._present.add(key)
        self._changes[shard_and_number(key)[0]] += 1
        self._update(key)

    def drop(self, key: int) -> None:
        """Remove a part that is present or in flight; if it is needed, it is fetched again in its turn."""
        self._kept.pop(key, None)
        self._present.discard(key)
        shard = shard_and_number(key)[0]
        self._changes[shard] += 1
        if key in self._sizes:
            self.used_bytes -= self._sizes.pop(key)
            self._of_shard[shard].discard(key)
            if not self._of_shard[shard]:
                del self._of_shard[shard]
        self._update(key)

    def fail(self, key: int, error: Exception) -> None:
        """Mark a part as failed; it is not retried until `try_again`."""
        self._errors[key] = error
        self.drop(key)

    def try_again(self) -> None:
        """Forget errors, so that parts that failed are fetched if they are needed."""
        failed = list(self._errors)
        self._errors.clear()
        for key in failed:
            self._update(key)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _unplan(self, key: int, which: int) -> None:
        turns = self._planned[key]
        del turns[which]
        if not turns:
            del self._planned[key]

    def _update(self, key: int) -> None:
        """Queue a part by its needs and its place; called whenever one of these has changed."""
        turn = self.turn_of(key)
        self._free.discard(key)
        if turn == _NEVER or key in self._sizes or key in self._errors:
            self._missing.discard(key)
        else:
            self._missing.put(key, (turn, key))
        if turn == _HELD or key not in self._present:
            self._evictable.discard(key)
            return
        turn = min(turn, self._kept.get(key, _NEVER))
        if turn != _NEVER:
            self._evictable.put(key, (-turn, -key))
            return
        if not self._sizes[key]:
            self._free.add(key)
        if self._evictable.ranks.get(key, (0, 0))[0] != -_NEVER:  # else it keeps its place among the unneeded
            self._evictable.put(key, (-_NEVER, next(self._clock)))
