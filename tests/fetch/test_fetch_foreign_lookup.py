"""Datasets that other tools have indexed: their counts are used, and held against what the shards hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from servers.rclone import S3Server

from streamload import ShardWriter, StreamLoader
from streamload.dataset.index import index_shards
from streamload.dataset.scan import scan_shard
from streamload.errors import DatasetIndexError
from streamload.fetch.listing.listing import list_shards
from streamload.fetch.storage.storages import Storages
from streamload.fetch.tables import Tables

COUNTS = (5, 3, 4)


def write(folder: Path) -> list[Path]:
    number = 0
    for shard, count in enumerate(COUNTS):
        with ShardWriter(folder / f"s{shard}-%03d.tar", index=False) as writer:
            for _ in range(count):
                writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "cls": number})
                number += 1
    return sorted(folder.glob("*.tar"))


def wids(shards: list[Path], counts: tuple[int, ...] = COUNTS) -> str:
    entries = [
        {"url": path.name, "nsamples": count, "filesize": path.stat().st_size}
        for path, count in zip(shards, counts, strict=True)
    ]
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": entries})


def dali(shard: Path) -> str:
    """A line for each sample: extension, offset, size and name of each member."""
    table = scan_shard(memoryview(shard.read_bytes()), "")
    lines = [f"v1.2 {len(table)}"]
    for sample in range(len(table)):
        words = []
        for member in range(int(table.sample_start[sample]), int(table.sample_start[sample + 1])):
            field = table.fields[int(table.member_field[member])]
            place = f"{table.member_offset[member]} {table.member_size[member]}"
            words.append(f"{field} {place} {table.key(sample)}.{field}")
        lines.append(" ".join(words))
    return "".join(f"{line}\n" for line in lines)


def labels(url: str | Path, **options: Any) -> list[int]:
    with StreamLoader(url, 4, fields=("cls",), num_workers=0, pin_memory=False, **options) as loader:
        return [value for (batch,) in loader for value in batch.tolist()]


def scanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards whose tables come from scans."""
    asked: list[int] = []
    real = Tables.add

    def add(tables: Tables, shard: int, table: Any) -> None:
        asked.append(shard)
        real(tables, shard, table)

    monkeypatch.setattr(Tables, "add", add)
    return asked


@pytest.mark.parametrize("kind", ["wids", "energon", "dali"])
def test_the_length_is_known_without_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shards = write(tmp_path)
    if kind == "wids":
        (tmp_path / "data.json").write_text(wids(shards))
    elif kind == "energon":
        (tmp_path / ".nv-meta").mkdir()
        counts = {path.name: count for path, count in zip(shards, COUNTS, strict=True)}
        (tmp_path / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": counts}))
    else:
        for path in shards:
            path.with_suffix(".idx").write_text(dali(path))
    asked = scanned(monkeypatch)
    with StreamLoader(tmp_path, 4, num_workers=0, pin_memory=False) as loader:
        assert len(loader) == 3
    listing = list_shards(tmp_path)
    assert (listing.counts, listing.promised, listing.expected_counts) == (None, COUNTS, COUNTS)
    assert asked == []
    for options in ({}, {"lanes": 3}, {"shuffle": True}, {"shuffle": True, "lanes": 2}):
        assert sorted(labels(tmp_path, **options)) == list(range(12))
    assert (set(asked) == set()) == (kind == "dali")


@pytest.mark.parametrize("options", [{}, {"lanes": 2}, {"lanes": 3, "shuffle": True}])
def test_the_order_is_that_of_the_same_dataset_without_or_with_an_index(tmp_path: Path, options: Any) -> None:
    shards = write(tmp_path)
    expected = labels(tmp_path, **options)
    (tmp_path / "shardindex.json").write_text(wids(shards))
    assert labels(tmp_path, **options) == expected
    with StreamLoader(tmp_path, 4, fields=("cls",), num_workers=2, pin_memory=False, **options) as loader:
        assert [value for (batch,) in loader for value in batch.tolist()] == expected


@pytest.mark.parametrize("lie", [(5, 2, 4), (5, 4, 4)])
@pytest.mark.parametrize("options", [{}, {"lanes": 3}])
def test_a_promise_that_is_broken_is_an_error(tmp_path: Path, lie: tuple[int, ...], options: Any) -> None:
    shards = write(tmp_path)
    (tmp_path / "shardindex.json").write_text(wids(shards, lie))
    with pytest.raises(DatasetIndexError, match="holds 3 samples, and another tool's index"):
        labels(tmp_path, **options)


def test_an_index_of_ours_goes_first(tmp_path: Path) -> None:
    shards = write(tmp_path)
    (tmp_path / "shardindex.json").write_text(wids(shards, (1, 1, 1)))
    index_shards([str(path) for path in shards])
    assert list_shards(tmp_path).counts == COUNTS
    assert sorted(labels(tmp_path)) == list(range(12))


def test_some_shards_may_be_unknown(tmp_path: Path) -> None:
    shards = write(tmp_path)
    (tmp_path / "shardindex.json").write_text(wids(shards[:2], COUNTS[:2]))
    listing = list_shards(tmp_path)
    assert listing.promised == (5, 3, None)
    assert listing.expected_counts is None
    assert sorted(labels(tmp_path, lanes=2)) == list(range(12))


def test_other_json_files_and_large_ones_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "classes.json").write_text('{"classes": []}')
    (tmp_path / "notes.json").write_text("no JSON")
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(1 << 40)
    assert list_shards(tmp_path).promised == ()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    asked: list[str] = []

    def told(name: str, act: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            asked.append(name)
            return act(*arguments, **options)

        return call

    for name in ("head", "get", "list", "list_with_delimiter"):
        monkeypatch.setattr(obstore, name, told(name, getattr(obstore, name)))
    return asked


@pytest.mark.parametrize("pattern", ["", "/*.tar", "/s{0..2}-000.tar"])
def test_a_bucket_costs_one_listing_and_what_is_read(
    rclone_s3: S3Server, tmp_path: Path, requests: list[str], pattern: str
) -> None:
    folder = rclone_s3.folder / f"f{abs(hash(str(tmp_path))) % 10**10}"
    shards = write(folder)
    (folder / "shardindex.json").write_text(wids(shards))
    for path in shards:
        path.with_suffix(".idx").write_text("not read, since each would be a request")
    storages = Storages(rclone_s3.options)
    listing = list_shards(f"s3://{folder.name}{pattern}", storages=storages)
    assert listing.expected_counts == COUNTS
    assert sorted(requests) == ["get", "get", "get", "list_with_delimiter"]
    asyncio.run(storages.aclose())
    url = f"s3://{folder.name}{pattern}"
    for options in ({}, {"lanes": 3}):
        assert sorted(labels(url, storage_options=rclone_s3.options, **options)) == list(range(12))
    (folder / "shardindex.json").write_text(wids(shards, (5, 3, 9)))
    for options in ({}, {"lanes": 3}):
        with pytest.raises(DatasetIndexError, match="holds 4 samples"):
            labels(url, storage_options=rclone_s3.options, **options)
