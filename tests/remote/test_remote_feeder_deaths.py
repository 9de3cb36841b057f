"""The feeder of remote shards is killed: another one fetches what is still missing, and answers what was asked."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from late_cuda import LateCuda
from matrix import exhaustive
from places import Place, local
from processes import kill_one
from servers.faults import FaultServer, Script

from streamload import StreamLoader

SIZES = [[30_000] * 40] * 5
COMPRESSED = ["gz"]
LABELS = list(range(200))


def loader_of(place: Place, form: str, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {"batch_size": 4, "fields": ("npy", "cls"), "num_workers": 0, "prefetch_batches": 1}
    return StreamLoader(place.urls(form, range(5)), **{**defaults, **options})


OTHERS = [
    exhaustive((where, form, workers, on_device, 20))
    for where, form in (*(("remote", form) for form in ("indexed", "plain", "gz")), ("local", "plain"), ("local", "gz"))
    for workers in (0, 2)
    for on_device in (False, True)
    if (where, form, workers) != ("local", "plain", 0)  # there the trainer does all itself
]


@pytest.mark.parametrize(
    ("where", "form", "workers", "on_device", "kills"),
    [("remote", "plain", 2, False, 1), exhaustive(("remote", "indexed", 0, False, 1)), *OTHERS],
)
def test_killed_at_random_instants(
    server: FaultServer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    form: str,
    workers: int,
    on_device: bool,
    kills: int,
) -> None:
    """Feeders, and where so many are killed as many workers."""
    server.play(Script(bytes_per_s=3e6))
    generator, cuda = random.Random(workers), LateCuda(monkeypatch)
    modules = ["streamload.feeder", "workers.worker"] if workers and kills > 1 else ["streamload.feeder"]
    due = [module for module in modules for _ in range(kills)]
    generator.shuffle(due)
    got: list[int] = []
    epochs = 0
    place = Place(server.url) if where == "remote" else local(folder)
    options = {"device": "cuda"} if on_device else {}
    with loader_of(place, form, num_workers=workers, **options) as loader:
        while due:
            epochs += 1
            for step, batch in enumerate(loader):
                got += cuda.read(batch[1]) if on_device else batch[1].tolist()
                assert batch[0].shape == (4, 30_000)
                time.sleep(generator.random() * 0.02)
                if due and step % 8 == 4 and kill_one(due[-1]):
                    due.pop()
    assert got == epochs * LABELS
    assert cuda.too_early == 0
