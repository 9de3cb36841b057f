"""What a training program does with feeders on a Ray cluster; each runs in a process of its own, since Ray stays there.

Each function gets the folder of the shards and the address of the cluster.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from same_batches import assert_same
from transforms import fails_at_the_end, int_or_float, mistaken, noisy, note_process, slow, stacked, uneven

from streamload import Mixture, RayFeeders, StreamLoader
from streamload.errors import ClusterError, SampleError, WorkerError

ARGUMENTS: dict[str, Any] = {
    "batch_size": 16,
    "shuffle": 40,
    "fields": ("npy", "cls", "txt", "bin"),
    "num_workers": 1,
}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"transform": noisy, "lanes": 2},
    "short tail on two ranks": {"pad": False, "rank": 1, "world_size": 2, "batch_size": 7},
    "padded on three ranks": {"rank": 2, "world_size": 3, "batch_size": 5},
    "drop_last": {"drop_last": True},
    "weights": {"weights": "balanced", "epoch_size": 150},
    "where": {"where": "label > 2"},
    "collate_fn": {"collate_fn": stacked},
    "not alike": {"transform": {"cls": int_or_float}, "fields": ("cls", "txt"), "batch_size": 5},
    "sampler": {"sampler": [5, 3, 3, 300, 17, 42, 9], "shuffle": False, "batch_size": 3},
    "left out": {"fields": ("bad.npy", "txt"), "shuffle": False, "batch_size": 2, "on_error": "skip"},
    "replaced": {"fields": ("bad.npy", "txt"), "shuffle": False, "batch_size": 3, "on_error": "replace"},
    "empty at the end": {"fields": ("cls", "__key__"), "shuffle": False, "transform": fails_at_the_end,
                         "on_error": "skip", "where": [f"{number:05d}" for number in range(100)]},
}  # fmt: skip


def loader_of(shards: str, address: str | None, number: int = 2, **arguments: Any) -> StreamLoader:
    """A loader with so many feeders, or a local one."""
    if address is None:
        return StreamLoader(shards, **{**ARGUMENTS, "num_workers": 0, **arguments})
    return StreamLoader(shards, **{**ARGUMENTS, **arguments, "num_workers": RayFeeders(number, address=address)})


def same(shards: str, address: str, number: str, *cases: str) -> None:
    """Two epochs through so many feeders."""
    for case in cases:
        found = []
        for where in (None, address):
            with loader_of(shards, where, int(number), **CASES[case]) as loader:
                passes = [list(loader) for _ in range(2)]
                assert [len(each) for each in passes] == [len(loader)] * 2, case
                found.append((passes, [str(error) for error in loader.skipped]))
        assert_same(found[1], found[0])


def mixed(shards: str, address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "other").symlink_to(shards)
        mixture: Any = Mixture({"a": (shards, 3), "b": (f"{folder}/other", 1)})
        with loader_of(mixture, None) as local, loader_of(mixture, address, 3) as loader:
            assert_same(list(loader), list(local))


def resumed(shards: str, address: str) -> None:
    """A state goes from one number of feeders to another, and each pass is left in its middle."""
    with loader_of(shards, None) as loader:
        expected = list(loader)
    state, found = None, []
    for number in (2, 0, 1):
        with loader_of(shards, address if number else None, number) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                found.append(batch)
                state = loader.state_dict()
                if len(found) % 8 == 0:
                    break
    assert_same(found, expected)


def left(shards: str, address: str) -> None:
    """A pass is left, and the next one is the next epoch; another transform holds from then on."""
    with loader_of(shards, None) as loader:
        list(loader)
        expected = list(loader)
        loader.transform = noisy
        expected += list(loader)
    with loader_of(shards, address) as loader:
        next(iter(loader))
        found = list(loader)
        loader.transform = noisy
        assert_same(found + list(loader), expected)


def uncounted(shards: str, address: str) -> None:
    """Without an index."""
    with tempfile.TemporaryDirectory() as folder:
        for shard in sorted(Path(shards).glob("*.tar")):
            Path(folder, shard.name).symlink_to(shard)
        with loader_of(folder, None) as local, loader_of(folder, address) as loader:
            assert len(loader) == len(local)
            assert_same(list(loader), list(local))


def killed(shards: str, address: str, what: str, at: str) -> None:
    """A process dies in the middle of a pass. Batches are not kept, so their memory is used again."""
    given: dict[str, Any] = {"batch_size": 8, "transform": slow}
    with loader_of(shards, None, **given) as loader:
        expected = list(loader)
    with tempfile.TemporaryDirectory() as folder:
        with loader_of(shards, address, **given, worker_init_fn=partial(note_process, folder)) as loader:
            found, addresses = [], set()
            for number, batch in enumerate(loader):
                found.append(deepcopy(batch))
                addresses.add(batch[0].data_ptr())
                if number == int(at):
                    _process(folder, what).kill()
            restarted = loader.statistics().restarted_workers
    assert_same(found, expected)
    assert restarted == 1, restarted
    assert len(addresses) < len(found) / 2


def _process(folder: str, what: str) -> psutil.Process:
    """One of the processes above a worker; a worker itself has the first place."""
    worker = psutil.Process(int(min(os.listdir(folder))))
    above = [worker, *worker.parents()]
    return next(process for process in above if what in " ".join(process.cmdline()))


def dying(shards: str, address: str) -> None:
    """A feeder dies as often as it is started."""
    with loader_of(shards, address, 1, collate_fn=_end_feeder) as loader:
        with pytest.raises(WorkerError, match="feeder 0 of 1 on the Ray cluster died twice without a batch"):
            next(iter(loader))


def _end_feeder(rows: list[Any]) -> Any:
    os.kill(os.getppid(), 9)
    time.sleep(30)


FAILING: dict[str, dict[str, Any]] = {
    "bad.npy": {"fields": ("bad.npy",), "lanes": 2},
    "npy": {"fields": ("npy", "cls"), "transform": uneven},
    "mistaken": {"transform": {"cls": mistaken}, "on_error": "skip"},
}


def failing(shards: str, address: str, *cases: str) -> None:
    """The same error comes at the same turn, and with the same state."""
    for case in map(FAILING.__getitem__, cases):
        found = []
        for where in (None, address):
            with loader_of(shards, where, **{**case, "num_workers": 1}) as loader:
                batches = []
                with pytest.raises(SampleError) as caught:
                    batches.extend(iter(loader))
                error = caught.value
                lines = traceback.format_exception(error)
                found.append((len(batches), lines, error.url, error.key, loader.state_dict()))
        assert found[1] == found[0], found


def refused(shards: str, address: str) -> None:
    """What cannot be is a ClusterError that says so."""
    taken = StreamLoader(shards, **ARGUMENTS | {"num_workers": RayFeeders(2, num_cpus=2, address=address)})
    for feeders, message in (
        (RayFeeders(3, num_cpus=2, address=address), "has room for 2 of 3 feeders with 2 CPU each"),
        (RayFeeders(1, address=address, start_timeout=3), "within start_timeout=3 s: 0 CPU are free there"),
    ):
        with StreamLoader(shards, **ARGUMENTS | {"num_workers": feeders}) as loader:
            with pytest.raises(ClusterError, match=message):
                next(iter(loader))
        next(iter(taken))
    taken.close()


def waiting(shards: str, address: str) -> None:
    """To be killed."""
    with loader_of(shards, address) as loader:
        next(iter(loader))
        print("waits", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
