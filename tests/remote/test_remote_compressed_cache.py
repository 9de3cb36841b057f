"""Compressed shards in the disk cache: kept as they are, fetched once, and done without where the disk fails."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from places import Place, Step, steps, without_names, write_datasets
from servers.faults import FaultServer, Script

from streamload import StreamLoader
from streamload.errors import ShardFormatError

MB = 1_000_000
SIZES = [[MB] * 20, [MB] * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compressed fast, to their own size, so that the first shard has several parts."""
    made = tmp_path_factory.mktemp("compressed")
    write_datasets(made, SIZES, [])
    (made / "gz").mkdir()
    for shard in (made / "plain").iterdir():
        (made / "gz" / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes(), 0, mtime=0))
    return made


def loader_of(place: Place, form: str = "gz", **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "fields": ("npy", "cls"),
        "num_workers": 0,
    }
    return StreamLoader(place.urls(form, range(len(SIZES))), **{**defaults, **options})


def read(server: FaultServer, **options: Any) -> list[Step]:
    with loader_of(Place(server.url), **options) as loader:
        return without_names(steps(loader))


@pytest.fixture(scope="module")
def right(folder: Path) -> list[Step]:
    """What the uncompressed shards give."""
    with loader_of(Place(os.fspath(folder)), "plain") as loader:
        return without_names(steps(loader))


@pytest.mark.usefixtures("feeders_in_threads")
def test_a_later_loader_fetches_nothing_of_them(
    server: FaultServer, folder: Path, right: list[Step], tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in (folder / "gz").iterdir())
    assert read(server, cache_dir=tmp_path) == right
    first = server.report()
    assert size <= first.sent_bytes <= 1.05 * size
    server.play(Script())
    assert read(server, cache_dir=tmp_path) == right
    assert server.report().sent_bytes == len(SIZES), "the first byte of each, since its answer tells the version"


@pytest.mark.usefixtures("feeders_in_threads")
def test_several_epochs_of_one_loader_fetch_them_once(server: FaultServer, folder: Path, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path, "memory_budget": 60 * MB, "shuffle": 4}
    with loader_of(Place(server.url), **options) as loader:
        for _ in range(3):
            assert sorted(label for _, labels in loader for label in labels.tolist()) == list(range(24))
    size = sum(path.stat().st_size for path in (folder / "gz").iterdir())
    assert server.report().sent_bytes <= 1.05 * size


@pytest.mark.usefixtures("feeders_in_threads")
def test_a_damaged_shard_is_an_error_from_the_cache_as_well(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "gz" / "part000-000000.tar.gz").read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    with FaultServer({"part000-000000.tar.gz": bytes(damaged)}) as server:
        for _ in range(2):
            with (
                StreamLoader(
                    f"{server.url}/part000-000000.tar.gz", 4, fields=("npy", "cls"), num_workers=0, cache_dir=tmp_path
                ) as loader,
                pytest.raises(ShardFormatError),
            ):
                steps(loader)
