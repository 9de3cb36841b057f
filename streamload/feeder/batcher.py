"""The batcher: holds open batches until they are complete, and releases them in order.

It bounds memory: the scheduler opens a batch only while few enough are outstanding, and one stops being outstanding
when the trainer takes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Self, TypeVar

PartT = TypeVar("PartT")
SourceT = TypeVar("SourceT")


@dataclass(slots=True, eq=False)
class OpenBatch(Generic[SourceT, PartT]):
    """A batch that is being made.

    Attributes:
        number: unique over all epochs.
        rows: how many it will have.
        source: where its rows come from, in case they have to be made again.
        slot: where they are written.
        end: the position in the epoch's order after its last sample.
        parts: its finished parts.
        rows_done: the rows in these parts.
        values_end: of the room given to values of unlike sizes, in bytes behind the arrays of its slot.
    """

    number: int
    rows: int
    source: SourceT
    slot: int
    end: int
    parts: list[PartT] = field(default_factory=list)
    rows_done: int = 0
    values_end: int = 0

    @property
    def complete(self) -> bool:
        """Whether all rows are done."""
        return self.rows_done == self.rows

    def restart(self, slot: int) -> None:
        """Drop the finished parts and use another slot: late parts may still be written to the old one."""
        self.parts.clear()
        self.rows_done = self.values_end = 0
        self.slot = slot


class Batcher(Generic[SourceT, PartT]):
    """Batches from their first task until the trainer takes them.

    Args:
        before: the previous epoch's batcher. Its batches count as outstanding here too, and its numbers continue.
        numbers: of batches, where other batchers take some of them too.

    Attributes:
        numbers: of the next batches.
    """

    def __init__(self, *, before: Self | None = None, numbers: Iterator[int] | None = None) -> None:
        self._before = before
        self._open: OrderedDict[int, OpenBatch[SourceT, PartT]] = OrderedDict()
        self.numbers: Iterator[int] = (numbers or count()) if before is None else before.numbers
        self._opened = 0
        self._taken = 0

    @property
    def outstanding(self) -> int:
        """Batches opened and not yet taken by the trainer, those of the previous epoch included."""
        outstanding = self._opened - self._taken
        if self._before is not None:
            outstanding += self._before.outstanding
            if not self._before.outstanding:
                self._before = None
        return outstanding

    @property
    def kept(self) -> int:
        """How many batches have not been released: their own rows, or those of an earlier batch, are incomplete."""
        return len(self._open)

    @property
    def empty(self) -> bool:
        """Whether no batch is open."""
        return not self._open

    def open(self, rows: int, source: SourceT, slot: int, end: int) -> OpenBatch[SourceT, PartT]:
        """Open a batch."""
        batch: OpenBatch[SourceT, PartT] = OpenBatch(next(self.numbers), rows, source, slot, end)
        self._open[batch.number] = batch
        self._opened += 1
        return batch

    def find(self, number: int, slot: int) -> OpenBatch[SourceT, PartT] | None:
        """The batch that a part belongs to; None if it has been restarted in another slot since."""
        batch = self._open.get(number)
        return batch if batch is not None and batch.slot == slot else None

    def note_taken(self, batches: int) -> None:
        """Note that the trainer has taken so many batches."""
        self._taken += batches

    def take_complete(self) -> list[OpenBatch[SourceT, PartT]]:
        """Remove and return the batches that can be released now."""
        ready = []
        for batch in self._open.values():
            if not batch.complete:
                break
            ready.append(batch)
        for batch in ready:
            del self._open[batch.number]
        return ready

    def take_all(self) -> list[OpenBatch[SourceT, PartT]]:
        """Remove and return all open batches, complete or not."""
        left = list(self._open.values())
        self._open.clear()
        self._taken += len(left)
        return left
