"""Opening shards: what was listed is what is mapped, or an error says what has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamload.errors import ShardChangedError, ShardNotFoundError, StorageError
from streamload.fetch.resident import ResidentShards
from streamload.index.listing import Shard
from streamload.memory.mapped import map_memory


@pytest.fixture
def listed(tmp_path: Path) -> Shard:
    path = tmp_path / "a.tar"
    path.write_bytes(b"content")
    return Shard(str(path), "a.tar", 7, path.stat().st_mtime_ns, str(tmp_path))


def test_an_opened_shard_can_be_mapped(listed: Shard) -> None:
    opened = ResidentShards((listed,)).open(0)
    try:
        assert (opened.url, opened.size_bytes) == (listed.url, 7)
        assert map_memory(opened.descriptor, opened.size_bytes, writable=False).tobytes() == b"content"
        assert not os.get_inheritable(opened.descriptor)
        with pytest.raises(OSError, match="Permission denied"):
            map_memory(opened.descriptor, 7, writable=True)
    finally:
        os.close(opened.descriptor)


def test_each_opening_has_a_descriptor_of_its_own(listed: Shard) -> None:
    shards = ResidentShards((listed,))
    first, second = shards.open(0), shards.open(0)
    os.close(first.descriptor)
    os.close(second.descriptor)


def test_shards_are_known_by_their_numbers(tmp_path: Path, listed: Shard) -> None:
    other = tmp_path / "b.tar"
    other.write_bytes(b"other")
    shards = ResidentShards((listed, Shard(str(other), "b.tar", 5, other.stat().st_mtime_ns, str(tmp_path))))
    opened = shards.open(1)
    assert os.pread(opened.descriptor, 10, 0) == b"other"
    os.close(opened.descriptor)


@pytest.mark.parametrize("change", ["longer", "shorter", "as long but newer", "replaced"])
def test_a_shard_that_has_changed_is_refused_with_both_sizes(listed: Shard, change: str) -> None:
    path = Path(listed.url)
    if change == "as long but newer":
        os.utime(path, ns=(listed.mtime_ns + 1, listed.mtime_ns + 1))
    elif change == "replaced":
        new = path.with_name("new")
        new.write_bytes(b"another")
        os.utime(new, ns=(listed.mtime_ns - 10**9, listed.mtime_ns - 10**9))
        os.replace(new, path)
    else:
        path.write_bytes(b"content and more" if change == "longer" else b"cut")
        os.utime(path, ns=(listed.mtime_ns, listed.mtime_ns))
    with pytest.raises(ShardChangedError, match=r"listed with 7 bytes .* make a new loader") as caught:
        ResidentShards((listed,)).open(0)
    assert caught.value.url == listed.url
    assert f"has {path.stat().st_size} (mtime {path.stat().st_mtime_ns})" in str(caught.value)


def test_a_shard_that_is_gone_is_not_found(listed: Shard) -> None:
    os.remove(listed.url)
    with pytest.raises(ShardNotFoundError) as caught:
        ResidentShards((listed,)).open(0)
    assert caught.value.url == listed.url


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_shard_that_may_not_be_read_is_a_storage_error(listed: Shard) -> None:
    os.chmod(listed.url, 0)
    with pytest.raises(StorageError, match="no permission"):
        ResidentShards((listed,)).open(0)


def test_a_shard_that_became_a_folder_is_refused(listed: Shard) -> None:
    os.remove(listed.url)
    os.mkdir(listed.url)
    with pytest.raises(StorageError):
        ResidentShards((listed,)).open(0)


def shelf_of(tmp_path: Path, count: int) -> tuple[Shard, ...]:
    shards = []
    for number in range(count):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(b"0123456789")
        shards.append(Shard(str(path), path.name, 10, path.stat().st_mtime_ns, str(tmp_path)))
    return tuple(shards)


def test_what_is_finished_with_stays_while_it_is_small_and_the_oldest_goes_first(tmp_path: Path) -> None:
    shards = ResidentShards(shelf_of(tmp_path, 5), kept_bytes=25)
    assert shards.finish([0, 1]) == []
    assert shards.finish([1]) == [], "naming one again does not count it twice"
    assert shards.finish([2]) == [0]
    shards.need(1)
    assert shards.finish([3]) == [], "one that is in use again takes none of the room"
    assert shards.finish([4, 1]) == [2, 3]
    assert ResidentShards(shelf_of(tmp_path, 2), kept_bytes=5).finish([0, 1]) == [0, 1]


def test_a_shard_that_was_kept_is_checked_when_it_is_needed_again(tmp_path: Path) -> None:
    listed = shelf_of(tmp_path, 2)
    shards = ResidentShards(listed)
    shards.finish([0, 1])
    Path(listed[0].url).write_bytes(b"something else")
    shards.need(1)
    with pytest.raises(ShardChangedError):
        shards.need(0)
