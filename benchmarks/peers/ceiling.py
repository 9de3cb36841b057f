"""The ceiling: one process, a loop over the mapped shards, decode calls, a copy into one batch's memory, nothing else.

Samples come in stored order, which is kinder to the processor's caches than what loaders have to do; "shuffled" is the
same loop in a random order. Their rate is counted once for each worker that the loaders have, as if processes did not
slow each other down; "at once" is the shuffled loop in as many processes, which share the machine's caches and memory,
and cores where two processors are threads of one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
from decoding import decoders
from sample_table import MappedShards, make_table, read_positions
from workloads import Workload

from peers import WORKERS


class Ceiling:
    """No loader: what decoding alone costs."""

    processes = WORKERS

    def __init__(self, workload: Workload) -> None:
        self._shards = MappedShards(workload)
        self._positions = [rows.tolist() for rows in read_positions(workload)]
        self._decoders = decoders(workload.fields)
        self._batch_size = workload.batch_size
        samples = [decode(self._field(rows, 0)) for decode, rows in zip(self._decoders, self._positions, strict=True)]
        self._batch = [np.empty((self._batch_size, *np.shape(value)), np.asarray(value).dtype) for value in samples]

    def _field(self, rows: list[list[int]], number: int) -> memoryview:
        return self._shards.field(rows[number])

    @staticmethod
    def prepare(workload: Workload) -> None:
        make_table(workload)

    def epoch(self) -> Iterator[Any]:
        views = self._shards.views
        for first in range(0, len(self._positions[0]), self._batch_size):
            batch = []
            for decode, rows, memory in zip(self._decoders, self._positions, self._batch, strict=True):
                values = [decode(views[shard][start:end]) for shard, start, end in rows[first : first + len(memory)]]
                filled = memory[: len(values)]
                if memory.ndim == 1:
                    filled[:] = values
                else:
                    np.stack(values, out=filled)
                batch.append(filled)
            yield tuple(batch)

    def close(self) -> None:
        pass


class Shuffled(Ceiling):
    """In an order that is drawn before the clock starts."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        order = np.random.default_rng().permutation(workload.samples)
        self._positions = [[rows[number] for number in order] for rows in self._positions]


class AtOnce(Shuffled):
    """Beside others that do the same all the time, one for each further worker."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        fork = multiprocessing.get_context("fork")
        self._others = [fork.Process(target=self._go_on, daemon=True) for _ in range(WORKERS - 1)]
        for other in self._others:
            other.start()

    def _go_on(self) -> None:
        while True:
            for _ in self.epoch():
                pass

    def close(self) -> None:
        for other in self._others:
            other.kill()
            other.join()
