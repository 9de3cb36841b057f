"""Compressed shards with little room: each is decompressed as a whole, and may have to make room for an earlier one."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path
from typing import Any

import pytest
from matrix import exhaustive
from places import COMPRESSORS, write_datasets
from servers.faults import FaultServer
from typer.testing import CliRunner

from streamload import ShardWriter, StreamLoader
from streamload.cli.main import app
from streamload.errors import StorageError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

MB = 1_000_000
SAMPLES = list(range(60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four compressed shards of two parts each."""
    found = tmp_path_factory.mktemp("compressed")
    with ShardWriter(found / "whole", max_count=15) as writer:
        for number in SAMPLES:
            writer.write({"__key__": f"{number:05d}", "bin": bytes([number]) * MB})
    (found / "gz").mkdir()
    for whole in (found / "whole").glob("*.tar"):
        (found / "gz" / f"{whole.name}.gz").write_bytes(COMPRESSORS["gz"](whole.read_bytes()))
    return found / "gz"


def labels_of(samples: list[tuple[bytes]]) -> list[int]:
    return [content[-1] for (content,) in samples]


def epoch_of(folder: Path, budget: int, **options: Any) -> list[int]:
    with StreamLoader(
        folder, fields=("bin",), collate_fn=labels_of, memory_budget=budget, num_workers=0, **options
    ) as loader:
        return [sorted(label for batch in loader for label in batch) for _ in range(2)][-1]


def test_a_shard_that_does_not_fit_is_an_error_that_says_what_does(folder: Path) -> None:
    with pytest.raises(StorageError, match=r"at least \d+ MB") as caught:
        epoch_of(folder, 16 * MB, batch_size=1)
    enough = int(re.search(r"at least (\d+) MB", str(caught.value))[1])  # type: ignore[index]
    assert epoch_of(folder, (enough + 1) * MB, batch_size=1) == SAMPLES


@pytest.mark.parametrize("shuffle", [0, 8, 20])
@pytest.mark.parametrize(
    ("batch_size", "budget"),
    [(1, 40), (3, 60), (1, 90), *(exhaustive((4, budget)) for budget in range(30, 130, 5))],
)
def test_an_epoch_comes_whole_or_does_not_fit(folder: Path, batch_size: int, budget: int, shuffle: int) -> None:
    """Whichever shards are decompressed ahead, those that are needed first come first."""
    try:
        found = epoch_of(folder, budget * MB, batch_size=batch_size, shuffle=shuffle or False)
    except StorageError as error:
        found = SAMPLES if shuffle or budget < 60 else [str(error)]  # a batch may lie in two shards
    assert found == SAMPLES


def test_shards_are_decompressed_ahead_only_where_there_is_room_for_them(tmp_path: Path) -> None:
    """What is displaced is fetched again: only the first ones are, since nobody knows yet how large shards become."""
    write_datasets(tmp_path, [[MB] * 20] * 6, [])
    (tmp_path / "gz").mkdir()
    for whole in (tmp_path / "plain").iterdir():
        (tmp_path / "gz" / f"{whole.name}.gz").write_bytes(gzip.compress(whole.read_bytes(), 0, mtime=0))
    assert CliRunner().invoke(app, ["index", os.fspath(tmp_path / "gz")]).exit_code == 0
    with FaultServer(tmp_path / "gz") as server:
        urls = [f"{server.url}/part{shard:03d}-000000.tar.gz" for shard in range(6)]
        with StreamLoader(urls, 4, fields=("cls",), num_workers=0, memory_budget=60 * MB) as loader:
            assert [label for (labels,) in loader for label in labels.tolist()] == list(range(120))
        assert server.report().sent_bytes < 1.6 * 120 * MB
