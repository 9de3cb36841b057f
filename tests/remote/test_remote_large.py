"""Large fields of remote shards: not held in a shard's memory and in a worker's at the same time, and always right."""

from __future__ import annotations

import io
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_in_workers import checksum, memory_files_bytes
from servers.faults import FaultServer

from streamload import ShardWriter, StreamLoader

MB = 1_000_000
LARGE_BYTES = 40 * MB
HELD_BYTES = 50 * MB
"""More than the parts take that hold something else than one large field, and less than these and that field."""
BUDGET_BYTES = 114 * MB
"""Room for all parts, but not for a copy of each."""
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
        "timeout": 60,  # a hang is an error
    }
    return StreamLoader(f"{server.url}/shard-000000.tar", **{**defaults, **options})


def read(loader: StreamLoader) -> dict[int, int]:
    with loader:
        return {
            label: crc for crcs, labels in loader for crc, label in zip(crcs.tolist(), labels.tolist(), strict=True)
        }


def test_a_shards_memory_is_freed_while_a_large_field_is_being_decoded(server: FaultServer) -> None:
    def wait_until_free(sample: Any) -> Any:
        deadline_s = time.monotonic() + 20
        while len(sample[0]) == LARGE_BYTES and memory_files_bytes() > HELD_BYTES:
            assert time.monotonic() < deadline_s, "its bytes are still held in the shard's memory"
            time.sleep(0.01)
        return checksum(sample)

    assert read(loader_of(server, wait_until_free)) == RIGHT


def test_where_there_is_room_for_a_copy_nothing_is_fetched_twice(server: FaultServer) -> None:
    with loader_of(server, checksum, memory_budget=1000 * MB) as loader:
        for _ in range(3):
            assert sum(len(labels) for _, labels in loader) == SAMPLES
        assert loader.statistics().fetched_bytes < 100 * MB


def test_large_arrays_are_right_and_may_be_changed(server: FaultServer) -> None:
    def changed(sample: Any) -> Any:
        values, label = sample
        crc = zlib.crc32(values)
        values += 1
        return crc, label

    assert read(loader_of(server, changed, fields=("npy", "cls"))) == RIGHT_ARRAYS


def test_bytes_that_moved_to_a_worker_that_died_are_fetched_once_more(server: FaultServer, tmp_path: Path) -> None:
    died = tmp_path / "died"

    def die_once(sample: Any) -> Any:
        if len(sample[0]) == LARGE_BYTES and not died.exists():
            deadline_s = time.monotonic() + 20
            while memory_files_bytes() > HELD_BYTES:  # so that they have really gone
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return checksum(sample)

    assert read(loader_of(server, die_once)) == RIGHT
    assert died.exists()


def test_bytes_that_moved_are_fetched_once_more_for_a_batch_that_is_made_again(server: FaultServer) -> None:
    def longer(sample: Any) -> Any:
        crc, label = checksum(sample)
        return {"crc": crc, "label": label, "array": np.zeros(2 if label in (LARGE, 4) else 1)}

    found = {}
    with loader_of(server, longer, batch_size=2, sampler=[0, 1, LARGE, 4, 2, 5, 6, 7]) as loader:
        for batch in loader:
            found.update(zip(batch["label"].tolist(), batch["crc"].tolist(), strict=True))
    assert found == RIGHT


@pytest.mark.exhaustive
def test_a_worker_may_die_of_a_batch_that_was_made_again_and_delivered(server: FaultServer, tmp_path: Path) -> None:
    """What its task needs is nowhere any more, and nobody has a use for it: nothing may wait for that."""
    reading, delivered = tmp_path / "reading", tmp_path / "delivered"

    def wait_for(file: Path) -> None:
        deadline_s = time.monotonic() + 20
        while not file.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def longer(sample: Any) -> Any:
        crc, label = checksum(sample)
        time.sleep(0.15 if label in (5, 6, 7) else 0)  # so that the next batch is cut into single rows
        if label == LARGE and not reading.exists():
            reading.touch()
            wait_for(delivered)
            os.kill(os.getpid(), signal.SIGKILL)
        if label == 1:
            wait_for(reading)
        return {"crc": crc, "label": label, "array": np.zeros(2 if label in (LARGE, 1, 2, 4) else 1)}

    found = {}
    sampler = [0, 5, 6, 7, LARGE, 1, 2, 4, *[0] * 60]  # more than is scheduled ahead
    with loader_of(server, longer, num_workers=2, sampler=sampler, timeout=30) as loader:
        for batch in loader:
            found.update(zip(batch["label"].tolist(), batch["crc"].tolist(), strict=True))
            if LARGE in found:
                delivered.touch()
    assert found == RIGHT


def test_a_large_field_that_is_read_twice_for_a_batch_is_not_moved(server: FaultServer) -> None:
    def both(sample: Any) -> Any:
        first, second, label = sample
        return zlib.crc32(first), zlib.crc32(second), label

    found = []
    with loader_of(server, both, fields=("bin", "bin", "cls"), sampler=[LARGE, 0, LARGE, LARGE, LARGE, 1]) as loader:
        for batch in loader:
            found += zip(*(column.tolist() for column in batch), strict=True)
    assert found == [(RIGHT[sample], RIGHT[sample], sample) for sample in (LARGE, 0, LARGE, LARGE, LARGE, 1)]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_what_has_moved_is_fetched_again_for_the_next_epoch(server: FaultServer, workers: int) -> None:
    with loader_of(server, checksum, num_workers=workers, shuffle=True) as loader:
        for _ in range(3):
            found = {}
            for crcs, labels in loader:
                found.update(zip(labels.tolist(), crcs.tolist(), strict=True))
            assert found == RIGHT
