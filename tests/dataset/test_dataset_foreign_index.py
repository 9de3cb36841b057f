"""Indexes of wids, DALI and Energon: read for what they hold, and held against the shard."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from foreign_writers import dali_index, energon_info, energon_offsets, wids_file
from written_shards import SAMPLES, scanned, write

from streamload.dataset.foreign_index import (
    ForeignIndex,
    ForeignKind,
    check_samples,
    find_foreign,
    foreign_counts,
    foreign_table,
)
from streamload.dataset.table import ShardTable
from streamload.errors import DatasetIndexError, ShardFormatError, StorageError

FILES = [("a/0.jpg", 700), ("a/0.cls", 1), ("a/1.jpg", 0), ("a/1.seg.PNG", 512), ("b.c/2.jpg", 513), ("b.c/2.cls", 3)]


def write_tar(path: Path, files: list[tuple[str, int]] = FILES, tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """A shard as Python's tarfile writes it, filled up to 10,240 bytes; a name that ends in a slash is a folder."""
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, size in files:
            member = tarfile.TarInfo(name)
            member.size = size
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            archive.addfile(member, io.BytesIO(b"x" * size))
    return path


class Folder:
    """The files of a folder; knows what was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.was_read: list[str] = []

    @property
    def names(self) -> list[str]:
        return [str(file.relative_to(self.path)) for file in sorted(self.path.rglob("*")) if file.is_file()]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: (self.path / name).stat().st_size for name in self.names}

    def add(self, name: str, content: bytes) -> None:
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_bytes(content)

    def read(self, name: str) -> bytes:
        self.was_read.append(name)
        return (self.path / name).read_bytes()

    def counts(self, *, each_shard: bool = True) -> dict[str, int]:
        return foreign_counts(self.read, self.names, self.sizes, each_shard=each_shard)

    def table(self, shard: str) -> ShardTable | None:
        return foreign_table(self.read, self.names, shard, self.sizes[shard])


@pytest.fixture
def folder(shard_folder: Path) -> Folder:
    write_tar(shard_folder / "train-000.tar")
    write_tar(shard_folder / "train-001.tar", FILES[:2])
    return Folder(shard_folder)


# -- finding -------------------------------------------------------------------------------------------------------


def test_indexes_are_found_by_their_names_alone() -> None:
    names = ["a.b.tar", "a.idx", "c.tar", "c.idx", "c.tar.idx", "d.e.tar", "d.e.idx", "x.idx", "info.json", ".nv-meta"]
    assert find_foreign(names) == [
        ForeignIndex(ForeignKind.ENERGON_DATASET, ".nv-meta/.info.json", None),
        ForeignIndex(ForeignKind.WIDS, "info.json", None),
        ForeignIndex(ForeignKind.DALI, "a.idx", "a.b.tar"),
        ForeignIndex(ForeignKind.ENERGON_SHARD, "c.tar.idx", "c.tar"),
        ForeignIndex(ForeignKind.DALI, "c.idx", "c.tar"),
        ForeignIndex(ForeignKind.DALI, "d.e.idx", "d.e.tar"),
    ]


def test_paths_below_the_folder_are_names_too() -> None:
    names = ["shards/0.tar", "shards/0.idx", "shards/0.tar.idx", ".nv-meta/.info.json", ".nv-meta/split.json"]
    assert [index.name for index in find_foreign(names)] == [".nv-meta/.info.json", "shards/0.tar.idx", "shards/0.idx"]


def test_json_files_beside_every_shard_are_not_taken_for_wids() -> None:
    names = [f"{number:05}{end}" for number in range(5) for end in (".tar", "_stats.json")]
    assert find_foreign(names) == []
    assert [index.name for index in find_foreign([*names, "shardindex.json"])] == ["shardindex.json"]


def test_a_folder_without_any_has_none(folder: Folder) -> None:
    assert find_foreign(folder.names) == []
    assert folder.counts() == {}
    assert folder.table("train-000.tar") is None
    assert folder.was_read == []


# -- counts --------------------------------------------------------------------------------------------------------

COUNTS = {"train-000.tar": 3, "train-001.tar": 1}


@pytest.mark.parametrize("name", ["shardindex.json", "train.json"])
def test_counts_by_wids(folder: Folder, name: str) -> None:
    folder.add(name, wids_file([folder.path / shard for shard in COUNTS]))
    assert folder.counts() == COUNTS
    assert folder.counts(each_shard=False) == COUNTS


def test_what_widsindex_wrote_is_read() -> None:
    # By `widsindex create train-000.tar train-001.tar` of webdataset 0.2.111.
    content = b"""{
  "__kind__": "wids-shard-index-v1",
  "wids_version": 1,
  "shardlist": [
    {
      "url": "train-000.tar",
      "md5sum": "41e6c7fdb7cf2de91be6eddc68ab6a70",
      "nsamples": 3,
      "filesize": 10240
    },
    {
      "url": "train-001.tar",
      "md5sum": "a321f8927357d9cf2b2ce7e841aa81fe",
      "nsamples": 4,
      "filesize": 10240
    }
  ],
  "name": "train"
}"""
    names = ["train-000.tar", "train-001.tar", "shardindex.json"]
    sizes = dict.fromkeys(names, 10240)
    assert foreign_counts(lambda name: content, names, sizes) == {"train-000.tar": 3, "train-001.tar": 4}


def test_wids_urls_parts_and_shards_that_are_elsewhere(folder: Folder) -> None:
    document = {
        "wids_version": 1,
        "datasets": [
            {"source_url": "https://example.org/other.json"},
            {"shardlist": [{"url": "https://example.org/x/train-000.tar?sig=a/b", "nsamples": 3}]},
        ],
        "shardlist": [
            {"url": "elsewhere.tar", "nsamples": 9},
            {"url": "one/train-001.tar", "nsamples": 1},
            {"url": "two/train-001.tar", "nsamples": 7},
        ],
    }
    folder.add("shardindex.json", json.dumps(document).encode())
    assert folder.counts() == {"train-000.tar": 3}  # which of the two train-001.tar this is cannot be known


def test_counts_by_energon(folder: Folder) -> None:
    folder.add(".nv-meta/.info.json", energon_info(COUNTS | {"gone.tar": 5}))
    for shard in COUNTS:
        folder.add(f"{shard}.idx", energon_offsets(folder.path / shard))
    assert folder.counts() == COUNTS
    assert folder.was_read == [".nv-meta/.info.json"]
    (folder.path / ".nv-meta" / ".info.json").unlink()
    assert folder.counts() == COUNTS
    assert folder.counts(each_shard=False) == {}


@pytest.mark.parametrize("version", ["v1.0", "v1.1", "v1.2"])
def test_counts_by_dali(folder: Folder, version: str) -> None:
    for shard in COUNTS:
        folder.add(shard.replace(".tar", ".idx"), dali_index(folder.path / shard, version))
    assert folder.counts() == COUNTS


def test_dali_with_names_counts_by_our_rules(folder: Folder) -> None:
    files = [("README", 5), ("__meta__/x.json", 7), *FILES]
    shard = write_tar(folder.path / "odd.tar", files)
    folder.add("odd.idx", dali_index(shard))
    assert folder.counts() == {"odd.tar": 3}
    folder.add("odd.idx", dali_index(shard, "v1.1"))
    claimed = folder.counts()["odd.tar"]
    assert claimed == 5  # it takes both for samples, and does not name them
    with pytest.raises(DatasetIndexError, match="holds 3 samples, and another tool's index beside it says 5"):
        check_samples(claimed, scanned(str(shard)), "odd.tar")
    check_samples(3, scanned(str(shard)), "odd.tar")


def test_two_that_contradict_each_other_are_refused(folder: Folder) -> None:
    folder.add(".nv-meta/.info.json", energon_info(COUNTS))
    folder.add("train.json", b'{"wids_version": 1, "shardlist": [{"url": "train-001.tar", "nsamples": 2}]}')
    with pytest.raises(DatasetIndexError, match=r"1 sample by \.nv-meta/\.info\.json and 2 by train\.json") as caught:
        folder.counts()
    assert caught.value.url == "train-001.tar"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("shardindex.json", lambda path: wids_file([path])),
        ("train-000.idx", lambda path: dali_index(path)),
        ("train-000.tar.idx", lambda path: energon_offsets(path)),
    ],
)
def test_an_index_of_a_shard_that_was_cut_since_is_refused(
    folder: Folder, name: str, content: Callable[[Path], bytes]
) -> None:
    shard = folder.path / "train-000.tar"
    folder.add(name, content(shard))
    assert folder.counts()["train-000.tar"] == 3
    os.truncate(shard, 2048)
    with pytest.raises(DatasetIndexError, match="re-packed or cut") as caught:
        folder.counts()
    assert caught.value.url == "train-000.tar"
    assert name in caught.value.message


DAMAGED = [
    ("shardindex.json", b'{"wids_version": 2, "shardlist": []}', "version 2"),
    ("shardindex.json", b'{"wids_version": 1, "shardlist": {}}', "damaged"),
    ("shardindex.json", b'{"wids_version": 1, "shardlist": [{"url": "a.tar"}]}', "damaged"),
    ("shardindex.json", b'{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": -1}]}', "damaged"),
    ("shardindex.json", b'{"wids_version": 1, "shardlist": [{"url": "a.tar", "nsamples": true}]}', "damaged"),
    ("shardindex.json", b'{"wids_version": 1, "shardlist": [{"url": "http://[/a.tar", "nsamples": 1}]}', "damaged"),
    ("shardindex.json", b'{"wids_version": 1, "datasets": [3]}', "damaged"),
    ("shardindex.json", b'{"wids_version": 1, "shardlist": [{"url": "a", "nsamples": 1, "filesize": "1"}]}', "damaged"),
    (".nv-meta/.info.json", b"{", "damaged"),
    (".nv-meta/.info.json", b'{"shard_counts": {"train-000.tar": "3"}}', "damaged"),
    ("train-000.tar.idx", b"", "damaged"),
    ("train-000.tar.idx", struct.pack("<2Q", 0, 2048) + b"\0", "damaged"),
    ("train-000.tar.idx", struct.pack("<3Q", 0, 2048, 1024), "damaged"),
    ("train-000.tar.idx", struct.pack("<2Q", 0, 1000), "damaged"),
    ("train-000.tar.idx", struct.pack("<2Q", 0, (1 << 64) - 512), "damaged"),
    ("train-000.tar.idx", struct.pack("<Q", (1 << 64) - 512), "damaged"),
    ("train-000.idx", b"v2.0 1\njpg 512 1 a.jpg\n", r"version v2\.0"),
    ("train-000.idx", b"v1.2 2\njpg 512 1 a.jpg\n", "2 samples and has lines for 1"),
    ("train-000.idx", b"v1.2 1\njpg 512 1 a.jpg", "damaged"),
    ("train-000.idx", b"v1.2 1", "damaged"),
    ("train-000.idx", b"v1.2 1\njpg 513 1 a.jpg\n", "damaged"),
    ("train-000.idx", b"v1.2 1\njpg 0 1 a.jpg\n", "damaged"),
    ("train-000.idx", b"v1.2 1\njpg 512 1 a.png\n", "damaged"),
    ("train-000.idx", b"v1.2 2\njpg 512 600 a.jpg\njpg 1536 1 b.jpg\n", "damaged"),
    ("train-000.idx", b"v1.1 2\njpg 2048 1\njpg 512 1\n", "damaged"),
]


@pytest.mark.parametrize(("name", "content", "complaint"), DAMAGED)
def test_a_damaged_index_is_an_error_that_names_it(folder: Folder, name: str, content: bytes, complaint: str) -> None:
    folder.add(name, content)
    with pytest.raises(DatasetIndexError, match=complaint) as caught:
        folder.counts()
    assert caught.value.url == name


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_a_cut_dali_index_is_never_taken_for_a_whole_one(folder: Folder, cut: int) -> None:
    whole = dali_index(folder.path / "train-000.tar")
    if not 5 < cut < len(whole):
        return
    folder.add("train-000.idx", whole[:cut])
    with pytest.raises(DatasetIndexError):
        folder.table("train-000.tar")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("shardindex.json", b"not json"),
        ("labels.json", b'{"cat": 0}'),
        ("labels.json", b"[" * 100_000),
        ("train-000.idx", b"\x00\x01binary of some other tool"),
        ("train-000.idx", b""),
    ],
)
def test_files_of_something_else_are_passed_over(folder: Folder, name: str, content: bytes) -> None:
    folder.add(name, content)
    assert folder.counts() == {}
    assert folder.table("train-000.tar") is None


def test_what_reading_raises_is_passed_on(folder: Folder) -> None:
    def read(name: str) -> bytes:
        raise StorageError("denied", url=name)

    with pytest.raises(StorageError, match="denied"):
        foreign_counts(read, ["a.tar", "a.idx"])


# -- tables --------------------------------------------------------------------------------------------------------


def same(table: ShardTable | None, shard: Path) -> bool:
    """Whether a table says what a scan of the shard says, but for checksums, labels and what a listing leaves out."""
    scan = scanned(str(shard))
    arrays = ("member_offset", "member_size", "member_field", "sample_start", "key_bytes", "key_start")
    return (
        table is not None
        and (table.shard_bytes, table.fields, table.keys()) == (scan.shard_bytes, scan.fields, scan.keys())
        and all(np.array_equal(getattr(table, name), getattr(scan, name)) for name in arrays)
        and all(getattr(table, name).dtype == getattr(scan, name).dtype for name in arrays)
    )


@pytest.mark.parametrize("version", ["v1.0", "v1.2"])
def test_the_table_by_dali_is_that_of_a_scan(folder: Folder, version: str) -> None:
    shard = folder.path / "train-000.tar"
    folder.add("train-000.idx", dali_index(shard, version))
    assert same(folder.table("train-000.tar"), shard)


def test_the_table_of_our_own_shards_by_dali(shard_folder: Path) -> None:
    plain = [sample for sample in SAMPLES if len(str(sample["__key__"])) < 90 and str(sample["__key__"]).isascii()]
    write(shard_folder / "a-%03d.tar", plain)
    (shard,) = shard_folder.glob("*.tar")
    folder = Folder(shard_folder)
    folder.add(shard.name.replace(".tar", ".idx"), dali_index(shard))
    assert len(plain) == 2
    assert same(folder.table(shard.name), shard)


def test_skipped_members_are_skipped_in_the_table_as_in_a_scan(folder: Folder) -> None:
    shard = write_tar(folder.path / "odd.tar", [("README", 5), ("__meta__/x.json", 7), *FILES])
    folder.add("odd.idx", dali_index(shard))
    table = folder.table("odd.tar")
    assert same(table, shard)
    assert table is not None
    assert table.skipped == scanned(str(shard)).skipped == {"no extension": 1, "meta": 1}


UNPROVEN = {
    "a folder before the files": ([("a/", 0), *FILES], tarfile.USTAR_FORMAT, "v1.2"),
    "a long name": ([("n" * 150 + "/0.jpg", 3), *FILES], tarfile.GNU_FORMAT, "v1.2"),
    "a hidden file that the tool leaves out": ([*FILES[:2], (".hidden", 3), *FILES[2:]], tarfile.USTAR_FORMAT, "v1.2"),
    "a name that tar escapes": ([("a\\b.jpg", 3)], tarfile.USTAR_FORMAT, "v1.2"),
    "a blank in a name": ([("a b.jpg", 3)], tarfile.USTAR_FORMAT, "v1.2"),
    "no names": (FILES, tarfile.USTAR_FORMAT, "v1.1"),
}


@pytest.mark.parametrize("case", UNPROVEN)
def test_there_is_no_table_where_bytes_are_unexplained(folder: Folder, case: str) -> None:
    files, tar_format, version = UNPROVEN[case]
    shard = write_tar(folder.path / "odd.tar", files, tar_format)
    folder.add("odd.idx", dali_index(shard, version))
    assert folder.table("odd.tar") is None
    assert folder.counts()["odd.tar"] == len(scanned(str(shard)))


def test_there_is_no_table_for_a_shard_that_has_grown_or_has_no_end(folder: Folder) -> None:
    shard = folder.path / "train-000.tar"
    folder.add("train-000.idx", dali_index(shard))
    content = shard.read_bytes()
    end = int(scanned(str(shard)).member_offset[-1]) + 512
    for size, proven in [
        (end, False),
        (end + 512, False),
        (end + 1024, True),
        (end + 1536, False),
        (10_240, True),
        (20_480, False),
    ]:
        shard.write_bytes(content[:size] + bytes(size - len(content[:size])))
        assert (folder.table("train-000.tar") is not None) == proven, size


def test_offsets_that_older_tools_gave_wrong_make_no_table(folder: Folder) -> None:
    # They took the next header's place less the size, which is 1,024 bytes off where a pax header comes before that.
    shard = write_tar(folder.path / "odd.tar", [("0.jpg", 10), ("é/1.jpg", 10)], tarfile.PAX_FORMAT)
    starts = scanned(str(shard)).member_offset.tolist()
    assert starts == [512, 2560]
    folder.add("odd.idx", b"v1.2 2\njpg 1536 10 0.jpg\njpg 2560 10 1.jpg\n")
    assert folder.table("odd.tar") is None


def test_a_dali_index_of_a_longer_shard_is_refused(folder: Folder) -> None:
    folder.add("train-001.idx", dali_index(folder.path / "train-000.tar"))
    os.truncate(folder.path / "train-001.tar", 2048)
    with pytest.raises(DatasetIndexError, match="re-packed or cut"):
        folder.table("train-001.tar")


def test_samples_out_of_order_are_the_shards_fault(folder: Folder) -> None:
    shard = write_tar(folder.path / "odd.tar", [("0.jpg", 1), ("1.jpg", 1), ("0.cls", 1)])
    folder.add("odd.idx", dali_index(shard))
    with pytest.raises(ShardFormatError, match="do not stand together"):
        folder.table("odd.tar")
