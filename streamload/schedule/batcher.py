"""The batcher: keeps the batches that are being made, and gives them out whole and in order.

It is the bound on memory: whoever schedules work asks it for room, and room comes back when the trainer takes a batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Self, TypeVar

__all__ = ["Batcher", "OpenBatch"]

PartT = TypeVar("PartT")
SourceT = TypeVar("SourceT")


@dataclass(slots=True, eq=False)
class OpenBatch(Generic[SourceT, PartT]):
    """A batch that is being made.

    Attributes:
        number: counted on from epoch to epoch, also where one is begun again: no two batches have the same.
        rows: how many it will have.
        source: where its rows come from, in case they have to be made again.
        slot: where they are written.
        end: the position of the epoch's order behind it.
        parts: what has come back of it.
        rows_done: how many rows these are.
    """

    number: int
    rows: int
    source: SourceT
    slot: int
    end: int
    parts: list[PartT] = field(default_factory=list)
    rows_done: int = 0

    @property
    def complete(self) -> bool:
        """Whether all rows have come back."""
        return self.rows_done == self.rows

    def restart(self, slot: int) -> None:
        """Forget what has come back, and use another slot: late parts may still be written to the old one."""
        self.parts.clear()
        self.rows_done = 0
        self.slot = slot


class Batcher(Generic[SourceT, PartT]):
    """Batches from the moment work on them begins until the trainer takes them.

    Args:
        in_order: give them out in the order in which they were opened; else as they get complete.
        before: those of the epoch before, which count as outstanding here too, and whose numbers are counted on.

    Attributes:
        numbers: of the batches to come.
    """

    def __init__(self, *, in_order: bool, before: Self | None = None) -> None:
        self._in_order = in_order
        self._before = before
        self._open: OrderedDict[int, OpenBatch[SourceT, PartT]] = OrderedDict()
        self.numbers: Iterator[int] = count() if before is None else before.numbers
        self._opened = 0
        self._taken = 0

    @property
    def outstanding(self) -> int:
        """Batches that were opened and that the trainer has not taken yet, also those of the epoch before."""
        outstanding = self._opened - self._taken
        if self._before is not None:
            outstanding += self._before.outstanding
            if not self._before.outstanding:
                self._before = None
        return outstanding

    @property
    def kept(self) -> int:
        """How many batches have not been given out: some rows have yet to come of them, or of one before them."""
        return len(self._open)

    @property
    def empty(self) -> bool:
        """Whether no batch is being made."""
        return not self._open

    def open(self, rows: int, source: SourceT, slot: int, end: int) -> OpenBatch[SourceT, PartT]:
        """Begin a batch."""
        batch: OpenBatch[SourceT, PartT] = OpenBatch(next(self.numbers), rows, source, slot, end)
        self._open[batch.number] = batch
        self._opened += 1
        return batch

    def find(self, number: int, slot: int) -> OpenBatch[SourceT, PartT] | None:
        """The batch that a part belongs to; None if it has been restarted with another slot since."""
        batch = self._open.get(number)
        return batch if batch is not None and batch.slot == slot else None

    def taken(self, batches: int) -> None:
        """The trainer has taken so many."""
        self._taken += batches

    def take_complete(self) -> list[OpenBatch[SourceT, PartT]]:
        """The batches that can be given out now, each once."""
        ready = []
        for batch in self._open.values():
            if batch.complete:
                ready.append(batch)
            elif self._in_order:
                break
        for batch in ready:
            del self._open[batch.number]
        return ready

    def take_all(self) -> list[OpenBatch[SourceT, PartT]]:
        """The batches that have not been given out, complete or not; nothing is open afterwards."""
        left = list(self._open.values())
        self._open.clear()
        self._taken += len(left)
        return left
