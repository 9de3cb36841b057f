"""streamload, as its README has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decoding import CROP
from workloads import Workload

from peers import WORKERS
from streamload import StreamLoader
from streamload.images import RandomResizedCrop


class Streamload:
    """Shuffled over its default window of 10,000 samples."""

    processes = 1

    def __init__(self, workload: Workload) -> None:
        transform = {"jpg": RandomResizedCrop(CROP)} if "jpg" in workload.fields else None
        self._loader = StreamLoader(
            workload.shards(),
            workload.batch_size,
            shuffle=True,
            fields=workload.fields,
            transform=transform,
            num_workers=WORKERS,
        )

    @staticmethod
    def prepare(workload: Workload) -> None:
        workload.shards()

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()
