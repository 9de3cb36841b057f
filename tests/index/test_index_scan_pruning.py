"""Kept scans don't pile up: what was not used for long goes, and nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from crafted_tar import Archive, header

from streamload.index.scan_cache import MOST_BYTES, MOST_IDLE_S, ScanCache, prune_once_a_day
from streamload.tar.scan import scan_shard

DAY_S = 86_400
NOW_S = 2_000_000_000.0


def put(folder: Path, name: str, days_ago: float, size: int = 10) -> None:
    (folder / name).write_bytes(bytes(size))
    os.utime(folder / name, (NOW_S - days_ago * DAY_S,) * 2)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".pruned"}


def test_what_was_not_used_for_long_goes_and_nothing_of_others(tmp_path: Path) -> None:
    for name, days_ago in (("a.npz", 91), ("b.npz", 89), (".c.npz.1.tmp", 2), (".d.npz.2.tmp", 0.5), ("notes", 500)):
        put(tmp_path, name, days_ago)
    (tmp_path / "folder.npz").mkdir()
    os.utime(tmp_path / "folder.npz", (0, 0))
    prune_once_a_day(str(tmp_path), NOW_S)
    assert names(tmp_path) == {"b.npz", ".d.npz.2.tmp", "notes", "folder.npz"}
    assert MOST_IDLE_S == 90 * DAY_S
    assert MOST_BYTES == 1 << 30


def test_the_longest_unused_go_until_the_rest_fits(tmp_path: Path) -> None:
    for number, days_ago in enumerate((3, 1, 4, 2)):
        put(tmp_path, f"{number}.npz", days_ago)
    prune_once_a_day(str(tmp_path), NOW_S, most_bytes=25)
    assert names(tmp_path) == {"1.npz", "3.npz"}


def test_it_is_done_once_a_day_by_whichever_process(tmp_path: Path) -> None:
    prune_once_a_day(str(tmp_path), NOW_S)
    put(tmp_path, "a.npz", 100)
    prune_once_a_day(str(tmp_path), NOW_S + 0.9 * DAY_S)
    assert names(tmp_path) == {"a.npz"}
    prune_once_a_day(str(tmp_path), NOW_S + 1.1 * DAY_S)
    assert names(tmp_path) == set()


def test_files_that_others_remove_meanwhile_and_folders_that_are_not_there_are_no_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prune_once_a_day(str(tmp_path / "nowhere"), NOW_S)
    assert not (tmp_path / "nowhere").exists()
    for name in ("a.npz", "b.npz", "c.npz"):
        put(tmp_path, name, 100)
    unlink = os.unlink

    def late(path: str) -> None:
        unlink(path)
        if path.endswith("b.npz"):
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", late)
    prune_once_a_day(str(tmp_path), NOW_S)
    assert names(tmp_path) == set()


def test_a_cache_prunes_when_it_stores_and_keeps_what_is_used(tmp_path: Path) -> None:
    archive = Archive()
    archive.add(header(b"0.bin", 0))
    table = scan_shard(memoryview(archive.whole()), "")
    ScanCache(str(tmp_path)).store("used.tar", table.shard_bytes, 1, True, table)
    ScanCache(str(tmp_path)).store("unused.tar", table.shard_bytes, 1, True, table)
    long_ago = time.time() - 100 * DAY_S
    for path in tmp_path.iterdir():
        os.utime(path, (long_ago, long_ago))
    assert ScanCache(str(tmp_path)).load("used.tar", table.shard_bytes, 1, True) is not None
    cache = ScanCache(str(tmp_path))
    cache.store("new.tar", table.shard_bytes, 1, True, table)
    assert cache.load("used.tar", table.shard_bytes, 1, True) is not None
    assert cache.load("new.tar", table.shard_bytes, 1, True) is not None
    assert cache.load("unused.tar", table.shard_bytes, 1, True) is None
