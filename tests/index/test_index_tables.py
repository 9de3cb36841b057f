"""Tables: known from an index or from a scan, and held only as far as memory allows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from servers.faults import FaultServer, Script

from streamload import ShardWriter
from streamload.errors import DatasetIndexError
from streamload.index import dataset_index
from streamload.index import tables as tables_module
from streamload.index.dataset_index import DatasetIndex
from streamload.index.index_writer import IndexFolder, LocalIndexFolder, RemoteIndexFolder, update_with_tables
from streamload.index.indexed_shards import IndexedShard
from streamload.index.listing import list_shards
from streamload.index.tables import Tables
from streamload.storage.storages import Storages

COUNTS = (3, 1, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard, count in enumerate(COUNTS):
        with ShardWriter(tmp_path / "shards" / f"part{shard}-%06d.tar") as writer:
            for number in range(count):
                writer.write({"__key__": f"{shard}-{number}", "cls": number, "txt": "x" * number})
    return tmp_path / "shards"


def test_a_damaged_index_is_an_error_where_it_is_needed(folder: Path) -> None:
    listing = list_shards(folder)
    (file,) = (folder / ".streamload").glob("tables-*.bin")
    content = bytearray(file.read_bytes())
    content[DatasetIndex.load(folder / ".streamload").place("part1-000000.tar").start] ^= 1
    file.write_bytes(content)
    tables = Tables(listing)
    assert tables.find(0) is not None
    with pytest.raises(DatasetIndexError):
        tables.find(1)


def test_tables_beyond_the_limit_are_dropped_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "LEAST_TABLES_BYTES", 1)
    monkeypatch.setattr(tables_module, "MOST_TABLES_BYTES", 1)
    tables = Tables(list_shards(folder))
    for shard in (0, 1, 2, 0, 2, 1, 1):
        table = tables.find(shard)
        assert table is not None
        assert len(table) == COUNTS[shard]
        assert tables.column(shard, table, ("cls",)).tolist() == table.column(("cls",)).tolist()
        assert [held for held in range(3) if tables.at_hand(held) is not None] == [shard]


@pytest.mark.parametrize("left_bytes", [0, 8, 400])
async def test_a_table_file_that_is_cut_on_a_server_is_an_error_of_the_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left_bytes: int
) -> None:
    monkeypatch.setattr(dataset_index, "GROUP_BYTES", 1)
    files = {f"data/{path.relative_to(folder)}": path.read_bytes() for path in files_below(folder)}
    files = {name: content[:left_bytes] if name.endswith(".bin") else content for name, content in files.items()}
    with FaultServer(files) as server:
        storages = Storages()
        listing = list_shards(f"{server.url}/data", None, storages)
        tables = Tables(listing, storages=storages)
        try:
            with pytest.raises(DatasetIndexError, match="streamload index") as caught:
                await tables.load(2)
        finally:
            await storages.aclose()
    assert caught.value.url is not None
    assert caught.value.url.endswith(".bin")


async def test_the_list_of_a_remote_index_is_read_once_for_all_tables_that_are_loaded_at_once(folder: Path) -> None:
    with FaultServer({f"data/{path.relative_to(folder)}": path.read_bytes() for path in files_below(folder)}) as server:
        storages = Storages()
        listing = list_shards(f"{server.url}/data", None, storages)
        tables = Tables(listing, storages=storages)
        server.play(Script())
        try:
            loaded = await asyncio.gather(*(tables.load(shard) for shard in range(len(COUNTS))))
        finally:
            await storages.aclose()
        requested = [path for _, path, _ in server.report().log]
    assert [len(table) for table in loaded if table is not None] == list(COUNTS)
    assert sum(path.endswith("/index.json") for path in requested) == 1
    assert len(requested) == 2, "and their tables, which lie beside each other, by one request"


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_an_index_that_is_written_anew_while_it_is_used_is_read_again_for_shards_that_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_index, "GROUP_BYTES", 1)
    tables = Tables(list_shards(folder))
    assert tables.find(0) is not None
    rewrite(folder, "part2-000000.tar")
    table = tables.find(1)
    assert table is not None
    assert len(table) == COUNTS[1]
    with pytest.raises(DatasetIndexError, match=r"part2-000000.tar' is another now; make a new loader") as caught:
        tables.find(2)
    assert caught.value.url == f"{folder}/.streamload/index.json"


async def test_the_same_of_a_remote_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_index, "GROUP_BYTES", 1)
    memory, storages, url = fsspec.filesystem("memory"), Storages(), "memory://written-anew"
    try:
        memory.put(str(folder), "/written-anew", recursive=True)
        tables = Tables(list_shards(url, None, storages), storages=storages)
        await tables.load(0)
        place = RemoteIndexFolder(storages.for_url(url), f"{url}/.streamload")
        rewrite(folder, "part2-000000.tar", place)
        table = await tables.load(1)
        assert table is not None
        assert len(table) == COUNTS[1]
        with pytest.raises(DatasetIndexError, match=r"part2-000000.tar' is another now"):
            await tables.load(2)
    finally:
        memory.rm("/written-anew", recursive=True)


def rewrite(folder: Path, name: str, place: IndexFolder | None = None) -> None:
    """Another table of the same size and number of samples takes the place of one, so that its file is another."""
    table = replace(DatasetIndex.load(folder / ".streamload").table(name), member_crc32=None)
    place = place or LocalIndexFolder(str(folder / ".streamload"))
    update_with_tables(place, [(IndexedShard.of(name, table), table)])
