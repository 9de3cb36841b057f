"""The window: which parts are in memory or in flight, when each is needed next, and which gives its room to which.

Nothing here reads, writes or waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from streamload.fetch.parts import shard_and_number

_HELD = 0
_SCANS = 1 << 60
_NEVER = 1 << 62
_MOST_STALE = 64

_PARTS_OF_BATCH = 1 << 20


class Turns:
    """Counts the turns of a rank's batches in the order of need, over all its epochs.

    Attributes:
        next: the turn of the batch that is planned next.
    """

    def __init__(self) -> None:
        self.next = 0

    def take(self) -> int:
        """The turn of the next batch."""
        self.next += 1
        return self.next - 1

    def give_back(self, turn: int) -> None:
        """A batch is not wanted any more; the last one first."""
        if turn == self.next - 1:
            self.next = turn


class PartWindow:
    """A stretch of an epoch's parts that moves forward: parts enter it in the order of need, and leave it when passed.

    Each part has a *turn*, which is when it is needed next: now, where it is *held*; else for the first of the planned
    batches that need it; else, behind all of these, for the scan or the rows of its shard; else never. The missing part
    with the first turn is fetched next. For its room only parts of later turns are evicted: first those that are never
    needed, the longest unneeded before the others, then those of the last turn. So what comes first is never kept
    waiting by what comes later, whatever was fetched before, and while there is room everything stays: of a dataset
    that is smaller than the budget nothing is fetched twice.

    Parts are known by their keys (`parts.part_key`).

    Args:
        budget_bytes: what all parts that are present or in flight may take together, beside what others take.

    Attributes:
        used_bytes: what they take.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._present: set[int] = set()
        self._of_shard: dict[int, set[int]] = {}
        self._failed: set[int] = set()
        self._changes: Counter[int] = Counter()
        # Why a part is needed: each of these is a turn, or several.
        self._holds: Counter[int] = Counter()
        self._planned: dict[int, deque[int]] = {}  # ascending
        self._requested: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        self._turns = Turns()
        # What follows from these, by `_update` alone; the heaps may also have what is not so any more.
        self._missing: dict[int, int] = {}
        self._queue: list[tuple[int, int]] = []
        self._evictable: dict[int, tuple[int, int]] = {}
        self._eviction_queue: list[tuple[tuple[int, int], int]] = []
        self._evictable_since = 0
        self._free: dict[int, None] = {}

    @property
    def waiting(self) -> int:
        """How many parts are needed and not even in flight."""
        return len(self._missing)

    @property
    def has_free(self) -> bool:
        """Whether `take_free` may have something to give."""
        return bool(self._free)

    @property
    def shards_present(self) -> int:
        """Of how many shards a part is present or in flight."""
        return len(self._of_shard)

    def changes_of(self, shard: int) -> int:
        """How often a part of a shard has come or gone: where it is the same number again, nothing has."""
        return self._changes[shard]

    def in_flight(self) -> set[int]:
        """The keys of the parts that are in flight."""
        return self._sizes.keys() - self._present

    def is_present(self, key: int) -> bool:
        """Whether a part is in memory, or in a file."""
        return key in self._present

    def are_present(self, keys: Iterable[int]) -> bool:
        """Whether all of them are."""
        return self._present.issuperset(keys)

    def turn_of(self, key: int) -> int:
        """When a part is needed next, to compare it with others."""
        return self._turn_to_fetch(key)

    def parts_of(self, shard: int) -> set[int]:
        """The keys of a shard's parts that are present or in flight."""
        return self._of_shard.get(shard, set())

    def uses(self, shard: int) -> bool:
        """Whether a part of a shard is present, in flight, or missing."""
        return bool(self.parts_of(shard)) or any(shard_and_number(key)[0] == shard for key in self._missing)

    def bytes_kept_from_next(self) -> int:
        """What is present or in flight and may not be evicted for the part that is fetched next."""
        return self.used_bytes - sum(self._sizes[key] for key in self.evictable())

    # -- needs -----------------------------------------------------------------------------------------------------

    def plan(self, keys: Iterable[int], turn: int | None = None) -> None:
        """A batch needs these, in this order.

        Args:
            keys: the parts.
            turn: the batch's, see `Turns`; by default it comes after all batches planned so before.
        """
        at = 1 + (self._turns.take() if turn is None else turn) * _PARTS_OF_BATCH
        for number, key in enumerate(keys):
            self._planned.setdefault(key, deque()).append(at + min(number, _PARTS_OF_BATCH - 1))
            self._update(key)

    def start(self, keys: Iterable[int]) -> None:
        """The first batch for which these are planned is scheduled; they are held for it until they are released."""
        for key in keys:
            self._remove_turn(key, first=True)
            self._holds[key] += 1
            self._update(key)

    def cancel(self, keys: Iterable[int]) -> None:
        """The last batch for which these are planned is not wanted any more."""
        for key in keys:
            self._remove_turn(key, first=False)
            self._update(key)

    def hold(self, keys: Iterable[int]) -> None:
        """Keep these until they are released as often as they were held."""
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

    def request(self, key: int, scan: int) -> None:
        """A scan needs a part; later scans have larger numbers. Idempotent."""
        self._requested[key] = _SCANS + scan
        self._update(key)

    def withdraw(self, key: int) -> None:
        """Undo `request`, or do nothing."""
        if self._requested.pop(key, None) is not None:
            self._update(key)

    def keep(self, key: int, scan: int) -> None:
        """Keep a part for rows that are planned when a scan has found them, as long as nothing sooner needs its room.

        It is not fetched again for that.
        """
        self._kept[key] = _SCANS + scan
        self._update(key)

    def unkeep(self, key: int) -> None:
        """Undo `keep`, or do nothing."""
        if self._kept.pop(key, None) is not None:
            self._update(key)

    def unkeep_all(self) -> bool:
        """Undo every `keep`; whether there was one."""
        kept = list(self._kept)
        for key in kept:
            self.unkeep(key)
        return bool(kept)

    # -- what comes and goes ---------------------------------------------------------------------------------------

    def next_missing(self) -> int | None:
        """The part to fetch next, which stays the next until it is admitted or not needed any more."""
        while self._queue:
            turn, key = self._queue[0]
            if self._missing.get(key) == turn:
                return key
            heapq.heappop(self._queue)
        return None

    def room_for(self, size_bytes: int, other_bytes: int, key: int | None = None) -> list[int] | None:
        """What to evict so that there is room for a part, or more of it; None where there cannot be.

        Args:
            size_bytes: of the part, or of what more of it comes.
            other_bytes: what else counts against the budget now.
            key: of the part; by default of the one that is fetched next.
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
        """What may be evicted for a part, by default the next one: what is needed later, the last of it first."""
        for_key = self.next_missing() if for_key is None else for_key
        turn = _HELD if for_key is None else self._turn_to_fetch(for_key)
        self._discard_stale()
        seen: list[tuple[tuple[int, int], int]] = []
        try:
            while self._eviction_queue:
                rank, key = heapq.heappop(self._eviction_queue)
                # It is queued once more where its turn was another one meanwhile.
                if self._evictable.get(key) != rank or (rank, key) in seen[-1:]:
                    continue
                seen.append((rank, key))
                if -rank[0] <= turn:
                    return
                yield key
        finally:
            for each in seen:
                heapq.heappush(self._eviction_queue, each)

    def take_free(self) -> list[int]:
        """The parts that are never needed and take no memory; to be dropped."""
        free, self._free = self._free, {}
        return [key for key in free if self._evictable.get(key, (_HELD,))[0] == -_NEVER]

    def admit(self, key: int, size_bytes: int) -> None:
        """A part is in flight, and counts from now on."""
        self._sizes[key] = size_bytes
        self._of_shard.setdefault(shard_and_number(key)[0], set()).add(key)
        self.used_bytes += size_bytes
        self._update(key)

    def grow(self, key: int, size_bytes: int) -> None:
        """A part in flight is larger than it was thought to be, by so many bytes."""
        self._sizes[key] += size_bytes
        self.used_bytes += size_bytes

    def arrive(self, key: int, size_bytes: int) -> None:
        """A part is present, with so many bytes that count; it may have been present with more."""
        self.used_bytes += size_bytes - self._sizes[key]
        self._sizes[key] = size_bytes
        self._present.add(key)
        self._changes[shard_and_number(key)[0]] += 1
        self._update(key)

    def drop(self, key: int) -> None:
        """A part is not present any more, or will not come. Where it is needed, it is fetched again in its turn."""
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

    def fail(self, key: int) -> None:
        """A part cannot be had: as `drop`, and it is not fetched again before `try_again`."""
        self._failed.add(key)
        self.drop(key)

    def try_again(self, keys: Iterable[int]) -> None:
        """Have parts that failed fetched again where they are needed."""
        for key in keys:
            self._failed.discard(key)
            self._update(key)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _remove_turn(self, key: int, *, first: bool) -> None:
        turns = self._planned[key]
        if first:
            turns.popleft()
        else:
            turns.pop()
        if not turns:
            del self._planned[key]

    def _turn_to_fetch(self, key: int) -> int:
        if key in self._holds:
            return _HELD
        planned = self._planned.get(key)
        return planned[0] if planned else self._requested.get(key, _NEVER)

    def _update(self, key: int) -> None:
        """Note what follows from a part's needs and from where it is. Called whenever one of these has changed."""
        turn = self._turn_to_fetch(key)
        self._update_missing(key, turn if key not in self._sizes and key not in self._failed else _NEVER)
        is_idle = key in self._present and key not in self._holds
        self._update_evictable(key, min(turn, self._kept.get(key, _NEVER)) if is_idle else _HELD)

    def _update_missing(self, key: int, turn: int) -> None:
        if turn == _NEVER:
            self._missing.pop(key, None)
        elif self._missing.get(key) != turn:
            self._missing[key] = turn
            heapq.heappush(self._queue, (turn, key))

    def _update_evictable(self, key: int, turn: int) -> None:
        if turn == _HELD:
            self._evictable.pop(key, None)
            return
        if turn == _NEVER and not self._sizes[key]:
            self._free[key] = None
        if self._evictable.get(key, (_HELD,))[0] == -turn:
            return
        self._evictable_since += 1
        rank = -turn, self._evictable_since if turn == _NEVER else -key
        self._evictable[key] = rank
        heapq.heappush(self._eviction_queue, (rank, key))

    def _discard_stale(self) -> None:
        if len(self._eviction_queue) > 2 * len(self._evictable) + _MOST_STALE:
            self._eviction_queue = [(rank, key) for key, rank in self._evictable.items()]
            heapq.heapify(self._eviction_queue)
