"""streamload, as its README has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from decoding import CROP, decoders
from workloads import Workload

from peers import WORKERS
from streamload import StreamLoader
from streamload.images import RandomResizedCrop


class Streamload:
    """Shuffled over its default window of 10,000 samples."""

    processes = 1

    def __init__(self, workload: Workload) -> None:
        self._loader = StreamLoader(
            workload.shards(),
            workload.batch_size,
            shuffle=True,
            fields=workload.fields,
            num_workers=WORKERS,
            **self._functions(workload.fields),
        )

    def _functions(self, fields: Sequence[str]) -> dict[str, Any]:
        return {"transform": {"jpg": RandomResizedCrop(CROP)}} if "jpg" in fields else {}

    @staticmethod
    def prepare(workload: Workload) -> None:
        workload.shards()

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()


class OwnFunctions(Streamload):
    """Given the same function for each field as all others, as one with decoders of their own would give it."""

    def _functions(self, fields: Sequence[str]) -> dict[str, Any]:
        return {"decode": dict(zip(fields, decoders(fields), strict=True))}
