"""The disk cache in one process: what is kept, what goes, what is right, and what is left."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest
from cache_filling import (
    FILE_NAMES_AT,
    PART_BYTES,
    cached_names,
    content,
    fill,
    identity_of,
    partial_names,
    read_through,
)

from streamload.fetch import disk_cache
from streamload.fetch.disk_cache import CacheFile, DiskCache, ShardIdentity, locked_file

N_PARTS = 8
ONE = identity_of(0).bytes
ROOM = ONE + 4 * N_PARTS
"""What a shard takes with its checksums."""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture
def cache(folder: str) -> DiskCache:
    return cache_of(folder)


def cache_of(folder: str, shards: float = 100, dataset: Collection[ShardIdentity] = ()) -> DiskCache:
    urls = [identity.url for identity in dataset]
    return DiskCache(folder, int(shards * ROOM), part_bytes=PART_BYTES, urls=urls)


def opened(cache: DiskCache, identity: ShardIdentity) -> CacheFile:
    file = cache.open(identity)
    assert file is not None
    return file


def keep(cache: DiskCache, *identities: ShardIdentity) -> None:
    for identity in identities:
        assert not read_through(cache, identity)


def path_of(folder: str, identity: ShardIdentity) -> str:
    return os.path.join(folder, FILE_NAMES_AT, identity.file_name)


def test_a_shard_is_fetched_once_and_read_back(cache: DiskCache, folder: str) -> None:
    keep(cache, identity_of(1))
    assert cached_names(folder) == {identity_of(1).file_name}
    assert partial_names(folder) == set()
    for later in (cache, cache_of(folder)):
        assert read_through(later, identity_of(1))


def test_the_file_is_named_for_people_too_and_shows_no_secret() -> None:
    name = ShardIdentity("https://me:pw@host/a/träin-1.tar?token=secret", '"x"', 5).file_name
    assert name.endswith("-tr_in_1.tar")
    assert "secret" not in name
    assert "pw" not in name
    assert len(name) < 120


@pytest.mark.parametrize(
    "other",
    [
        ShardIdentity(identity_of(1).url, '"2"', ONE),
        ShardIdentity(identity_of(1).url, '"1"', ONE - 1),
        ShardIdentity("s3://other/train-000001.tar", '"1"', ONE),
    ],
)
def test_another_version_or_url_is_another_entry(cache: DiskCache, folder: str, other: ShardIdentity) -> None:
    keep(cache, identity_of(1), other)
    assert cached_names(folder) == {identity_of(1).file_name, other.file_name}


# -- what is evicted -------------------------------------------------------------------------------------------------


def test_shards_of_other_datasets_and_versions_are_evicted_first(folder: str) -> None:
    one, two, three, four = (identity_of(number) for number in (1, 2, 3, 4))
    rewritten = identity_of(3, etag='"2"')
    keep(cache_of(folder, 3, [one, two]), one, two)
    cache = cache_of(folder, 3, [two, three, four])
    keep(cache, three, four)
    assert cached_names(folder) == {two.file_name, three.file_name, four.file_name}
    keep(cache, rewritten)
    assert cached_names(folder) == {two.file_name, rewritten.file_name, four.file_name}
    for _ in range(2):
        assert [read_through(cache, each) for each in (one, two, rewritten, four)] == [False, True, True, True]


def test_files_in_use_are_not_evicted(folder: str) -> None:
    one, two, three = (identity_of(number) for number in (1, 2, 3))
    cache = cache_of(folder, 2)
    keep(cache, one, two)
    file = opened(cache_of(folder, 2), one)
    copy = os.dup(file.descriptor)  # as a worker has one
    file.close()
    keep(cache, three)
    assert cached_names(folder) == {one.file_name, three.file_name}
    os.close(copy)
    keep(cache, two)
    assert cached_names(folder) == {two.file_name, three.file_name}


# -- several processes -----------------------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_removed_by_the_next(cache: DiskCache, folder: str) -> None:
    filling = opened(cache, identity_of(0))
    left = os.path.join(folder, FILE_NAMES_AT, "partial", f"{identity_of(1).file_name}.0.part")
    Path(left).touch()
    cache_of(folder)
    assert (os.path.exists(left), os.path.exists(filling.temporary or "")) == (False, True)
    filling.close()


def test_a_shard_is_filled_by_one(folder: str) -> None:
    caches = cache_of(folder), cache_of(folder)
    file = opened(caches[0], identity_of(1))
    assert caches[1].open(identity_of(1)) is None
    fill(caches[0], file, identity_of(1))
    assert os.pread(file.descriptor, ONE, 0) == content(identity_of(1))
    file.close()
    assert cached_names(folder) == {identity_of(1).file_name}
    assert read_through(caches[0], identity_of(1))


def test_a_process_that_keeps_the_lock_costs_the_others_only_the_cache(
    cache: DiskCache, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache, identity_of(1))
    monkeypatch.setattr(disk_cache, "_LOCK_WAIT_S", 0.02)
    with locked_file(os.path.join(folder, FILE_NAMES_AT, "lock"), 1.0):
        assert cache.open(identity_of(2)) is None
        assert read_through(cache, identity_of(1))
    keep(cache, identity_of(2))


# -- what is believed ------------------------------------------------------------------------------------------------


def test_files_that_the_cache_did_not_make_are_neither_counted_nor_removed(folder: str) -> None:
    """Its folder has the name that a user may give to a folder of shards."""
    theirs = [Path(folder, FILE_NAMES_AT, name) for name in ("train-000000.tar", "partial/notes.txt")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(ROOM))
    cache = cache_of(folder, 2)
    one, two, three = (identity_of(number) for number in (1, 2, 3))
    keep(cache, one, two, three)
    assert cached_names(folder) == {two.file_name, three.file_name, theirs[0].name}
    assert all(path.exists() for path in theirs)


@pytest.mark.parametrize("linked", [FILE_NAMES_AT, f"{FILE_NAMES_AT}/partial"])
def test_a_folder_that_is_a_link_is_not_used(folder: str, tmp_path: Path, linked: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / f"{identity_of(2).file_name}.0.part").write_bytes(b"of another cache")
    link = Path(folder, linked)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "theirs")
    assert cache_of(folder).open(identity_of(1)) is None
    assert len(os.listdir(tmp_path / "theirs")) == 1


def test_files_are_for_their_owner_alone(folder: str) -> None:
    os.makedirs(os.path.join(folder, FILE_NAMES_AT), mode=0o777)
    os.chmod(os.path.join(folder, FILE_NAMES_AT), 0o777)
    cache = cache_of(folder)
    keep(cache, identity_of(1))
    file = opened(cache, identity_of(2))
    modes = {
        os.path.basename(path): os.stat(path).st_mode & 0o777
        for at, folders, files in os.walk(folder)
        for path in (os.path.join(at, name) for name in (*folders, *files))
    }
    assert modes.pop(FILE_NAMES_AT) == modes.pop("partial") == 0o700
    assert set(modes.values()) == {0o600}
    assert len(modes) == 3
    file.close()
