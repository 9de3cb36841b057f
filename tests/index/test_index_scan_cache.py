"""What scans learned is found again for the same shard only, and never an error."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from crafted_tar import Archive, header

from streamload.index.scan_cache import ScanCache, user_cache_folder
from streamload.index.table_file import pack_table
from streamload.tar.scan import scan_shard
from streamload.tar.table import ShardTable


def table_of(samples: int) -> ShardTable:
    archive = Archive()
    for number in range(samples):
        archive.add(header(b"%d.bin" % number, 0))
    return scan_shard(memoryview(archive.whole()), "")


TABLE = table_of(3)
SIZE = TABLE.shard_bytes


def test_a_table_is_found_again_by_a_later_run(tmp_path: Path) -> None:
    ScanCache(str(tmp_path / "made")).store("a.tar", SIZE, 17, True, TABLE)
    found = ScanCache(str(tmp_path / "made")).load("a.tar", SIZE, 17, True)
    assert found is not None
    assert found.keys() == TABLE.keys()
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("path", "shard_bytes", "mtime_ns", "strict"),
    [
        ("b.tar", SIZE, 17, True),
        ("a.tar", SIZE + 512, 17, True),
        ("a.tar", SIZE, 18, True),
        ("a.tar", SIZE, None, True),
        ("a.tar", SIZE, 17, False),
    ],
)
def test_another_shard_is_not_found(
    path: str, shard_bytes: int, mtime_ns: int | None, strict: bool, tmp_path: Path
) -> None:
    cache = ScanCache(str(tmp_path))
    cache.store("a.tar", SIZE, 17, True, TABLE)
    assert cache.load(path, shard_bytes, mtime_ns, strict) is None


def test_a_path_is_the_same_from_any_folder_and_a_url_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ScanCache(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cache.store("a.tar", SIZE, 17, True, TABLE)
    cache.store("s3://bucket/b.tar", SIZE, None, True, TABLE)
    monkeypatch.chdir("/")
    assert cache.load(str(tmp_path / "a.tar"), SIZE, 17, True) is not None
    assert cache.load("a.tar", SIZE, 17, True) is None
    assert cache.load("s3://bucket/b.tar", SIZE, None, True) is not None


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    cache = ScanCache(str(tmp_path))
    cache.store("\udcff.tar", SIZE, 17, True, TABLE)
    assert cache.load("\udcff.tar", SIZE, 17, True) is not None


def test_a_damaged_file_is_absent_and_is_replaced(tmp_path: Path) -> None:
    cache = ScanCache(str(tmp_path))
    cache.store("a.tar", SIZE, 17, True, TABLE)
    (file,) = tmp_path.glob("*.table")
    for content in (b"", b"garbage", file.read_bytes()[:200]):
        file.write_bytes(content)
        assert cache.load("a.tar", SIZE, 17, True) is None
        cache.store("a.tar", SIZE, 17, True, TABLE)
        assert cache.load("a.tar", SIZE, 17, True) is not None
    assert {path.name for path in tmp_path.iterdir()} == {file.name, ".pruned"}


def test_a_table_of_another_size_is_not_believed(tmp_path: Path) -> None:
    cache = ScanCache(str(tmp_path))
    cache.store("a.tar", SIZE, 17, True, table_of(9))
    assert cache.load("a.tar", SIZE, 17, True) is None


def test_a_folder_that_cannot_be_written_turns_the_cache_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = ScanCache(str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.INFO, "streamload"):
        for number in range(3):
            cache.store(f"{number}.tar", SIZE, 17, True, TABLE)
            assert cache.load(f"{number}.tar", SIZE, 17, True) is None
    assert not cache.enabled
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "streamload"


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache = ScanCache(str(tmp_path))
    cache.store("a.tar", SIZE, 17, True, TABLE)
    assert not cache.enabled
    assert [path.name for path in tmp_path.iterdir()] == [".pruned"]


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache_folder() == "/home/someone/.cache/streamload/scans"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_folder() == "/home/someone/.cache/streamload/scans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == str(tmp_path / "streamload" / "scans")
    assert ScanCache(None).folder == user_cache_folder()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("sys.platform", "darwin")
    assert user_cache_folder() == "/home/someone/Library/Caches/streamload/scans"


def test_an_object_is_known_by_its_etag_and_not_by_its_time(tmp_path: Path) -> None:
    cache = ScanCache(str(tmp_path))
    url = "s3://bucket/a.tar"
    cache.store(url, SIZE, 17, True, TABLE, etag='"abc"')
    assert cache.load(url, SIZE, 17, True, etag='"abc"') is not None
    assert cache.load(url, SIZE, 18, True, etag='"abc"') is not None
    assert cache.load(url, SIZE, 17, True, etag='"abd"') is None
    assert cache.load(url, SIZE + 512, 17, True, etag='"abc"') is None
    assert cache.load(url, SIZE, 17, True) is None
    cache.store(url, SIZE, 17, True, TABLE)
    assert cache.load(url, SIZE, 17, True, etag="17") is None


def test_another_file_in_the_place_of_a_shard_is_another_shard(tmp_path: Path) -> None:
    """`cp -p` and `rsync -t` keep name, size and time of modification."""
    shard, times = tmp_path / "a.tar", (17, 17)
    shard.write_bytes(bytes(SIZE))
    os.utime(shard, ns=times)
    cache = ScanCache(str(tmp_path / "cache"))
    cache.store(str(shard), SIZE, 17, True, TABLE)
    assert cache.load(str(shard), SIZE, 17, True) is not None
    (tmp_path / "b.tar").write_bytes(bytes(SIZE))
    os.utime(tmp_path / "b.tar", ns=times)
    os.replace(tmp_path / "b.tar", shard)
    assert cache.load(str(shard), SIZE, 17, True) is None
    cache.store(str(shard), SIZE, 17, True, TABLE)
    shard.write_bytes(b"x" * SIZE)  # in place
    os.utime(shard, ns=times)
    assert cache.load(str(shard), SIZE, 17, True) is None
    os.replace(shard, tmp_path / "c.tar")  # while it is scanned another one takes its place
    shard.write_bytes(bytes(SIZE))
    os.utime(shard, ns=times)
    cache.store(str(shard), SIZE, 17, True, TABLE)
    assert cache.load(str(shard), SIZE, 17, True) is None


def test_a_table_that_was_changed_is_absent(tmp_path: Path) -> None:
    """Also where it still is a table of this shard's size."""
    cache = ScanCache(str(tmp_path))
    cache.store("a.tar", SIZE, 17, True, TABLE)
    (file,) = tmp_path.glob("*.table")
    content = file.read_bytes()
    other = pack_table(replace(TABLE, member_offset=TABLE.member_offset + 1))
    assert len(other) < len(content)
    for changed in (other, other + content[-4:], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(changed)
        assert cache.load("a.tar", SIZE, 17, True) is None


def test_files_are_for_their_owner_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    folder.chmod(0o777)
    ScanCache(str(folder)).store("a.tar", SIZE, 17, True, TABLE)
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.glob("*.table")
    assert file.stat().st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        pytest.skip("only root can make folders of others")
    os.chown(folder, 12345, 12345)
    cache = ScanCache(str(folder))
    assert cache.load("a.tar", SIZE, 17, True) is None
    cache.store("b.tar", SIZE, 17, True, TABLE)
    assert [path.name for path in folder.glob("*.table")] == [file.name]
    assert [record.message for record in caplog.records if "belongs to another user (uid 12345)" in record.message]


def test_a_compressed_shard_is_found_again_by_its_own_size(tmp_path: Path) -> None:
    cache, table = ScanCache(str(tmp_path / "cache")), TABLE
    for name, found in (("a.tar.gz", True), ("s3://b/a.TZST?v=1", True), ("a.tar", False)):
        cache.store(name, 77, 1, True, table)
        assert (cache.load(name, 77, 1, True) is not None) == found
