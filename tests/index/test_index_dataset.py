"""A dataset's tables: known from an index or from a scan, and held only as far as memory allows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from indexed_shards import read_index, table_in
from servers.faults import FaultServer, Script

from streamload import ShardWriter
from streamload.errors import DatasetIndexError
from streamload.index import dataset as dataset_module
from streamload.index import dataset_index
from streamload.index.dataset import Dataset
from streamload.index.dataset_index import IndexedShard, IndexFolder
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages

COUNTS = (3, 1, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard, count in enumerate(COUNTS):
        with ShardWriter(tmp_path / "shards" / f"part{shard}-%06d.tar") as writer:
            for number in range(count):
                writer.write({"__key__": f"{shard}-{number}", "cls": number, "txt": "x" * number})
    return tmp_path / "shards"


def served(folder: Path) -> dict[str, bytes]:
    return {f"data/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table is read alone, and only one is kept."""
    monkeypatch.setattr(dataset_index, "GROUP_BYTES", 1)
    monkeypatch.setattr(dataset_module, "LEAST_TABLES_BYTES", 1)
    monkeypatch.setattr(dataset_module, "MOST_TABLES_BYTES", 1)


async def test_tables_beyond_the_limit_are_dropped_unless_held(folder: Path, no_room: None) -> None:
    dataset = Dataset(list_shards(folder))
    for shard in (0, 1, 2, 0, 2, 1, 1):
        table = dataset.find(shard)
        assert table is not None
        assert len(table) == COUNTS[shard]
        assert [held for held in range(3) if dataset.at_hand(held) is not None] == [shard]
    for _ in range(len(COUNTS) - 1):
        missing = dataset.hold(range(3))
        await dataset.fetch(missing[0])
    assert dataset.hold(range(3)) == []


@pytest.mark.parametrize("left_bytes", [0, 8, 400])
async def test_a_table_file_that_is_cut_on_a_server_is_an_error_of_the_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left_bytes: int
) -> None:
    monkeypatch.setattr(dataset_index, "GROUP_BYTES", 1)
    files = {name: data[:left_bytes] if name.endswith(".bin") else data for name, data in served(folder).items()}
    with FaultServer(files) as server:
        storages = Storages()
        dataset = Dataset(list_shards(f"{server.url}/data", None, storages), storages)
        try:
            with pytest.raises(DatasetIndexError, match="streamload index") as caught:
                await dataset.load(2)
        finally:
            await storages.aclose()
    assert caught.value.url is not None
    assert caught.value.url.endswith(".bin")


async def test_neighbouring_tables_are_read_by_one_request(folder: Path) -> None:
    with FaultServer(served(folder)) as server:
        storages = Storages()
        dataset = Dataset(list_shards(f"{server.url}/data", None, storages), storages)
        server.play(Script())
        try:
            loaded = await asyncio.gather(*(dataset.load(shard) for shard in range(len(COUNTS))))
        finally:
            await storages.aclose()
        requested = [path for _, path, _ in server.report().log]
    assert [len(table) for table in loaded if table is not None] == list(COUNTS)
    assert len(requested) == 1, "the tables lie beside each other; the index was read for the listing"


@pytest.mark.parametrize("remote", [False, True])
async def test_an_index_that_is_written_anew_while_in_use_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, remote: bool
) -> None:
    monkeypatch.setattr(dataset_index, "GROUP_BYTES", 1)
    memory, storages = fsspec.filesystem("memory"), Storages()
    url = "memory://written-anew" if remote else str(folder)
    try:
        memory.put(str(folder), "/written-anew", recursive=True)
        dataset = Dataset(list_shards(url, None, storages), storages)
        await dataset.load(0)
        name = "part2-000000.tar"
        table = replace(table_in(read_index(folder / ".streamload"), name), member_crc32=None)
        place = IndexFolder(storages.for_url(url), f"{url}/.streamload")
        place.update_with_tables([(IndexedShard(name, table.shard_bytes, len(table)), table)])
        with pytest.raises(DatasetIndexError, match=r"rewritten while in use, make a new loader"):
            await dataset.load(1)
    finally:
        memory.rm("/written-anew", recursive=True)
