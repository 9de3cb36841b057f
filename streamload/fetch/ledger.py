"""Which parts are there, who needs them and for how long, and what may be given back for others: the byte budget.

Nothing here reads, writes or waits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from streamload.fetch.parts import shard_and_number

__all__ = ["PartLedger"]


class PartLedger:
    """Keeps account of parts by their keys (`parts.part_key`).

    A part is *held* by batches that are planned and not made yet, and *pinned* by an epoch that has used it and may
    still use it again. What is neither stays, as long as the room is not needed for another one: in a dataset that is
    smaller than the budget nothing is fetched twice.

    Args:
        budget_bytes: what all parts that are there or on their way may take together, beside what others take.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._present: set[int] = set()
        self._holds: Counter[int] = Counter()
        self._pins: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_bytes = 0
        self._queue: deque[int] = deque()
        self._queued: set[int] = set()
        self._on_the_way: set[int] = set()
        self._of_shard: dict[int, set[int]] = {}

    @property
    def waiting(self) -> int:
        """How many parts are wanted and not even on their way, about."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """How many parts are on their way."""
        return len(self._sizes) - len(self._present)

    @property
    def needed_bytes(self) -> int:
        """What is there or on its way and cannot be given back."""
        return self.used_bytes - self._idle_bytes

    def is_present(self, key: int) -> bool:
        """Whether the part is there."""
        return key in self._present

    def are_present(self, keys: Iterable[int]) -> bool:
        """Whether all of them are there."""
        return self._present.issuperset(keys)

    def is_expected(self, key: int) -> bool:
        """Whether the part is there, on its way, or wanted."""
        return key in self._sizes or key in self._queued

    def parts_of(self, shard: int) -> set[int]:
        """The keys of a shard's parts that are there or on their way."""
        return self._of_shard.get(shard, set())

    def uses(self, shard: int) -> bool:
        """Whether a part of the shard is there, on its way, or wanted."""
        return bool(self.parts_of(shard)) or any(shard_and_number(key)[0] == shard for key in self._queued)

    # -- needs -----------------------------------------------------------------------------------------------------

    def want(self, keys: Iterable[int], *, on_the_way: bool = False) -> None:
        """Have these brought, in this order and after all that was wanted before.

        Args:
            keys: the parts; what is neither held nor pinned any more when its turn comes is left out.
            on_the_way: except these, because others can only be had through them.
        """
        for key in keys:
            if not self.is_expected(key):
                self._queue.append(key)
                self._queued.add(key)
                if on_the_way:
                    self._on_the_way.add(key)

    def want_first(self, keys: Iterable[int]) -> None:
        """Have these brought before all others."""
        new = [key for key in keys if not self.is_expected(key)]
        self._queue.extendleft(reversed(new))
        self._queued.update(new)

    def is_needed(self, key: int) -> bool:
        """Whether the part is held or pinned, or on the way to one that is."""
        return key in self._holds or key in self._pins or key in self._on_the_way

    def hold(self, keys: Iterable[int]) -> None:
        """Keep these until they are released as often as they were held."""
        for key in keys:
            self._holds[key] += 1
            self._not_idle(key)

    def release(self, keys: Iterable[int]) -> None:
        """Undo `hold` once."""
        for key in keys:
            self._less(self._holds, key)

    def pin(self, key: int) -> None:
        """Keep this one until it is unpinned as often as it was pinned."""
        self._pins[key] += 1
        self._not_idle(key)

    def unpin(self, key: int) -> None:
        """Undo `pin` once."""
        self._less(self._pins, key)

    # -- comings and goings ----------------------------------------------------------------------------------------

    def next_wanted(self) -> int | None:
        """The part to fetch next, which stays the next until it is `admitted` or nobody needs it any more."""
        while self._queue:
            key = self._queue[0]
            if key not in self._sizes and self.is_needed(key):
                return key
            self._queue.popleft()
            self._queued.discard(key)
        return None

    def room_for(self, size_bytes: int, other_bytes: int) -> list[int] | None:
        """Which parts to give back so that there is room for one more; None where there is none.

        Args:
            size_bytes: of the part.
            other_bytes: what else counts against the budget now.
        """
        missing = self.used_bytes + size_bytes + other_bytes - self.budget_bytes
        if missing > self._idle_bytes:
            return None
        dropped = []
        for key in self._idle:
            if missing <= 0:
                break
            missing -= self._sizes[key]
            dropped.append(key)
        return dropped

    def admitted(self, key: int, size_bytes: int) -> None:
        """The part is on its way, and counts from now on."""
        if key in self._queued:
            self._queued.discard(key)
            self._queue.remove(key)
        self._sizes[key] = size_bytes
        self._of_shard.setdefault(shard_and_number(key)[0], set()).add(key)
        self.used_bytes += size_bytes

    def arrived(self, key: int, size_bytes: int) -> None:
        """The part is there, with so many bytes that count."""
        self.used_bytes += size_bytes - self._sizes[key]
        self._sizes[key] = size_bytes
        self._present.add(key)
        self._on_the_way.discard(key)
        self._idle_if_unneeded(key)

    def dropped(self, key: int) -> None:
        """The part is not there any more, or will not come."""
        self._not_idle(key)
        self._on_the_way.discard(key)
        self.used_bytes -= self._sizes.pop(key)
        self._present.discard(key)
        shard = shard_and_number(key)[0]
        self._of_shard[shard].discard(key)
        if not self._of_shard[shard]:
            del self._of_shard[shard]

    def give_up(self, key: int) -> None:
        """The part cannot be had."""
        if key in self._sizes:
            self.dropped(key)
        elif key in self._queued:
            self._queue.remove(key)
            self._queued.discard(key)
            self._on_the_way.discard(key)

    def _less(self, counter: Counter[int], key: int) -> None:
        counter[key] -= 1
        if counter[key] <= 0:
            del counter[key]
            self._idle_if_unneeded(key)

    def _idle_if_unneeded(self, key: int) -> None:
        if key in self._present and key not in self._holds and key not in self._pins and key not in self._idle:
            self._idle[key] = None
            self._idle_bytes += self._sizes[key]

    def _not_idle(self, key: int) -> None:
        if key in self._idle:
            del self._idle[key]
            self._idle_bytes -= self._sizes[key]
