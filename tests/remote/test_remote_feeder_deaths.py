"""The feeder of remote shards is killed: another one fetches what is still missing, and answers what was asked."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from matrix import exhaustive
from places import Place, write_datasets
from processes import children, wait_until
from servers.faults import FaultServer, Script

from streamload import StreamLoader

SIZES = [[30_000] * 40] * 5
LABELS = list(range(200))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    folder = tmp_path_factory.mktemp("deaths")
    write_datasets(folder, SIZES, [])
    with FaultServer(folder) as running:
        running.play(Script(bytes_per_s=3e6))
        yield running


def loader_of(server: FaultServer, form: str, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {"batch_size": 4, "fields": ("npy", "cls"), "num_workers": 0, "prefetch_batches": 1}
    return StreamLoader(Place(server.url).urls(form, range(5)), **{**defaults, **options})


def kill_one(module: str) -> bool:
    """Kill a process of this name, if there is one."""
    for child in children(module)[:1]:
        os.kill(child.pid, signal.SIGKILL)
        return True
    return False


@pytest.mark.parametrize(
    ("workers", "form", "kills"),
    [(0, "indexed", 1), (2, "plain", 1), exhaustive((0, "plain", 20)), exhaustive((2, "indexed", 20))],
)
def test_killed_at_random_instants(server: FaultServer, workers: int, form: str, kills: int) -> None:
    """Between two deaths of a feeder, one of a worker."""
    generator = random.Random(workers)
    modules = ["streamload.feeder", "workers.worker"] if workers and kills > 1 else ["streamload.feeder"]
    due = [module for module in modules for _ in range(kills)]
    generator.shuffle(due)
    got: list[int] = []
    epochs = 0
    with loader_of(server, form, num_workers=workers) as loader:
        while due:
            epochs += 1
            for step, batch in enumerate(loader):
                got += batch[1].tolist()
                assert batch[0].shape == (4, 30_000)
                time.sleep(generator.random() * 0.02)
                if due and step % 8 == 4 and kill_one(due[-1]):
                    due.pop()
    assert got == epochs * LABELS


def test_a_call_is_made_again_while_the_loop_goes_on(server: FaultServer) -> None:
    lengths: list[int] = []
    got: list[int] = []
    with loader_of(server, "plain", num_workers=1) as loader:
        calling = threading.Thread(target=lambda: lengths.append(len(loader)))
        for step, batch in enumerate(loader):
            got += batch[1].tolist()
            if step == 2:
                calling.start()
                assert wait_until(lambda: kill_one("streamload.feeder"))
        calling.join()
        assert loader.statistics().restarted_workers == 1
    assert got == LABELS
    assert lengths == [50]


def test_a_call_that_finds_the_feeder_dead_leaves_the_loop_all_its_batches(server: FaultServer) -> None:
    got: list[int] = []
    with loader_of(server, "plain", num_workers=1, prefetch_batches=8) as loader:
        for step, batch in enumerate(loader):
            got += batch[1].tolist()
            if step == 2:
                time.sleep(0.3)  # for batches that are announced by then
                assert kill_one("streamload.feeder")
                assert len(loader) == 50
    assert got == LABELS
