"""Which parts are there, who needs them and when, and what may be freed for others: the byte budget.

Nothing here reads, writes or waits.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator

from streamload.fetch.part_queue import PartQueue
from streamload.fetch.parts import shard_and_number

__all__ = ["PartLedger"]


class PartLedger:
    """Keeps account of parts by their keys (`parts.part_key`).

    A part is *reserved* for batches that are planned, in their order. It is *held* from the moment such a batch is
    scheduled until it is made, and by an epoch that has used it until all its samples are passed. What is not held may
    be freed: first what nobody has a use for, then what is *kept* for rows that are not planned yet, then what is
    reserved for a later batch than the one that needs the room. As long as there is room everything stays, so in a
    dataset that is smaller than the budget nothing is fetched twice. A part that takes no memory, because it lies on
    the disk, has no reason to stay.

    Args:
        budget_bytes: what all parts that are there or in flight may take together, beside what others take.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._present: set[int] = set()
        self._coming: set[int] = set()
        self._holds: Counter[int] = Counter()
        self._kept: set[int] = set()
        self._rank: dict[int, int] = {}
        self._reserved: dict[int, deque[int]] = {}
        self._idle: set[int] = set()
        # The idle ones once more, by what they are there for: whoever needs room must not look at all of them.
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._idle_kept: set[int] = set()
        self._idle_reserved: set[int] = set()
        self._free: dict[int, None] = {}
        self._wanted = PartQueue()
        self._prerequisites: set[int] = set()
        self._turn = 0
        self._of_shard: dict[int, set[int]] = {}

    @property
    def waiting(self) -> int:
        """How many parts are wanted and not even in flight."""
        return len(self._wanted)

    @property
    def has_free(self) -> bool:
        """Whether `take_free` may have something to give."""
        return bool(self._free)

    def in_flight(self) -> set[int]:
        """The keys of the parts that are in flight."""
        return set(self._coming)

    def kept_from_next_bytes(self) -> int:
        """What is there or in flight and may not be freed for the part that is fetched next."""
        self.next_wanted()  # `evictable` is for what that has looked at last
        return self.used_bytes - sum(self._sizes[key] for key in self.evictable())

    def is_present(self, key: int) -> bool:
        """Whether the part is there."""
        return key in self._present

    def are_present(self, keys: Iterable[int]) -> bool:
        """Whether all of them are there."""
        return self._present.issuperset(keys)

    def is_expected(self, key: int) -> bool:
        """Whether the part is there, in flight, or wanted."""
        return key in self._sizes or key in self._wanted

    def is_needed(self, key: int) -> bool:
        """Whether anyone has a use for the part, or it is on the way to one that has."""
        needs: tuple[Iterable[int], ...] = (self._holds, self._reserved, self._prerequisites)
        return any(key in each for each in needs)

    def is_reserved(self, key: int) -> bool:
        """Whether a planned batch will need the part."""
        return key in self._reserved

    def parts_of(self, shard: int) -> set[int]:
        """The keys of a shard's parts that are there or in flight."""
        return self._of_shard.get(shard, set())

    @property
    def shards_present(self) -> int:
        """Of how many shards a part is there or in flight."""
        return len(self._of_shard)

    def uses(self, shard: int) -> bool:
        """Whether a part of the shard is there, in flight, or wanted."""
        return bool(self.parts_of(shard)) or any(shard_and_number(key)[0] == shard for key in self._wanted)

    # -- needs -----------------------------------------------------------------------------------------------------

    def want(self, keys: Iterable[int]) -> None:
        """Have these fetched, in this order and after all that was wanted before.

        What nobody has a use for any more when its turn comes is left out.
        """
        for key in keys:
            if not self.is_expected(key):
                self._turn += 1
                self._wanted.put(key, self._turn)

    def want_before(self, keys: Iterable[int], key: int) -> bool:
        """Have earlier parts of a wanted part's shard fetched in its turn, because it can only be had through them.

        Returns:
            Whether one of them is neither there nor in flight.
        """
        turn = self._wanted.turn_of(key)
        missing = [each for each in keys if each not in self._sizes]
        for each in missing:
            self._wanted.put(each, turn)  # ascending numbers of one shard: before the part itself
        self._prerequisites.update(missing)
        return bool(missing)

    def want_again(self, keys: Iterable[int]) -> None:
        """Have parts fetched that were there, when they are needed next: those that are held before all others."""
        for key in keys:
            if not self.is_expected(key):
                self._wanted.put(key, 0 if key in self._holds else self._next_need(key))

    def reserve(self, keys: Iterable[int]) -> None:
        """A batch will need these, after all for which anything was reserved before."""
        self._turn += 1
        for key in keys:
            if key not in self._reserved:
                self._reserved[key] = deque()
                self._sort_in(key)
            self._reserved[key].append(self._turn)

    def use(self, keys: Iterable[int]) -> None:
        """The first batch for which these are reserved is scheduled: they are held for it from now on."""
        for key in keys:
            self._cancel(key, first=True)
            self._holds[key] += 1
            self._not_idle(key)

    def cancel(self, keys: Iterable[int]) -> None:
        """The last batch for which these are reserved is not wanted any more."""
        for key in keys:
            self._cancel(key, first=False)

    def hold(self, keys: Iterable[int]) -> None:
        """Keep these until they are released as often as they were held."""
        for key in keys:
            self._holds[key] += 1
            self._not_idle(key)

    def release(self, keys: Iterable[int]) -> None:
        """Undo `hold` or `use` once."""
        for key in keys:
            self._holds[key] -= 1
            if self._holds[key] <= 0:
                del self._holds[key]
                self._idle_if_unneeded(key)

    def expect_rows(self, shard: int) -> None:
        """Rows of this shard will be planned, after those of all shards of which this was said before."""
        self._turn += 1
        self._rank.setdefault(shard, self._turn)

    def expect_no_rows(self, shard: int) -> None:
        """Undo `expect_rows`, or do nothing."""
        self._rank.pop(shard, None)

    def keep(self, key: int) -> None:
        """Keep a part of a shard of which rows are expected, as long as nothing that comes before needs its room.

        It makes room for what is reserved, and for shards of which rows are expected sooner.
        """
        self._kept.add(key)
        self._sort_in(key)

    def unkeep(self, key: int) -> None:
        """Undo `keep`, or do nothing."""
        self._kept.discard(key)
        self._sort_in(key)

    # -- comings and goings ----------------------------------------------------------------------------------------

    def next_wanted(self) -> int | None:
        """The part to fetch next, which stays the next until it is `admitted` or nobody has a use for it any more."""
        return self._wanted.next(self.is_needed)

    def room_for(self, size_bytes: int, other_bytes: int) -> list[int] | None:
        """What to free so that there is room for the part that is fetched next; None where there cannot be.

        Args:
            size_bytes: of the part.
            other_bytes: what else counts against the budget now.
        """
        missing = self.used_bytes + size_bytes + other_bytes - self.budget_bytes
        if missing <= 0:
            return []
        dropped = []
        for key in self.evictable():
            missing -= self._sizes[key]
            dropped.append(key)
            if missing <= 0:
                return dropped
        return None

    def evictable(self) -> Iterator[int]:
        """What may be freed for the part that is fetched next, in this order."""
        turn, wanted = self._wanted.head or (0, None)
        yield from self._unreferenced  # those that have been of no use for longest come first
        limit = -1 if wanted is None or wanted in self._reserved else self._rank_of(wanted)
        kept = [key for key in self._idle_kept if self._rank_of(key) > limit]
        yield from sorted(kept, key=lambda key: (self._rank_of(key), key), reverse=True)
        later = [(-need, key) for key in self._idle_reserved if (need := self._next_need(key)) > turn]
        heapq.heapify(later)  # most often one of them is enough
        while later:
            yield heapq.heappop(later)[1]

    def take_free(self) -> list[int]:
        """The parts that nobody has a use for and that take no memory; to be dropped."""
        free, self._free = self._free, {}
        return [key for key in free if key in self._unreferenced]

    def admitted(self, key: int, size_bytes: int) -> None:
        """The part is in flight, and counts from now on."""
        self._wanted.remove(key)
        self._sizes[key] = size_bytes
        self._coming.add(key)
        self._of_shard.setdefault(shard_and_number(key)[0], set()).add(key)
        self.used_bytes += size_bytes

    def arrived(self, key: int, size_bytes: int) -> None:
        """The part is there, with so many bytes that count; it may have been there with more."""
        self.used_bytes += size_bytes - self._sizes[key]
        self._sizes[key] = size_bytes
        self._present.add(key)
        self._coming.discard(key)
        self._prerequisites.discard(key)
        self._sort_in(key)
        self._idle_if_unneeded(key)

    def dropped(self, key: int) -> None:
        """The part is not there any more, or will not come. If it is reserved, it is wanted again in its turn."""
        self.give_up(key)
        if key in self._reserved:
            self._wanted.put(key, self._next_need(key))

    def give_up(self, key: int) -> None:
        """The part cannot be had, or is not wanted any more."""
        self._not_idle(key)
        self._prerequisites.discard(key)
        self._wanted.remove(key)
        self._present.discard(key)
        self._coming.discard(key)
        self._kept.discard(key)
        if key in self._sizes:
            self.used_bytes -= self._sizes.pop(key)
            shard = shard_and_number(key)[0]
            self._of_shard[shard].discard(key)
            if not self._of_shard[shard]:
                del self._of_shard[shard]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _next_need(self, key: int) -> int:
        reserved = self._reserved.get(key)
        return reserved[0] if reserved else 0

    def _cancel(self, key: int, *, first: bool) -> None:
        turns = self._reserved[key]
        if first:
            turns.popleft()
        else:
            turns.pop()
        if not turns:
            del self._reserved[key]
            self._sort_in(key)

    def _rank_of(self, key: int) -> int:
        return self._rank.get(shard_and_number(key)[0], self._turn)

    def _idle_if_unneeded(self, key: int) -> None:
        if key in self._present and key not in self._holds and key not in self._idle:
            self._idle.add(key)
            self._sort_in(key)

    def _not_idle(self, key: int) -> None:
        if key in self._idle:
            self._idle.discard(key)
            self._sort_in(key)

    def _sort_in(self, key: int) -> None:
        """Put a part where it belongs among the idle ones, if it is one."""
        self._unreferenced.pop(key, None)
        self._idle_kept.discard(key)
        self._idle_reserved.discard(key)
        if key not in self._idle:
            return
        if key in self._reserved:
            self._idle_reserved.add(key)
        elif key in self._kept:
            self._idle_kept.add(key)
        else:
            self._unreferenced[key] = None
            if not self._sizes[key]:
                self._free[key] = None
