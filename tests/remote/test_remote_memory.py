"""The memory that all processes together take over a small `memory_budget`: what is refused, and what is not."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pytest
from matrix import exhaustive
from run_in_workers import large_result
from servers.faults import FaultServer

from streamload import ShardWriter, StreamLoader
from streamload.errors import StorageError

FIELD_BYTES = 1_000_000
SAMPLES = 160
MIB = 1 << 20
FACTOR = 1.25
"""Measured is 0.9 to 1.2, and 1.3 with `shuffle=False` and batches of 24: heaps keep some of what they have freed, and
what is in flight as the first batch tells its size cannot be freed for it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """Shards of 20 MB with fields of 1 MB, and such with tiny ones."""
    folder = tmp_path_factory.mktemp("memory")
    for field in ("npy", "bin"):
        for name, size_bytes in (("large", FIELD_BYTES), ("tiny", 100)):
            with ShardWriter(folder / f"{field}-{name}" / "%06d.tar", max_count=20) as writer:
                for number in range(SAMPLES):
                    value = np.full(size_bytes, number, np.uint8)
                    data = value if field == "npy" else value.tobytes()
                    writer.write({"__key__": f"{number:06d}", field: data, "cls": number})
    with FaultServer(folder) as running:
        yield running


class TreeMemory:
    """The most memory that this process and all below it take in a `with` block: private, and in memory files."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, tree_bytes())


def tree_bytes() -> int:
    """What all processes take now: anonymous memory, and every memory file once."""
    files: dict[int, int] = {}
    private_bytes = 0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            private_bytes += int(re.findall(r"^Anonymous: +(\d+)", rollup, re.MULTILINE)[0]) << 10
            folder = Path(f"/proc/{process.pid}/fd")
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link).startswith("/memfd:"):
                        status = link.stat()
                        files[status.st_ino] = status.st_blocks * 512
    return private_bytes + sum(files.values())


def peak_bytes(server: FaultServer, name: str, batch_size: int, budget_mib: int, **options: Any) -> int:
    """The peak over an epoch, whose every sample comes once."""
    field = name.partition("-")[0]
    urls = [f"{server.url}/{name}/{shard:06d}.tar" for shard in range(SAMPLES // 20)]
    given = {"fields": (field, "cls"), "num_workers": 2, "timeout": 60, **options}
    with StreamLoader(urls, batch_size, memory_budget=budget_mib * MIB, **given) as loader, TreeMemory() as memory:
        labels = [label for _, batch in loader for label in batch.tolist()]
    assert sorted(labels) == list(range(SAMPLES))
    return memory.peak_bytes


@pytest.mark.parametrize(
    ("field", "budget_mib", "batch_size", "window"),
    [
        ("bin", 64, 4, 5),
        exhaustive(("npy", 128, 16, 20)),
        exhaustive(("npy", 128, 1, 50)),
        exhaustive(("npy", 64, 8, 5)),
        exhaustive(("npy", 128, 16, 0)),
        exhaustive(("bin", 128, 4, 50)),
        exhaustive(("bin", 128, 12, 0)),
    ],
)
def test_a_budget_bounds_the_memory_of_all_processes(
    server: FaultServer, field: str, budget_mib: int, batch_size: int, window: int
) -> None:
    order: dict[str, Any] = {"shuffle": True, "shuffle_window": window} if window else {}
    base_bytes = peak_bytes(server, f"{field}-tiny", 4, budget_mib)
    more_bytes = peak_bytes(server, f"{field}-large", batch_size, budget_mib, **order) - base_bytes
    assert more_bytes < FACTOR * budget_mib * MIB


@pytest.mark.parametrize(
    ("field", "budget_mib", "batch_size"),
    [
        ("npy", 64, 16),
        ("bin", 128, 32),
        *map(exhaustive, [("npy", 64, 32), ("npy", 128, 32), ("bin", 64, 16), ("bin", 128, 16)]),
    ],
)
def test_what_does_not_fit_with_its_batches_is_refused_at_the_start(
    server: FaultServer, field: str, budget_mib: int, batch_size: int
) -> None:
    refusal = r"three batches of .*Give a memory_budget of at least \d+ MB.* smaller batch_size"
    with pytest.raises(ValueError, match=refusal):
        peak_bytes(server, f"{field}-large", batch_size, budget_mib, shuffle=True, shuffle_window=50)


def test_batches_that_outgrow_the_budget_are_an_error_and_not_a_wait(tmp_path: Path) -> None:
    """What a `collate_fn` makes is known only then: parts are freed for it, and those needed do not fit again."""
    with ShardWriter(tmp_path / "shards" / "%06d.tar", max_count=1) as writer:
        for number in range(6):
            writer.write({"__key__": f"{number:06d}", "bin": bytes(3 * MIB), "cls": number})
    files = fsspec.filesystem("file")
    options: dict[str, Any] = {"collate_fn": large_result, "memory_budget": "64MiB", "num_workers": 1, "timeout": 25}
    with (
        StreamLoader(str(tmp_path / "shards"), 1, filesystem=files, **options) as loader,
        pytest.raises(StorageError, match="memory_budget of 67 MB is too small"),
    ):
        for _ in loader:
            time.sleep(0.05)
