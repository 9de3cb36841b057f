"""A shard that cannot be read is an error when its samples are next, however far ahead it is scanned."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from make_shards import write_numbers
from matrix import exhaustive
from servers.faults import FaultServer

from streamload import StreamLoader
from streamload.errors import DatasetIndexError, ShardFormatError, ShardNotFoundError

SHARDS, SAMPLES, BAD = 12, 10, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(write_numbers(tmp_path / "s", [SAMPLES] * SHARDS, index=False))


def names(root: str) -> list[str]:
    return [f"{root}/part{number:03d}-000000.tar" for number in range(SHARDS)]


def labels_before(kind: type[Exception], loader: StreamLoader) -> tuple[list[int], str | None]:
    """What a pass gives before it ends with an error, and the shard that this names."""
    got: list[int] = []
    with pytest.raises(kind) as caught:
        for (labels,) in loader:
            got += labels.tolist()
    return got, getattr(caught.value, "url", None)


@pytest.mark.parametrize(("remote", "workers"), [(False, 0), (True, 2)])
def test_a_damaged_table(tmp_path: Path, workers: int, remote: bool) -> None:
    """All tables of some thousand rows are looked up at once."""
    folder = Path(write_numbers(tmp_path / "indexed", [SAMPLES] * SHARDS))
    (tables,) = (folder / ".streamload").glob("tables-*")
    content = bytearray(tables.read_bytes())
    content[len(content) * (2 * BAD + 1) // (2 * SHARDS)] ^= 1
    tables.write_bytes(content)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(FaultServer(folder)).url if remote else str(folder)
        loader = stack.enter_context(StreamLoader(names(root), 5, fields=("cls",), num_workers=workers))
        assert labels_before(DatasetIndexError, loader)[0] == list(range(BAD * SAMPLES))


def test_a_damaged_shard(folder: Path) -> None:
    urls = names(str(folder))
    content = Path(urls[BAD]).read_bytes()
    Path(urls[BAD]).write_bytes(b"x" * 512 + content[512:])
    with StreamLoader(urls, 5, fields=("cls",), num_workers=0) as loader:
        assert labels_before(ShardFormatError, loader) == (list(range(BAD * SAMPLES)), urls[BAD])


@pytest.mark.parametrize("workers", [0, exhaustive((2,))])
def test_a_shard_that_is_gone(folder: Path, workers: int) -> None:
    """It is scanned together with those before it, of which nothing is lost."""
    urls = names(str(folder))
    with StreamLoader(urls, 5, fields=("cls",), num_workers=workers) as loader:
        Path(urls[BAD]).unlink()
        assert labels_before(ShardNotFoundError, loader) == (list(range(BAD * SAMPLES)), urls[BAD])


def test_a_shard_that_is_gone_when_the_next_epoch_is_begun_ahead(tmp_path: Path) -> None:
    """Of more shards than stay open between epochs. The loop waited for its batch forever."""
    folder = Path(write_numbers(tmp_path / "s", [1] * 100))
    with StreamLoader(folder, 1, fields=("cls",), num_workers=1, prefetch_batches=1) as loader:
        batches = iter(loader)
        next(batches)
        (folder / "part000-000000.tar").unlink()
        assert len(list(batches)) == 99
        time.sleep(0.5)
        with pytest.raises(ShardNotFoundError):
            next(iter(loader))
