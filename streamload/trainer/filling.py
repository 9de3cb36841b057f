"""Another batch in the place of one of which every sample has failed, so that ranks take equally many steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.feeder.pipeline import ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.trainer.delivery import Delivery

__all__ = ["Filled", "Filling"]


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch for the loop.

    Attributes:
        batch: it.
        samples: how many are in it.
        end: the position of the epoch's order behind the batch in whose place it comes; most often its own.
    """

    batch: Any
    samples: int
    end: int


class Filling:
    """Gives the batches of a pass, each once, and before it a copy for each of those of which nothing is left.

    So what comes in the place of a batch is the next one of the order of which something is left, whatever is resumed
    and when. Behind the last one the feeder goes on from the order's start (`ReadyBatch.extra`).

    Args:
        delivery: judges and builds them.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._ends: deque[int] = deque()
        self._source: tuple[ReadyBatch, Bytes, Sequence[int]] | None = None

    def put(self, batch: ReadyBatch, memory: Bytes) -> bool:
        """Take in the next batch, when there is nothing to `take`; False where it is passed over.

        Args:
            batch: as announced.
            memory: of its slot.

        Raises:
            SampleError: as `Delivery.judge`.
        """
        chosen = self._delivery.judge(batch)
        if chosen or self._delivery.fills_up:
            if not batch.extra:
                self._ends.append(batch.end)
            if chosen and self._ends:
                self._source = batch, memory, chosen
            return True
        return False

    def take(self) -> Filled | None:
        """The next batch for the loop, or None where another one has to be put in first."""
        if self._source is None:
            return None
        batch, memory, chosen = self._source
        end = self._ends.popleft()
        if self._ends:  # the loop may change what it is given
            memory = np.array(memory[: batch.size_bytes])
        else:
            self._source = None
        return Filled(self._delivery.build(batch, memory, chosen), len(chosen), end)

    def clear(self) -> None:
        """Let go of everything."""
        self._ends.clear()
        self._source = None
