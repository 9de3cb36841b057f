"""The queue of parts that are wanted and not in flight yet, in the order in which they will be needed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

__all__ = ["PartQueue"]


class PartQueue:
    """Parts by their keys, each with its turn: the smallest turn comes first, and in it the smallest key."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, key: int) -> bool:
        return key in self._turns

    def __iter__(self) -> Iterator[int]:
        return iter(self._turns)

    def turn_of(self, key: int) -> int:
        """The turn of a part that waits. Raises KeyError for any other."""
        return self._turns[key]

    def put(self, key: int, turn: int) -> None:
        """Have a part wait for a turn; one that waits already for another one waits for this."""
        self._turns[key] = turn
        heapq.heappush(self._heap, (turn, key))

    def remove(self, key: int) -> None:
        """A part waits no more, or did not."""
        self._turns.pop(key, None)

    def next(self, is_needed: Callable[[int], bool]) -> int | None:
        """The first part, which stays in the queue; those before it that are not needed any more are removed."""
        while self._heap:
            turn, key = self._heap[0]
            if self._turns.get(key) == turn:
                if is_needed(key):
                    return key
                del self._turns[key]
            heapq.heappop(self._heap)
        return None

    @property
    def head(self) -> tuple[int, int] | None:
        """Turn and key of what `next` looked at last; None where nothing is left."""
        return self._heap[0] if self._heap else None
