"""Tables: known from an index or from a scan, and held only as far as memory allows."""

from __future__ import annotations

import asyncio
import tarfile
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from servers.faults import FaultServer, Script

from streamload import ShardWriter
from streamload.errors import DatasetIndexError, ShardFormatError
from streamload.index import dataset_index, table_reader
from streamload.index import tables as tables_module
from streamload.index.dataset_index import DatasetIndex
from streamload.index.index_writer import IndexFolder, LocalIndexFolder, RemoteIndexFolder, update_with_tables
from streamload.index.indexed_shards import IndexedShard
from streamload.index.listing import Listing, list_shards
from streamload.index.tables import Tables
from streamload.memory.mapped import map_memory
from streamload.storage.storages import Storages
from streamload.tar.scan import ScannedPiece, scan_prefix, scan_shard
from streamload.tar.table import ShardTable

COUNTS = (3, 1, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard, count in enumerate(COUNTS):
        with ShardWriter(tmp_path / "shards" / f"part{shard}-%06d.tar") as writer:
            for number in range(count):
                writer.write({"__key__": f"{shard}-{number}", "cls": number, "txt": "x" * number})
    return tmp_path / "shards"


def without_index(folder: Path) -> Listing:
    return list_shards(sorted(str(path) for path in folder.glob("*.tar")), None)


@pytest.fixture
def bare(folder: Path) -> Listing:
    for path in (folder / ".streamload").iterdir():
        path.unlink()
    (folder / ".streamload").rmdir()
    return without_index(folder)


def scanned(listing: Listing, shard: int) -> ShardTable:
    listed = listing.shards[shard]
    with open(listed.url, "rb") as file:
        return scan_shard(map_memory(file.fileno(), listed.bytes, writable=False), listed.url)


def test_an_index_gives_counts_at_once_and_tables_when_requested(folder: Path) -> None:
    tables = Tables(list_shards(folder))
    assert tables.counts.values.tolist() == list(COUNTS)
    assert tables.counts.complete
    table = tables.find(2)
    assert table is not None
    assert table.keys() == ["2-0", "2-1", "2-2", "2-3"]
    assert tables.find(2) is table, "it is kept"


def test_without_an_index_nothing_is_known_until_it_was_scanned(bare: Listing) -> None:
    tables = Tables(bare)
    assert not tables.counts.complete
    assert [tables.find(shard) for shard in range(3)] == [None, None, None]
    table = scanned(bare, 1)
    tables.add(1, table)
    assert tables.find(1) is table
    assert tables.counts.values.tolist() == [-1, 1, -1]
    assert tables.find(0) is None


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


def test_columns_are_those_of_the_table_and_made_once(folder: Path) -> None:
    tables = Tables(list_shards(folder))
    table = tables.find(0)
    assert table is not None
    column = tables.column(0, table, ("jpg", "cls"))
    assert column.tolist() == table.column(("jpg", "cls")).tolist()
    assert tables.column(0, table, ["jpg", "cls"]) is column
    assert tables.column(0, table, ("txt",)).tolist() == table.column(("txt",)).tolist()


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


def test_of_the_tables_held_the_longest_unused_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Tables(list_shards(folder))
    first, _, _ = both.find(0), both.find(1), both.find(2)
    assert first is not None
    monkeypatch.setattr(tables_module, "LEAST_TABLES_BYTES", both.held_bytes - 1)
    monkeypatch.setattr(tables_module, "MOST_TABLES_BYTES", both.held_bytes - 1)
    tables = Tables(list_shards(folder))
    tables.find(0), tables.find(1), tables.find(0)
    column = tables.column(0, first, ("cls",))
    tables.find(2)
    assert tables.at_hand(1) is None
    assert tables.at_hand(2) is not None
    tables.find(1), tables.find(2), tables.find(0)
    assert tables.column(0, first, ("cls",)) is not column, "it went with its table"


def test_a_scanned_table_is_held_whatever_the_limit(bare: Listing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "LEAST_TABLES_BYTES", 1)
    monkeypatch.setattr(tables_module, "MOST_TABLES_BYTES", 1)
    tables = Tables(bare)
    for shard in range(3):
        tables.add(shard, scanned(bare, shard))
    assert all(tables.find(shard) is not None for shard in range(3))


def test_a_column_of_a_table_that_was_dropped_is_made_without_being_kept(folder: Path) -> None:
    tables = Tables(list_shards(folder))
    table = Tables(list_shards(folder)).find(0)
    assert table is not None
    column = tables.column(0, table, ("cls",))
    assert column.tolist() == table.column(("cls",)).tolist()
    assert tables.column(0, table, ("cls",)) is not column


def test_skipped_members_are_counted_once_for_each_shard(tmp_path: Path, bare: Listing) -> None:
    tables = Tables(bare)
    table = scanned(bare, 0)
    noted = ShardTable(
        **{name: getattr(table, name) for name in ShardTable.__slots__ if name != "skipped"}, skipped={"directory": 2}
    )
    for _ in range(3):
        tables.add(0, noted)
    tables.add(1, noted)
    assert tables.skipped == {"directory": 4}


def test_the_url_of_a_shard(bare: Listing) -> None:
    assert Tables(bare).url(2) == bare.shards[2].url


def test_memory_is_counted_by_the_arrays(folder: Path) -> None:
    held = []
    for shard in (1, 2):
        tables = Tables(list_shards(folder))
        table = tables.find(shard)
        assert table is not None
        assert tables.held_bytes >= np.asarray(table.member_offset).nbytes
        held.append(tables.held_bytes)
    assert 0 < held[0] < held[1]


def pieces_of(listing: Listing, shard: int, cuts: list[int]) -> list[ScannedPiece]:
    content = Path(listing.shards[shard].url).read_bytes()
    pieces, start = [], 0
    for cut in [*cuts, len(content)]:
        pieces.append(scan_prefix(memoryview(content), "", start=start, available=cut, total=len(content)))
        start = pieces[-1].resume
    return pieces


def test_a_table_grows_with_every_piece(bare: Listing) -> None:
    tables = Tables(bare)
    whole = scanned(bare, 2)
    cut = int(whole.member_offset[4])  # the third sample's first payload: two samples are whole
    assert tables.next_scan(2) == (0, 512)
    first, last = pieces_of(bare, 2, [cut])
    tables.add_piece(2, first)
    table = tables.find(2)
    assert table is not None
    assert table.keys() == whole.keys()[:2]
    assert tables.column(2, table, ("cls",)).tolist() == whole.column(("cls",)).tolist()[:2]
    assert tables.counts.values.tolist() == [-1, -1, -1]
    assert tables.counts.least(2) == 2
    assert tables.next_scan(2) == (first.resume, first.needs)
    tables.add_piece(2, last)
    table = tables.find(2)
    assert table is not None
    assert table.keys() == whole.keys()
    assert tables.column(2, table, ("cls",)).tolist() == whole.column(("cls",)).tolist()
    assert tables.counts.values.tolist() == [-1, -1, 4]
    assert tables.next_scan(2) == (0, 512), "what is needed for growing is let go"


def test_a_key_that_comes_again_in_another_piece_names_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("a.jpg", "b.jpg", "a.cls"):
            tar.addfile(tarfile.TarInfo(name))
    listing = list_shards([str(path)], None)
    tables = Tables(listing)
    first, last = pieces_of(listing, 0, [1024])
    tables.add_piece(0, first)
    with pytest.raises(ShardFormatError) as caught:
        tables.add_piece(0, last)
    assert (caught.value.url, caught.value.key, caught.value.offset) == (listing.shards[0].url, "a", 1024)


def test_members_skipped_in_pieces_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in (".x", "a.jpg", ".y", "b.jpg", ".z"):
            tar.addfile(tarfile.TarInfo(name))
    listing = list_shards([str(path)], None)
    tables = Tables(listing)
    for piece in pieces_of(listing, 0, [512, 1024, 1536, 2048, 2560]):
        tables.add_piece(0, piece)
    assert tables.skipped == {"hidden": 3}
    assert tables.counts.complete


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


def test_tables_that_are_needed_at_once_are_held_beyond_the_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_module, "LEAST_TABLES_BYTES", 1)
    monkeypatch.setattr(tables_module, "MOST_TABLES_BYTES", 1)
    tables = Tables(list_shards(folder))
    tables.hold([0, 1])
    tables.find(0), tables.find(1)
    assert tables.at_hand(0) is not None
    assert tables.at_hand(1) is not None
    tables.hold([])
    tables.find(2)
    assert [shard for shard in range(3) if tables.at_hand(shard) is not None] == [2]


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


def test_tables_that_lie_beside_each_other_are_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int | None]] = []
    real = table_reader.read_local

    def noting(path: str, start: int = 0, end: int | None = None) -> bytes | None:
        if path.endswith(".bin"):
            reads.append((start, end))
        return real(path, start, end)

    monkeypatch.setattr(table_reader, "read_local", noting)
    tables = Tables(list_shards(folder))
    assert [tables.find(shard) is not None for shard in range(3)] == [True] * 3
    assert len(reads) == 1
