"""The index: written whole, merged, reproducible, and never trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted_tar import Archive, header
from indexed_shards import index_shards, read_index, table_in, write_index
from written_shards import assert_same_tables

from streamload.errors import DatasetIndexError, StorageError
from streamload.index.dataset_index import DatasetIndex, IndexedShard, pack_table, unpack_table
from streamload.tar.scan import ShardTable, scan_shard


def shard_bytes(samples: int, field: bytes = b"cls") -> bytes:
    archive = Archive().add(header(b"README", 0))
    for number in range(samples):
        archive.add(header(b"k\xff%03d." % number + field, 2), b"%02d" % number)
    return archive.whole()


def scanned(samples: int, **options: bool) -> ShardTable:
    return scan_shard(memoryview(shard_bytes(samples)), "memory", **options)


def refused(content: bytes) -> str:
    with pytest.raises(DatasetIndexError) as caught:
        unpack_table(content, "some.bin")
    assert (caught.value.url, caught.value.offset) == ("some.bin", 0)
    assert "streamload index" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("options", [{}, {"every_byte": True}])
@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_table_comes_back_as_it_was(samples: int, options: dict[str, bool]) -> None:
    table = scanned(samples, **options)
    assert_same_tables(unpack_table(pack_table(table), ""), table)


def test_a_table_that_misses_its_end_and_odd_field_names_come_back() -> None:
    content = Archive().add(header(b"a.\xff\xc3\x84", 0)).whole(b"")
    table = scan_shard(memoryview(content), "")
    back = unpack_table(pack_table(table), "")
    assert back.fields == ("\udcffä",)
    assert back.skipped == {"missing end-of-archive marker": 1}


WRAPS = ((1 << 64) + 3) // 3
"""Of four such edges each difference is positive in 64 bits."""


def change(**columns: Any) -> Callable[[ShardTable], ShardTable]:
    return lambda table: dataclasses.replace(table, **columns)


@pytest.mark.parametrize(
    "damage",
    [
        change(member_offset=np.array([512, 1536, 1 << 40], np.int64)),
        change(member_offset=np.array([-1, 1536, 2560], np.int64)),
        change(member_size=np.array([2, 2, (1 << 63) - 1], np.int64)),
        change(member_size=np.array([2, 2], np.int64)),
        change(member_field=np.array([0, 0, 1], np.uint16)),
        change(sample_start=np.array([0, 1, 2], np.int64)),
        change(sample_start=np.array([0, 0, 1, 3], np.int64)),
        change(sample_start=np.array([0, 3], np.int64)),
        change(key_start=np.array([0, 5, 10, 99], np.int64)),
        change(key_start=np.array([0, 10, 5, 15], np.int64)),
        change(key_bytes=np.array([1], np.uint8)),
        change(member_crc32=np.array([1], np.uint32)),
        change(labels=np.array([1], np.int64)),
        change(shard_bytes=100),
        change(shard_bytes=(1 << 64) - 1),
        change(sample_start=np.array([0, WRAPS, 2 * WRAPS - (1 << 64), 3], np.int64)),
        change(key_start=np.array([0, WRAPS, 2 * WRAPS - (1 << 64), 15], np.int64)),
        change(fields=()),
        change(fields=(1,)),
        change(skipped={"x": "y"}),
    ],
)
def test_inconsistent_tables_are_refused(damage: Callable[[ShardTable], ShardTable]) -> None:
    table = scanned(3, every_byte=True)
    assert table.key_start.tolist() == [0, 5, 10, 15]
    refused(pack_table(damage(table)))


def test_a_table_of_another_version_or_kind_is_refused() -> None:
    whole = pack_table(scanned(1))
    assert "format 9" in refused(whole[:4] + b"\x09" + whole[5:])
    for garbage in (b"", b"not a table", whole[:100], whole[:-8], whole + bytes(8), bytes(200), b"\xff" * 200):
        refused(garbage)
    counts = bytes.fromhex("ffffffffffffff7f")
    for place in range(8, 48, 8):  # counts beyond what fits into 63 bits when they are added
        refused(whole[:place] + counts + whole[place + 8 :])
        refused(whole[:place] + b"\xff" * 8 + whole[place + 8 :])


def test_random_damage_to_a_table_raises_nothing_else() -> None:
    chance = random.Random(4)
    whole = pack_table(scanned(5, every_byte=True))
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        del content[len(content) - chance.choice((0, 0, 0, 1, 200)) :]
        with contextlib.suppress(DatasetIndexError):
            unpack_table(bytes(content), "some.bin")
        if content != whole:
            entry = IndexedShard("a.tar", 0, 5, file="t", table_bytes=len(content), table_crc32=zlib.crc32(whole))
            (found,) = DatasetIndex("", (), (entry,)).place("a.tar")[0].unpack(bytes(content))
            assert isinstance(found, DatasetIndexError)
            assert "the table's checksum differs" in found.message


def entry_of(name: str, samples: int) -> tuple[IndexedShard, ShardTable]:
    table = scanned(samples, every_byte=True)
    return IndexedShard(name, table.shard_bytes, samples), table


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["b.tar", os.fsdecode(b"shard-\xff.tar")])
def test_an_index_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    folder = tmp_path / ".streamload"
    entries = [entry_of(name, 3), entry_of("a.tar", 2)]
    written = write_index(str(folder), entries)
    index = read_index(folder)
    assert (index.folder, index.fields, index.shards) == (written.folder, written.fields, written.shards)
    assert index.fields == ("cls",)
    assert [IndexedShard(*shard[:4]) for shard in index.shards] == [entries[1][0], entries[0][0]]
    assert_same_tables(table_in(index, name), entries[0][1])
    index_file, table_file = sorted(files_of(folder))
    assert (index_file, table_file[:7], table_file[-4:]) == ("index.json", "tables-", ".bin")
    document = json.loads((folder / "index.json").read_bytes())
    assert (document["format"], document["kind"]) == (2, "streamload-index")
    with pytest.raises(DatasetIndexError, match="does not have this shard"):
        index.shard("c.tar")


def test_the_same_entries_make_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    entries = [entry_of("b.tar", 3), entry_of("a.tar", 2), entry_of("c.tar", 1)]
    write_index(str(tmp_path / "one"), entries)
    write_index(str(tmp_path / "two"), entries[::-1])
    for entry in entries:
        write_index(str(tmp_path / "three"), [entry])
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "three")


def test_further_shards_are_added_and_known_ones_replaced(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_index(folder, [entry_of("train-0.tar", 2), entry_of("train-1.tar", 2)])
    other = scan_shard(memoryview(shard_bytes(1, b"jpg")), "")
    write_index(folder, [(IndexedShard("val-0.tar", other.shard_bytes, 1), other), entry_of("train-1.tar", 4)])
    index = read_index(folder)
    assert [(shard.name, shard.samples) for shard in index.shards] == [
        ("train-0.tar", 2),
        ("train-1.tar", 4),
        ("val-0.tar", 1),
    ]
    assert index.fields == ("cls", "jpg")
    assert [len(table_in(index, shard.name)) for shard in index.shards] == [2, 4, 1]


@pytest.mark.parametrize("name", ["", ".", "..", "../a.tar", "/a.tar", "x/a.tar", "x\\a.tar", "a\0.tar"])
def test_names_with_a_folder_are_refused_in_both_directions(name: str, tmp_path: Path) -> None:
    entry, table = entry_of("a.tar", 1)
    with pytest.raises(ValueError, match="plain name"):
        write_index(str(tmp_path), [(entry._replace(name=name), table)])
    assert files_of(tmp_path) == {}
    write_index(str(tmp_path), [(entry, table)])
    with pytest.raises(DatasetIndexError, match="damaged"):
        change_list(tmp_path, "shards", "name", 0, value=name)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["kind"], "wids", "not a streamload index"),
        (["format"], 3, "format 3"),
        (["format"], [], r"format \[\]"),
        (["fields"], "cls", "damaged"),
        (["fields", 0], 3, "damaged"),
        (["tables"], {}, "damaged"),
        (["tables", 0, "file"], "../../secret", "damaged"),
        (["tables", 0, "shards"], 3, "damaged"),
        (["tables", 0, "shards"], 1 << 63, "damaged"),
        (["shards"], [], "damaged"),
        (["shards", "name"], ["a.tar"], "damaged"),
        (["shards", "name", 0], "b.tar", "damaged"),
        (["shards", "name", 0], 4, "damaged"),
        (["shards", "bytes"], None, "damaged"),
        (["shards", "bytes"], [512], "damaged"),
        (["shards", "bytes", 0], -1, "damaged"),
        (["shards", "bytes", 0], 1.5, "damaged"),
        (["shards", "samples", 0], 1 << 49, "damaged"),
        (["shards", "samples", 0], True, "damaged"),
        (["shards", "table_bytes", 0], 1 << 49, "damaged"),
        (["shards", "table_crc32", 0], 1 << 32, "damaged"),
        (["shards", "etag"], [1, None], "damaged"),
    ],
)
def test_damaged_lists_are_refused(path: list[Any], value: Any, words: str, tmp_path: Path) -> None:
    write_index(str(tmp_path), [entry_of("a.tar", 1), entry_of("b.tar", 1)])
    with pytest.raises(DatasetIndexError, match=words) as caught:
        change_list(tmp_path, *path, value=value)
    assert caught.value.url == str(tmp_path / "index.json")
    assert "streamload index" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_list_is_refused_as_an_index(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DatasetIndexError, match="not a streamload index; make one"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_bytes(b'[{"kind": "streamload-index"}]')
    with pytest.raises(DatasetIndexError, match="rebuild the index"):
        read_index(tmp_path)
    with pytest.raises(DatasetIndexError, match="holds no index.json"):
        read_index(tmp_path / "absent")


def table_file(folder: Path) -> Path:
    (found,) = folder.glob("tables-*.bin")
    return found


def change_list(folder: Path, *path: str | int, value: Any) -> DatasetIndex:
    place = document = json.loads((folder / "index.json").read_bytes())
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (folder / "index.json").write_text(json.dumps(document))
    return read_index(folder)


def test_a_table_that_is_not_of_its_entry_is_refused(tmp_path: Path) -> None:
    write_index(str(tmp_path), [entry_of("a.tar", 1), entry_of("b.tar", 2)])
    index = change_list(tmp_path, "shards", "samples", value=[2, 1])
    with pytest.raises(DatasetIndexError, match=r"2 samples in .* 'a.tar', but its table has 1 in ") as caught:
        table_in(index, "a.tar")
    assert caught.value.url == str(table_file(tmp_path))


def test_a_damaged_table_file_says_which_and_spares_the_other_tables(tmp_path: Path) -> None:
    index = write_index(str(tmp_path), [entry_of("a.tar", 3), entry_of("b.tar", 3)])
    file = table_file(tmp_path)
    whole = file.read_bytes()
    start = index.shard("b.tar").start
    flipped = bytearray(whole)
    flipped[start + 70] ^= 1
    for damaged in (flipped, whole[:-1], whole[: start + 10], whole[:start]):
        file.write_bytes(damaged)
        assert len(table_in(index, "a.tar")) == 3
        with pytest.raises(DatasetIndexError, match=r"checksum .*streamload index") as caught:
            table_in(index, "b.tar")
        assert (caught.value.url, caught.value.offset) == (str(file), start)
    file.unlink()
    with pytest.raises(DatasetIndexError, match="no longer exists") as caught:
        table_in(index, "a.tar")
    assert caught.value.url == str(file)


def test_a_failure_leaves_the_old_index_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    write_index(folder, [entry_of("a.tar", 1)])
    before = files_of(tmp_path)

    replace = os.replace

    def full(source: str, target: str) -> None:
        if target.endswith("index.json"):  # when the new table file is there
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_index(folder, [entry_of("b.tar", 1)])
    monkeypatch.undo()
    assert files_of(tmp_path) == before


def test_index_files_are_readable_by_those_whom_the_umask_lets_in(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write_index(str(tmp_path), [entry_of("a.tar", 1)])
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_writers_at_once_lose_no_entry(tmp_path: Path) -> None:
    """Each reads the list, adds to it and writes it, and has to wait while another one is between."""
    names = [f"{number}.tar" for number in range(24)]
    begin = threading.Barrier(len(names))

    def write(name: str) -> None:
        begin.wait()
        write_index(str(tmp_path), [entry_of(name, 1)])

    with ThreadPoolExecutor(len(names)) as writers:
        list(writers.map(write, names))
    assert sorted(shard.name for shard in read_index(tmp_path).shards) == sorted(names)


def test_what_is_damaged_is_repaired_when_its_shard_is_indexed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(shard_bytes(3))
    index = index_shards([path])
    before = files_of(tmp_path / ".streamload")
    file = table_file(tmp_path / ".streamload")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DatasetIndexError):
        table_in(index, "a.tar")
    index_shards([path])
    assert files_of(tmp_path / ".streamload") == before, "the same bytes each time"
    (tmp_path / ".streamload" / "index.json").write_bytes(b"{")
    index_shards([path])
    assert files_of(tmp_path / ".streamload") == before
    assert "without the entries of the old one" in caplog.text


def test_a_reader_sees_the_index_before_or_after_and_nothing_between(tmp_path: Path) -> None:
    """Its entries are 1 or 2 samples each, and all the same."""
    write_index(str(tmp_path), [entry_of(f"{number}.tar", 1) for number in range(5)])
    ended = threading.Event()

    def rewrite() -> None:
        try:
            for turn in range(60):
                write_index(str(tmp_path), [entry_of(f"{number}.tar", 1 + turn % 2) for number in range(5)])
        finally:
            ended.set()

    seen, gone = set(), set()
    with ThreadPoolExecutor(1) as writer:
        done = writer.submit(rewrite)
        while not ended.is_set():
            index = read_index(tmp_path)
            assert len({shard.samples for shard in index.shards}) == 1
            for shard in index.shards:
                try:
                    seen.add(len(table_in(index, shard.name)) - shard.samples)
                except DatasetIndexError as exc:
                    gone.add(exc.message)
        done.result()
    assert seen == {0}
    assert all("no longer exists" in message for message in gone), "that of an index that was replaced in between"


def test_a_table_larger_than_its_file_is_damage_and_takes_no_memory(tmp_path: Path) -> None:
    write_index(str(tmp_path), [entry_of("a.tar", 1), entry_of("b.tar", 1)])
    index = change_list(tmp_path, "shards", "table_bytes", value=[1 << 47, 1 << 47])
    for name in ("a.tar", "b.tar"):
        with pytest.raises(DatasetIndexError):
            table_in(index, name)
