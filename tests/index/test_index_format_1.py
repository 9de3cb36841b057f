"""Indexes of format 1, which earlier releases wrote: one npz a shard. `format_1/` is of such a release."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamload import StreamLoader
from streamload.errors import DatasetIndexError
from streamload.index.dataset_index import DatasetIndex
from streamload.index.index_writer import write_index
from streamload.index.indexed_shards import IndexedShard
from streamload.index.listing import list_shards

WRITTEN = Path(__file__).parent / "format_1"
NAMES = ("shard-000000.tar", "shard-000001.tar")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return shutil.copytree(WRITTEN, tmp_path / "old")


def labels_of(dataset: Path) -> list[int]:
    with StreamLoader(dataset, 1, fields=("cls",), num_workers=0, verify=True) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


def refused(dataset: Path, content: bytes) -> str:
    """What is said of an index without checksums whose first table file holds this."""
    (dataset / ".streamload" / f"{NAMES[0]}.npz").write_bytes(content)
    with pytest.raises(DatasetIndexError) as caught:
        without_checksums(dataset).table(NAMES[0])
    assert caught.value.url == str(dataset / ".streamload" / f"{NAMES[0]}.npz")
    assert "streamload index" in caught.value.message
    return caught.value.message


def without_checksums(dataset: Path) -> DatasetIndex:
    """As releases before these wrote it."""
    document = json.loads((dataset / ".streamload" / "index.json").read_bytes())
    for shard in document["shards"]:
        shard.pop("table_crc32", None)
    (dataset / ".streamload" / "index.json").write_text(json.dumps(document))
    return DatasetIndex.load(dataset / ".streamload")


def test_it_is_read(dataset: Path) -> None:
    listing = list_shards(dataset)
    assert (listing.counts, listing.fields) == ((2, 1), ("cls", "txt"))
    assert labels_of(dataset) == [0, 1, 2]
    without_checksums(dataset)
    assert labels_of(dataset) == [0, 1, 2]


def test_what_is_added_makes_an_index_of_today_of_it(dataset: Path) -> None:
    before = DatasetIndex.load(dataset / ".streamload")
    table = before.table(NAMES[1])
    shutil.copy(dataset / NAMES[1], dataset / "more.tar")
    index = write_index(str(dataset / ".streamload"), [(IndexedShard.of("more.tar", table), table)])
    assert [(shard.name, len(index.table(shard.name))) for shard in index.shards] == [
        ("more.tar", 1),
        (NAMES[0], 2),
        (NAMES[1], 1),
    ]
    assert json.loads((dataset / ".streamload" / "index.json").read_bytes())["format"] == 2
    assert not list((dataset / ".streamload").glob("*.npz"))
    assert sorted(labels_of(dataset)) == [0, 1, 2, 2]


def test_a_table_with_another_checksum_or_none_at_all_is_refused(dataset: Path) -> None:
    files = [dataset / ".streamload" / f"{name}.npz" for name in NAMES]
    contents = [file.read_bytes() for file in files]
    files[0].write_bytes(contents[1])
    files[1].unlink()
    index = DatasetIndex.load(dataset / ".streamload")
    with pytest.raises(DatasetIndexError, match="checksum is not the one"):
        index.table(NAMES[0])
    with pytest.raises(DatasetIndexError, match="no such file"):
        index.table(NAMES[1])
    assert "2 samples in" in refused(dataset, contents[1])


def _entry(name: str, value: Any) -> Callable[[Any], None]:
    return lambda document: document["shards"][0].update({name: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.update(shards={}),
        lambda document: document["shards"].append([]),
        _entry("name", "../a.tar"),
        _entry("name", NAMES[1]),
        _entry("bytes", -1),
        _entry("samples", 1 << 63),
        _entry("samples", True),
        _entry("mtime_ns", "now"),
        _entry("table_crc32", 1 << 32),
        _entry("etag", 4),
    ],
)
def test_damaged_lists_are_refused(dataset: Path, damage: Callable[[Any], None]) -> None:
    path = dataset / ".streamload" / "index.json"
    document = json.loads(path.read_bytes())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DatasetIndexError, match="damaged"):
        DatasetIndex.load(dataset / ".streamload")


def test_random_damage_raises_nothing_else(dataset: Path) -> None:
    chance = random.Random(4)
    file = dataset / ".streamload" / f"{NAMES[0]}.npz"
    whole = file.read_bytes()
    index = without_checksums(dataset)
    table = index.table(NAMES[0])
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            content[chance.randrange(len(content))] = chance.randrange(256)
        del content[len(content) - chance.choice((0, 0, 0, 1, 200)) :]
        file.write_bytes(content)
        try:
            back = index.table(NAMES[0])
        except DatasetIndexError:
            continue
        assert np.array_equal(back.member_offset, table.member_offset)


@pytest.mark.parametrize(
    "change",
    [
        {"member_offset": np.array([512, 1536, 2560, 1 << 40], np.int64)},
        {"member_size": np.array([1, 1, 1, 1], np.int32)},
        {"member_size": np.array([[1, 1, 1, 1]], np.int64)},
        {"member_field": np.array([0, 1, 0, 9], np.uint16)},
        {"sample_start": np.array([], np.int64)},
        {"sample_start": np.array([0, 4, 2], np.int64)},
        {"key_start": np.array([0, (1 << 63) - 1, 2], np.int64)},
        {"about": np.frombuffer(b'{"format": 9}', np.uint8)},
        {"about": np.frombuffer(b'{"format": 1, "shard_bytes": true, "fields": [], "skipped": {}}', np.uint8)},
    ],
)
def test_inconsistent_tables_are_refused(dataset: Path, change: dict[str, Any]) -> None:
    with np.load(dataset / ".streamload" / f"{NAMES[0]}.npz") as archive:
        arrays = dict(archive) | change
    content = BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    refused(dataset, content.getvalue())


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_nothing_in_it_is_executed(dataset: Path, tmp_path: Path) -> None:
    content = BytesIO()
    np.savez(content, about=np.array([_Trap(tmp_path / "sprung")], dtype=object))
    refused(dataset, content.getvalue())
    assert not (tmp_path / "sprung").exists()


def test_a_file_takes_no_more_memory_than_it_is_long(dataset: Path) -> None:
    with np.load(dataset / ".streamload" / f"{NAMES[0]}.npz") as archive:
        arrays = dict(archive)
    bomb, claim = BytesIO(), BytesIO()
    np.savez_compressed(bomb, **{**arrays, "labels": np.zeros(1 << 22, np.int64)})
    with zipfile.ZipFile(claim, "w") as written, written.open("about.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (1 << 25,)})
    tracemalloc.start()
    try:
        assert "compressed" in refused(dataset, bomb.getvalue())
        assert "and has" in refused(dataset, claim.getvalue())
        assert tracemalloc.get_traced_memory()[1] < 1 << 23
    finally:
        tracemalloc.stop()
