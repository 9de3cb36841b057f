"""Large fields of remote shards: right in every batch, also after a worker's death and in a batch made again."""

from __future__ import annotations

import io
import os
import signal
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.faults import FaultServer
from transforms import checksum

from streamload import ShardWriter, StreamLoader

MB = 1_000_000
LARGE_BYTES = 40 * MB
BUDGET_BYTES = 114 * MB
SAMPLES = 8
LARGE = 3
"""The sample that has the large fields."""


def content(sample: int, size_bytes: int) -> bytes:
    return np.random.default_rng(sample).bytes(size_bytes)


def array(sample: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(content(100 + sample, LARGE_BYTES if sample == LARGE else MB), np.uint8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """One shard, whose fourth sample has two fields of 40 MB among those of 1 MB."""
    folder = tmp_path_factory.mktemp("large")
    with ShardWriter(folder) as writer:
        for sample in range(SAMPLES):
            size = LARGE_BYTES if sample == LARGE else MB
            file = io.BytesIO()
            np.save(file, array(sample))
            writer.write(
                {"__key__": f"{sample}", "bin": content(sample, size), "npy": file.getvalue(), "cls": str(sample)}
            )
    with FaultServer(folder) as running:
        yield running


RIGHT = {sample: zlib.crc32(content(sample, LARGE_BYTES if sample == LARGE else MB)) for sample in range(SAMPLES)}
RIGHT_ARRAYS = {sample: zlib.crc32(array(sample)) for sample in range(SAMPLES)}


def loader_of(server: FaultServer, transform: Callable[[Any], Any], **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "fields": ("bin", "cls"),
        "transform": transform,
        "num_workers": 1,
        "memory_budget": BUDGET_BYTES,
    }
    return StreamLoader(f"{server.url}/shard-000000.tar", **{**defaults, **options})


def read(loader: StreamLoader) -> dict[int, int]:
    with loader:
        return {
            label: crc for crcs, labels in loader for crc, label in zip(crcs.tolist(), labels.tolist(), strict=True)
        }


@pytest.mark.exhaustive
def test_large_arrays_are_right_and_may_be_changed(server: FaultServer) -> None:
    def changed(sample: Any) -> Any:
        values, label = sample
        crc = zlib.crc32(values)
        values += 1
        return crc, label

    assert read(loader_of(server, changed, fields=("npy", "cls"))) == RIGHT_ARRAYS


@pytest.mark.exhaustive
def test_a_large_field_survives_the_death_of_its_worker(server: FaultServer, tmp_path: Path) -> None:
    died = tmp_path / "died"

    def die_once(sample: Any) -> Any:
        if len(sample[0]) == LARGE_BYTES and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(sample)

    assert read(loader_of(server, die_once)) == RIGHT
    assert died.exists()
