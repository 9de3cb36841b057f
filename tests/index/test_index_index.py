"""The index: written whole, merged, reproducible, and never trusted."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import random
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crafted_tar import Archive, header

from streamload.errors import DatasetIndexError, ShardFormatError, ShardNotFoundError, StorageError
from streamload.index.dataset_index import DatasetIndex, IndexedShard, check_shard, index_shards, write_index
from streamload.index.table_file import table_from_npz, table_to_npz
from streamload.tar.scan import scan_shard
from streamload.tar.table import ShardTable


def shard_bytes(samples: int, field: bytes = b"cls") -> bytes:
    archive = Archive().add(header(b"README", 0))
    for number in range(samples):
        archive.add(header(b"k\xff%03d." % number + field, 2), b"%02d" % number)
    return archive.whole()


def scanned(samples: int, **options: bool) -> ShardTable:
    return scan_shard(memoryview(shard_bytes(samples)), "memory", **options)


def same(left: ShardTable, right: ShardTable) -> bool:
    for column in dataclasses.fields(ShardTable):
        a, b = getattr(left, column.name), getattr(right, column.name)
        if isinstance(a, np.ndarray):
            if not isinstance(b, np.ndarray) or a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif a != b:
            return False
    return True


def npz_of(table: ShardTable) -> bytes:
    buffer = io.BytesIO()
    table_to_npz(table, buffer)
    return buffer.getvalue()


def refused(content: bytes) -> str:
    with pytest.raises(DatasetIndexError) as caught:
        table_from_npz(io.BytesIO(content), "some.npz")
    assert caught.value.url == "some.npz"
    assert "streamload index" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("options", [{}, {"crc32": True, "labels": True}])
@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_table_comes_back_as_it_was(samples: int, options: dict[str, bool], tmp_path: Path) -> None:
    table = scanned(samples, **options)
    assert same(table_from_npz(io.BytesIO(npz_of(table)), ""), table)
    path = str(tmp_path / "without-suffix")
    table_to_npz(table, path)
    assert os.listdir(tmp_path) == ["without-suffix"]
    assert same(table_from_npz(path, path), table)


def test_a_table_that_misses_its_end_and_odd_field_names_come_back() -> None:
    content = Archive().add(header(b"a.\xff\xc3\x84", 0)).whole(b"")
    table = scan_shard(memoryview(content), "", strict=False)
    back = table_from_npz(io.BytesIO(npz_of(table)), "")
    assert back.missing_end
    assert back.fields == ("\udcffä",)
    assert back.skipped == {"missing end-of-archive marker": 1}


def test_a_table_makes_the_same_bytes_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table = scanned(3, crc32=True)
    first = npz_of(table)
    monkeypatch.setattr("time.time", lambda: 1e9)
    monkeypatch.setattr("time.localtime", lambda *_: (2001, 9, 9, 1, 46, 40, 6, 252, 0))
    shuffled = dataclasses.replace(table, skipped=dict(reversed(table.skipped.items())))
    assert npz_of(shuffled) == first
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def change(**columns: Any) -> Callable[[ShardTable], ShardTable]:
    return lambda table: dataclasses.replace(table, **columns)


@pytest.mark.parametrize(
    "damage",
    [
        change(member_offset=np.array([512, 1536, 1 << 40], np.int64)),
        change(member_offset=np.array([-1, 1536, 2560], np.int64)),
        change(member_size=np.array([2, 2, -1], np.int64)),
        change(member_size=np.array([2, 2, (1 << 63) - 1], np.int64)),
        change(member_size=np.array([2, 2], np.int64)),
        change(member_size=np.array([2, 2, 2], np.int32)),
        change(member_size=np.array([[2, 2, 2]], np.int64)),
        change(member_size=np.array([2.0, 2.0, 2.0])),
        change(member_field=np.array([0, 0, 1], np.uint16)),
        change(member_field=np.array([0, 0], np.uint16)),
        change(sample_start=np.array([0, 1, 2], np.int64)),
        change(sample_start=np.array([1, 1, 2, 3], np.int64)),
        change(sample_start=np.array([0, 2, 1, 3], np.int64)),
        change(sample_start=np.array([0, 0, 1, 3], np.int64)),
        change(sample_start=np.array([0, 3], np.int64)),
        change(sample_start=np.array([], np.int64)),
        change(key_start=np.array([0, 5, 10, 99], np.int64)),
        change(key_start=np.array([0, 10, 5, 15], np.int64)),
        change(key_bytes=np.array([1], np.uint8)),
        change(member_crc32=np.array([1], np.uint32)),
        change(labels=np.array([1], np.int64)),
        change(shard_bytes=100),
        change(shard_bytes=-1),
        change(shard_bytes="many"),
        change(fields=()),
        change(fields=(1,)),
        change(skipped={"x": "y"}),
    ],
)
def test_inconsistent_tables_are_refused(damage: Callable[[ShardTable], ShardTable]) -> None:
    table = scanned(3, crc32=True, labels=True)
    assert table.key_start.tolist() == [0, 5, 10, 15]
    refused(npz_of(damage(table)))


def test_a_table_file_of_another_version_or_kind_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("streamload.index.table_file.TABLE_FORMAT", 2)
    content = npz_of(scanned(1))
    monkeypatch.undo()
    assert "format 2" in refused(content)
    for garbage in (b"", b"not a zip", content[:100], content[:-30], b"PK\x05\x06" + bytes(18)):
        refused(garbage)
    arrays = io.BytesIO()
    np.save(arrays, np.arange(3))
    refused(arrays.getvalue())
    pickled = io.BytesIO()
    np.savez(pickled, about=np.array([{"format": 1}], dtype=object))
    refused(pickled.getvalue())
    with pytest.raises(DatasetIndexError, match="no such file"):
        table_from_npz(str(tmp_path / "absent.npz"), "absent.npz")


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_nothing_in_a_table_file_is_executed(tmp_path: Path) -> None:
    content = io.BytesIO()
    np.savez(content, about=np.array([_Trap(tmp_path / "sprung")], dtype=object))
    refused(content.getvalue())
    assert not (tmp_path / "sprung").exists()


def test_random_damage_to_a_table_file_raises_nothing_else() -> None:
    chance = random.Random(4)
    table = scanned(5, crc32=True, labels=True)
    whole = npz_of(table)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        del content[len(content) - chance.choice((0, 0, 0, 1, 200)) :]
        try:
            back = table_from_npz(io.BytesIO(bytes(content)), "some.npz")
        except DatasetIndexError:
            continue
        assert np.array_equal(back.member_offset, table.member_offset)


def entry_of(name: str, samples: int) -> tuple[IndexedShard, ShardTable]:
    table = scanned(samples, crc32=True, labels=True)
    return IndexedShard(name, table.shard_bytes, samples, None), table


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_index_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / ".streamload"
    entries = [entry_of("b.tar", 3), entry_of("a.tar", 2)]
    written = write_index(str(folder), entries)
    index = DatasetIndex.load(str(folder))
    assert index == written
    assert index.folder == str(folder)
    assert index.fields == ("cls",)
    assert index.shards == (entries[1][0], entries[0][0])
    assert index.shard("b.tar") == entries[0][0]
    assert same(index.table("b.tar"), entries[0][1])
    assert sorted(files_of(folder)) == ["a.tar.npz", "b.tar.npz", "index.json"]
    document = json.loads((folder / "index.json").read_bytes())
    assert (document["format"], document["kind"]) == (1, "streamload-index")
    for call in (index.shard, index.table):
        with pytest.raises(DatasetIndexError, match="does not have this shard"):
            call("c.tar")


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
    write_index(folder, [(IndexedShard("val-0.tar", other.shard_bytes, 1, 5), other), entry_of("train-1.tar", 4)])
    index = DatasetIndex.load(folder)
    assert [(shard.name, shard.samples) for shard in index.shards] == [
        ("train-0.tar", 2),
        ("train-1.tar", 4),
        ("val-0.tar", 1),
    ]
    assert index.fields == ("cls", "jpg")
    assert [len(index.table(shard.name)) for shard in index.shards] == [2, 4, 1]


def test_a_broken_index_is_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_index(str(tmp_path), [entry_of("a.tar", 2)])
    (tmp_path / "index.json").write_bytes(b"{")
    write_index(str(tmp_path), [entry_of("b.tar", 2)])
    assert [shard.name for shard in DatasetIndex.load(str(tmp_path)).shards] == ["b.tar"]
    assert "without the entries of the old one" in caplog.text


@pytest.mark.parametrize("name", ["", ".", "..", "../a.tar", "/a.tar", "x/a.tar", "x\\a.tar", "a\0.tar"])
def test_names_with_a_folder_are_refused_in_both_directions(name: str, tmp_path: Path) -> None:
    entry, table = entry_of("a.tar", 1)
    with pytest.raises(ValueError, match="plain name"):
        write_index(str(tmp_path), [(entry._replace(name=name), table)])
    assert files_of(tmp_path) == {}
    write_index(str(tmp_path), [(entry, table)])
    document = json.loads((tmp_path / "index.json").read_bytes())
    document["shards"][0]["name"] = name
    (tmp_path / "index.json").write_text(json.dumps(document))
    with pytest.raises(DatasetIndexError, match="damaged"):
        DatasetIndex.load(str(tmp_path))


def test_entries_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    entry, table = entry_of("a.tar", 1)
    for wrong in (entry._replace(samples=2), entry._replace(bytes=1)):
        with pytest.raises(ValueError, match="does not belong"):
            write_index(str(tmp_path), [(wrong, table)])
    with pytest.raises(ValueError, match="different names"):
        write_index(str(tmp_path), [(entry, table), (entry, table)])
    assert files_of(tmp_path) == {}


def _set(*path: str | int, value: Any) -> Callable[[Any], None]:
    def change_document(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change_document


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_set("kind", value="wids"), "not a streamload index"),
        (_set("format", value=2), "format 2"),
        (_set("format", value=None), "format None"),
        (_set("fields", value="cls"), "damaged"),
        (_set("fields", 0, value=3), "damaged"),
        (_set("shards", value={}), "damaged"),
        (_set("shards", 0, value=[]), "damaged"),
        (_set("shards", 0, "name", value="b.tar"), "damaged"),
        (_set("shards", 0, "name", value=4), "damaged"),
        (_set("shards", 0, "bytes", value=-1), "damaged"),
        (_set("shards", 0, "bytes", value=1.5), "damaged"),
        (_set("shards", 0, "bytes", value=1 << 63), "damaged"),
        (_set("shards", 0, "samples", value=1 << 63), "damaged"),
        (_set("shards", 0, "samples", value=1 << 49), "damaged"),
        (_set("shards", 0, "mtime_ns", value=1 << 63), "damaged"),
        (_set("shards", 0, "samples", value=None), "damaged"),
        (_set("shards", 0, "samples", value=True), "damaged"),
        (_set("shards", 0, "mtime_ns", value="now"), "damaged"),
    ],
)
def test_damaged_lists_are_refused(damage: Callable[[Any], None], words: str, tmp_path: Path) -> None:
    write_index(str(tmp_path), [entry_of("a.tar", 1), entry_of("b.tar", 1)])
    document = json.loads((tmp_path / "index.json").read_bytes())
    damage(document)
    (tmp_path / "index.json").write_text(json.dumps(document))
    with pytest.raises(DatasetIndexError, match=words) as caught:
        DatasetIndex.load(str(tmp_path))
    assert caught.value.url == str(tmp_path / "index.json")
    assert "streamload index" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_list_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DatasetIndexError, match="streamload index"):
        DatasetIndex.load(str(tmp_path))
    with pytest.raises(DatasetIndexError, match="cannot be read"):
        DatasetIndex.load(str(tmp_path / "absent"))


def test_a_lack_of_descriptors_or_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = write_index(str(tmp_path), [entry_of("a.tar", 1)])

    def fail(*_: object, **__: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(zipfile, "ZipFile", fail)
        with pytest.raises(MemoryError, match="no memory is left to read the index file"):
            index.table("a.tar")

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    for act in (lambda: index.table("a.tar"), lambda: DatasetIndex.load(str(tmp_path))):
        with pytest.raises(DatasetIndexError, match=r"Too many open files; .*ulimit -n") as caught:
            act()
        assert "streamload index" not in caught.value.message


def test_pipes_in_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    index = write_index(str(tmp_path), [entry_of("a.tar", 1)])
    for name in ("a.tar.npz", "index.json", "b.tar"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    for act in (
        lambda: index.table("a.tar"),
        lambda: DatasetIndex.load(str(tmp_path)),
        lambda: index_shards([str(tmp_path / "b.tar")]),
    ):
        with pytest.raises((DatasetIndexError, StorageError), match="not a regular file"):
            act()


def test_a_table_that_is_not_of_its_entry_is_refused(tmp_path: Path) -> None:
    write_index(str(tmp_path), [entry_of("a.tar", 1), entry_of("b.tar", 2)])
    os.replace(tmp_path / "b.tar.npz", tmp_path / "a.tar.npz")
    index = DatasetIndex.load(str(tmp_path))
    with pytest.raises(DatasetIndexError, match=r"1 sample in .* 2 in "):
        index.table("a.tar")
    with pytest.raises(DatasetIndexError, match="no such file"):
        index.table("b.tar")


def test_a_shard_of_another_size_does_not_belong_to_its_entry() -> None:
    entry = IndexedShard("a.tar", 10240, 3, None)
    check_shard(entry, 10240, "s/a.tar")
    with pytest.raises(DatasetIndexError, match=r"indexed: it was rewritten; rebuild .*streamload index") as caught:
        check_shard(entry, 10752, "s/a.tar")
    assert caught.value.url == "s/a.tar"
    with pytest.raises(DatasetIndexError, match=r"it was cut, so fetch .* or it was rewritten, .*streamload index"):
        check_shard(entry, 9728, "s/a.tar")


def test_a_failure_leaves_the_old_index_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    write_index(folder, [entry_of("a.tar", 1)])
    before = files_of(tmp_path)

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_index(folder, [entry_of("b.tar", 1)])
    monkeypatch.undo()
    assert files_of(tmp_path) == before


def test_the_list_is_replaced_last_and_everything_is_on_the_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    replace, fsync = os.replace, os.fsync

    def noting_replace(source: str, target: str) -> None:
        done.append(os.path.basename(target))
        replace(source, target)

    def noting_fsync(descriptor: int) -> None:
        done.append("fsync")
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", noting_replace)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    write_index(str(tmp_path), [entry_of("a.tar", 1), entry_of("b.tar", 1)])
    assert done == ["fsync", "a.tar.npz", "fsync", "b.tar.npz", "fsync", "index.json", "fsync"]


def test_index_files_are_readable_by_those_whom_the_umask_lets_in(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write_index(str(tmp_path), [entry_of("a.tar", 1)])
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_shards_are_scanned_into_an_index_beside_them(tmp_path: Path) -> None:
    for name, samples in (("b.tar", 3), ("a.tar", 2)):
        (tmp_path / name).write_bytes(shard_bytes(samples))
    told: list[tuple[str, int]] = []
    paths = [str(tmp_path / "b.tar"), str(tmp_path / "a.tar")]
    index = index_shards(paths, on_shard=lambda path, samples: told.append((path, samples)))
    assert told == [(paths[0], 3), (paths[1], 2)]
    assert index == DatasetIndex.load(str(tmp_path / ".streamload"))
    for path in paths:
        entry, table = index.shard(os.path.basename(path)), index.table(os.path.basename(path))
        assert entry.mtime_ns == os.stat(path).st_mtime_ns
        assert entry.bytes == os.path.getsize(path)
        assert same(table, scanned(entry.samples, crc32=True, labels=True))
        assert table.labels is not None
        assert table.member_crc32 is not None
    elsewhere = index_shards(paths, str(tmp_path / "elsewhere"))
    assert elsewhere.shards == index.shards
    assert sorted(files_of(tmp_path / "elsewhere")) == ["a.tar.npz", "b.tar.npz", "index.json"]


def test_shards_that_cannot_be_indexed(tmp_path: Path) -> None:
    good = tmp_path / "good.tar"
    good.write_bytes(shard_bytes(2))
    (tmp_path / "cut.tar").write_bytes(shard_bytes(2)[:1000])
    (tmp_path / "empty.tar").write_bytes(b"")
    (tmp_path / "other").mkdir()
    for name in ("cut.tar", "empty.tar"):
        with pytest.raises(ShardFormatError) as caught:
            index_shards([str(good), str(tmp_path / name)])
        assert caught.value.url == str(tmp_path / name)
    assert not (tmp_path / ".streamload" / "index.json").exists()
    with pytest.raises(ShardNotFoundError):
        index_shards([str(tmp_path / "absent.tar")])
    with pytest.raises(StorageError):
        index_shards([str(tmp_path / "other")])
    for paths in ([], [str(good), str(good)], [str(good), str(tmp_path / "other" / "good.tar")]):
        with pytest.raises(ValueError, match="different names"):
            index_shards(paths)
    with pytest.raises(ValueError, match="2 folders"):
        index_shards([str(good), str(tmp_path / "other" / "more.tar")])


def test_nothing_stays_open(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc/self/fd to count descriptors in")
    (tmp_path / "a.tar").write_bytes(shard_bytes(2))
    (tmp_path / "cut.tar").write_bytes(shard_bytes(2)[:1000])
    before = os.listdir("/proc/self/fd")
    index_shards([str(tmp_path / "a.tar")]).table("a.tar")
    with pytest.raises(ShardFormatError):
        index_shards([str(tmp_path / "cut.tar")])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_writers_at_once_lose_no_entry(tmp_path: Path) -> None:
    """Each reads the list, adds to it and writes it, and has to wait while another one is between."""
    names = [f"{number}.tar" for number in range(24)]
    begin = threading.Barrier(len(names))

    def write(name: str) -> None:
        begin.wait()
        write_index(str(tmp_path), [entry_of(name, 1)])

    with ThreadPoolExecutor(len(names)) as writers:
        list(writers.map(write, names))
    assert sorted(shard.name for shard in DatasetIndex.load(tmp_path).shards) == sorted(names)


def test_a_valid_table_of_other_contents_is_refused(tmp_path: Path) -> None:
    """Of the same shard's size and number of samples, as an older file of the index would be."""
    path = tmp_path / "a.tar"
    path.write_bytes(shard_bytes(3, b"cls"))
    index = index_shards([str(path)])
    table, file = index.table("a.tar"), tmp_path / ".streamload" / "a.tar.npz"
    before = (tmp_path / ".streamload" / "index.json").read_bytes()
    table_to_npz(dataclasses.replace(table, member_offset=table.member_offset[::-1].copy()), str(file))
    with pytest.raises(DatasetIndexError, match="its checksum is not the one.*streamload index") as caught:
        DatasetIndex.load(tmp_path / ".streamload").table("a.tar")
    assert caught.value.url == str(file)
    index_shards([str(path)])
    assert (tmp_path / ".streamload" / "index.json").read_bytes() == before, "the same bytes each time"
    old = json.loads(before)
    del old["shards"][0]["table_crc32"]  # as releases wrote it that had no checksums
    (tmp_path / ".streamload" / "index.json").write_text(json.dumps(old))
    assert same(DatasetIndex.load(tmp_path / ".streamload").table("a.tar"), table)


def test_a_table_file_takes_no_more_memory_than_it_is_long() -> None:
    plain = io.BytesIO(npz_of(scanned(5, crc32=True, labels=True)))
    with np.load(plain) as archive:
        arrays = dict(archive)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in {**arrays, "labels": np.zeros(1 << 22, np.int64)}.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, array)
    besides = io.BytesIO()
    with zipfile.ZipFile(besides, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.save(member, array)
        archive.writestr("more.npy", bytes(1 << 25), zipfile.ZIP_DEFLATED)
    claim = io.BytesIO()
    with zipfile.ZipFile(claim, "w") as archive:
        with archive.open("about.npy", "w") as member:
            np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (1 << 25,)})
    tracemalloc.start()
    try:
        assert "compressed" in refused(bomb.getvalue())
        assert "and has" in refused(claim.getvalue())
        assert len(table_from_npz(io.BytesIO(besides.getvalue()), "")) == 5, "what it does not know is skipped"
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()
