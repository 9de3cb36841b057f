"""SPDL in its two recommended forms for stages that release the GIL: threads here, and threads in a subprocess.

https://facebookresearch.github.io/spdl, "Execution Models: MT, MTP, and MP": MT is for the highest rate, MTP for
production, since it keeps the loader's work off the process that trains. In both the source is continuous, so that the
pipeline lives from epoch to epoch, and one task decodes and collates a batch, since SPDL's cost is one for each task.

"SPDL" reads the shards with its own `iter_tarfile`: the source yields lists of raw samples. "By position" is what it
could do at best: the source yields numbers, and the task reads the samples through a table of positions and mapped
shards, neither of which SPDL has; they are the benchmark's. Batches leave the subprocess through a shared-memory ring
("Shared-memory arenas" in its optimization guide), which is two to five times as fast here as without. Its third form,
MP, for stages that hold the GIL, was slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from decoding import decoders
from sample_table import MappedShards, make_table, read_positions
from spdl.io import iter_tarfile
from spdl.pipeline import PipelineBuilder, SharedMemoryRingBuffer, run_pipeline_in_subprocess
from workloads import Workload

from peers import WORKERS

RING_BYTES = 128 << 20
"""Room for five of the largest batches, as its documentation has it: buffer_size + 2."""


class BatchesOfRows:
    """Each pass a new permutation of all samples, cut into batches."""

    def __init__(self, workload: Workload) -> None:
        self._samples = workload.samples
        self._batch_size = workload.batch_size
        self._rng = np.random.default_rng()

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self._rng.permutation(self._samples)
        for first in range(0, self._samples, self._batch_size):
            yield order[first : first + self._batch_size]


class BatchesOfSamples:
    """Each pass the shards in a new order, the samples of each shuffled, cut into batches of raw samples."""

    def __init__(self, workload: Workload) -> None:
        self._shards = MappedShards(workload)
        self._fields = workload.fields
        self._batch_size = workload.batch_size
        self._rng = np.random.default_rng()

    def __iter__(self) -> Iterator[list[dict[str, memoryview]]]:
        waiting: list[dict[str, memoryview]] = []
        for shard in self._rng.permutation(len(self._shards.views)):
            samples = self._samples(self._shards.views[shard])
            waiting += [samples[number] for number in self._rng.permutation(len(samples))]
            while len(waiting) >= self._batch_size:
                yield waiting[: self._batch_size]
                del waiting[: self._batch_size]
        if waiting:
            yield waiting

    @staticmethod
    def _samples(shard: memoryview) -> list[dict[str, memoryview]]:
        samples: dict[str, dict[str, memoryview]] = {}
        for name, content in iter_tarfile(shard):
            key, _, field = name.partition(".")
            samples.setdefault(key, {})[field] = content
        return list(samples.values())


class DecodeBatch:
    """Raw samples to a batch."""

    def __init__(self, workload: Workload) -> None:
        self._decoders = dict(zip(workload.fields, decoders(workload.fields), strict=True))

    def __call__(self, samples: list[dict[str, memoryview]]) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.from_numpy(np.stack([decode(sample[field]) for sample in samples]))
            for field, decode in self._decoders.items()
        )


class MakeBatch:
    """Rows to a batch: reads from the mapped shards, decodes, collates. Where it is unpickled it maps them itself."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._positions = read_positions(workload)
        self._decoders = decoders(workload.fields)
        self._shards = MappedShards(workload)

    def __reduce__(self) -> tuple[type[MakeBatch], tuple[Workload]]:
        return MakeBatch, (self._workload,)

    def __call__(self, rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        views = self._shards.views
        batch = []
        for decode, positions in zip(self._decoders, self._positions, strict=True):
            values = [decode(views[shard][start:end]) for shard, start, end in positions[rows].tolist()]
            batch.append(torch.from_numpy(np.stack(values)))
        return tuple(batch)


def _builder(source: Any, make_batch: Any) -> PipelineBuilder[Any, Any]:
    builder: PipelineBuilder[Any, Any] = PipelineBuilder()
    builder.add_source(source, continuous=True)
    builder.pipe(make_batch, concurrency=WORKERS)
    return builder.add_sink(buffer_size=3)


class Shards:
    """MT: two threads in the trainer's process, and one that reads shards."""

    processes = 1

    def __init__(self, workload: Workload) -> None:
        self._pipeline = self._described(workload).build(num_threads=WORKERS)
        self._pipeline.start()

    @staticmethod
    def _described(workload: Workload) -> PipelineBuilder[Any, Any]:
        return _builder(BatchesOfSamples(workload), DecodeBatch(workload))

    @staticmethod
    def prepare(workload: Workload) -> None:
        make_table(workload)

    def epoch(self) -> Iterator[Any]:
        return iter(self._pipeline)

    def close(self) -> None:
        self._pipeline.stop()


class ByPosition(Shards):
    """MT, with a table of positions."""

    @staticmethod
    def _described(workload: Workload) -> PipelineBuilder[Any, Any]:
        return _builder(BatchesOfRows(workload), MakeBatch(workload))


class Subprocess:
    """MTP: two threads in a subprocess, with a table of positions; batches are handed over in shared memory."""

    processes = 1

    def __init__(self, workload: Workload) -> None:
        config = _builder(BatchesOfRows(workload), MakeBatch(workload)).get_config()
        self._batches = run_pipeline_in_subprocess(
            config, num_threads=WORKERS, arena=SharedMemoryRingBuffer(RING_BYTES)
        )

    @staticmethod
    def prepare(workload: Workload) -> None:
        make_table(workload)

    def epoch(self) -> Iterator[Any]:
        return iter(self._batches)

    def close(self) -> None:
        del self._batches  # the subprocess ends with it
