"""Many small shards where a process may open few files: they are closed and opened again, or there is an error."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix import exhaustive
from places import Place, write_datasets
from servers.faults import FaultServer

SHARDS = 200
PER_SHARD = 40
MOST_OPEN = 256

SCRIPT = textwrap.dedent(
    """
    import json, sys
    from streamload import StreamLoader
    from streamload.errors import StorageError

    urls, options = json.loads(sys.argv[1])
    with StreamLoader(urls, 50, True, fields=("cls",), timeout=60, **options) as loader:
        try:
            for epoch in range(2):
                print(sorted(label for batch in loader for label in batch[0].tolist()) == list(range(200 * 40)))
        except StorageError as error:
            print(error)
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("many")
    write_datasets(found, [[64] * PER_SHARD] * SHARDS, [])
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FaultServer]:
    with FaultServer(folder) as found:
        yield found


def said(root: str, form: str, **options: object) -> list[str]:
    """What a program says that may open few files."""
    urls = Place(root).urls(form, range(SHARDS))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", "-c", SCRIPT, json.dumps([urls, options])],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_OPEN, MOST_OPEN)),
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines()


@pytest.mark.parametrize(("form", "workers"), [exhaustive(("indexed", 0)), ("plain", 1)])
def test_shards_that_are_needed_one_after_the_other(server: FaultServer, form: str, workers: int) -> None:
    assert said(server.url, form, num_workers=workers, shuffle_window=30) == ["True", "True"]


@pytest.mark.exhaustive
def test_with_a_disk_cache(server: FaultServer, tmp_path: Path) -> None:
    options = {"num_workers": 1, "shuffle_window": 30, "cache_dir": str(tmp_path / "cache")}
    assert said(server.url, "indexed", **options) == ["True", "True"]


def test_shards_that_are_all_needed_at_once(server: FaultServer) -> None:
    (error,) = said(server.url, "indexed", num_workers=1, shuffle_window=SHARDS * PER_SHARD)
    assert "more than 42 shards are needed at once" in error
    assert "may have only 256 files open" in error
    assert "`ulimit -n 1536`" in error


@pytest.mark.parametrize("workers", [0, 1])
def test_local_shards_that_are_all_needed_at_once(folder: Path, workers: int) -> None:
    assert said(str(folder), "indexed", num_workers=workers, shuffle_window=SHARDS * PER_SHARD) == ["True", "True"]
