"""The disk refuses: at whichever write it is, the bytes still come, with one warning and no partial file."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cache_filling import (
    PART_BYTES,
    cached_names,
    content,
    file_of,
    identity_of,
    part_of,
    partial_names,
    read_through,
)

from streamload.fetch.cache import disk_cache, partial_shard
from streamload.fetch.cache.cached_shard import CachedShard, CacheOffError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.file_locks import locked_file
from streamload.fetch.cache.partial_shard import PartialFiles, PartialShard
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.storage import local_files

N_SHARDS = 3
N_PARTS = 4
WRITES = N_SHARDS * (1 + 4 * N_PARTS)  # a state's beginning, then two pieces, a checksum and a mark for each part


def read_as_a_fetcher(cache: DiskCache, identity: ShardIdentity) -> bytes:
    """The shard's bytes, from the cache as far as it goes and from memory where it is off."""
    shard = cache.open(identity)
    data = content(identity)
    if shard is None:
        return data
    memory = bytearray(identity.bytes)
    in_memory = set()
    for part in range(N_PARTS):
        try:
            _fill_part(shard, part, part_of(data, part))
        except CacheOffError:
            memory[part * PART_BYTES : (part + 1) * PART_BYTES] = part_of(data, part)
            in_memory.add(part)
    if any(not shard.has(part) for part in set(range(N_PARTS)) - in_memory):
        assert shard.withdrawn
        memory[:] = data
        in_memory = set(range(N_PARTS))
    for part in set(range(N_PARTS)) - in_memory:
        piece = os.pread(shard.descriptor, len(part_of(data, part)), part * PART_BYTES)
        memory[part * PART_BYTES : (part + 1) * PART_BYTES] = piece
    shard.close()
    return bytes(memory)


def _fill_part(shard: CachedShard, part: int, data: bytes) -> None:
    claim = shard.claim(part)
    with suppress(StopIteration):  # nobody else is here, so it does not wait
        claim.send(None)
        raise AssertionError("it waits")
    shard.write(part * PART_BYTES, data[:1000])
    shard.write(part * PART_BYTES + 1000, data[1000:])
    shard.finish(part, zlib.crc32(data))


def refuse(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int, code: int) -> Callable[[], int]:
    """Let one function of the operating system fail from its n-th call on; gives the number of calls."""
    real = getattr(os, name)
    calls = 0

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            if name == "pwrite" and calls == number:  # as a disk does it: the last bytes that fit, then the error
                real(arguments[0], bytes(arguments[1])[:10], arguments[2])
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    class Refusing:
        def __getattr__(self, wanted: str) -> Any:
            return fails if wanted == name else getattr(os, wanted)

    monkeypatch.setattr(module, "os", Refusing())
    return lambda: calls


def read_all(folder: str, caplog: pytest.LogCaptureFixture) -> tuple[set[str], list[str]]:
    """Read every shard; gives the files that are whole, and the warnings."""
    with caplog.at_level(logging.INFO, "streamload"):
        cache = DiskCache(folder, 1 << 30, part_bytes=PART_BYTES)
        for number in range(N_SHARDS):
            assert read_as_a_fetcher(cache, identity_of(number, N_PARTS)) == content(identity_of(number, N_PARTS))
        cache.close()
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return cached_names(folder), [record.getMessage() for record in caplog.records]


def check_whole(folder: str) -> int:
    """Every visible file is right; gives how many there are."""
    names = {identity.file_name: identity for identity in (identity_of(n, N_PARTS) for n in range(N_SHARDS))}
    for name in cached_names(folder):
        with open(os.path.join(folder, "streamload-shards", name), "rb") as file:
            assert file.read() == file_of(names[name])
    return len(cached_names(folder))


@pytest.mark.parametrize("number", range(1, WRITES + 1))
def test_the_disk_is_full_at_the_nth_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    code = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)[number % 4]
    refuse(monkeypatch, partial_shard, "pwrite", number, code)
    _, warnings = read_all(str(tmp_path), caplog)
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]
    assert os.strerror(code) in warnings[0]
    assert partial_names(str(tmp_path)) == set()
    # A shard that was complete before may have got its name before the cache went off, or not.
    assert check_whole(str(tmp_path)) <= (number - 1) // (WRITES // N_SHARDS)


def test_there_are_as_many_writes_as_are_tried_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = refuse(monkeypatch, partial_shard, "pwrite", WRITES + 1, errno.ENOSPC)
    names, warnings = read_all(str(tmp_path), caplog)
    assert calls() == WRITES
    assert len(names) == N_SHARDS
    assert warnings == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (disk_cache, "fsync"),
        (disk_cache, "replace"),
        (disk_cache, "scandir"),
        (local_files, "makedirs"),
        (partial_shard, "ftruncate"),
        (partial_shard, "open"),
        (partial_shard, "dup"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_disk_refuses_something_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: Any,
    name: str,
    number: int,
) -> None:
    calls = refuse(monkeypatch, module, name, number, errno.EIO)
    os.makedirs(tmp_path / "streamload-shards" / "partial", exist_ok=True)
    _, warnings = read_all(str(tmp_path), caplog)
    if calls() < number:
        pytest.skip(f"{name} is called only {calls()} times")
    assert len(warnings) == 1
    check_whole(str(tmp_path))
    if name != "scandir":
        assert partial_names(str(tmp_path)) == set()


def test_a_shard_that_cannot_be_made_durable_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, disk_cache, "fsync", 1, errno.EIO)
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
    shard = cache.open(identity_of(0, N_PARTS))
    assert shard is not None
    for part in range(N_PARTS):
        _fill_part(shard, part, part_of(content(identity_of(0, N_PARTS)), part))
    cache.flush()
    assert shard.withdrawn
    assert not shard.complete
    assert not shard.has(0)
    with pytest.raises(CacheOffError):
        _fill_part(shard, 0, b"")
    shard.close()
    cache.close()


def test_files_that_cannot_be_begun_are_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, partial_shard, "pwrite", 1, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        PartialShard.create(PartialFiles(str(tmp_path), "name", "boot", 10_000, PART_BYTES))
    assert os.listdir(tmp_path) == []


def test_a_complete_shard_gets_its_name_though_the_cache_went_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
    complete, other = cache.open(identity_of(0, N_PARTS)), cache.open(identity_of(1, N_PARTS))
    assert complete is not None
    assert other is not None
    monkeypatch.setattr(disk_cache, "_OPEN_WAIT_S", 0.02)
    with locked_file(str(tmp_path / "streamload-shards" / "lock"), 1.0):
        for part in range(N_PARTS):
            _fill_part(complete, part, part_of(content(identity_of(0, N_PARTS)), part))
        refuse(monkeypatch, partial_shard, "pwrite", 1, errno.ENOSPC)
        with pytest.raises(CacheOffError):
            _fill_part(other, 0, b"1234")
    cache.close()
    assert check_whole(str(tmp_path)) == 1
    assert partial_names(str(tmp_path)) == set()


def test_a_state_that_cannot_be_read_turns_the_cache_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
    shard = cache.open(identity_of(0, N_PARTS))
    assert shard is not None
    refuse(monkeypatch, partial_shard, "pread", 1, errno.EIO)
    assert not shard.has(0)
    assert not shard.complete
    with pytest.raises(CacheOffError):
        _fill_part(shard, 0, b"")
    assert len(caplog.records) == 1
    cache.close()
    assert partial_names(str(tmp_path)) == set()


def test_whole_files_are_still_read_where_the_disk_is_only_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
    read_through(cache, identity_of(0))
    cache.flush()
    refuse(monkeypatch, partial_shard, "pwrite", 1, errno.ENOSPC)
    assert cache.open(identity_of(1)) is None
    assert read_through(cache, identity_of(0)) == 0
    cache.close()


def test_what_others_leave_behind_goes_too_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
    shard = cache.open(identity_of(0))
    assert shard is not None
    shard.close()
    assert len(partial_names(str(tmp_path))) == 2
    refuse(monkeypatch, partial_shard, "pwrite", 1, errno.ENOSPC)
    assert cache.open(identity_of(1)) is None
    assert partial_names(str(tmp_path)) == set()
    cache.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
    assert cache.open(identity_of(0)) is None
    assert len(caplog.records) == 1
    tmp_path.chmod(0o700)


def test_a_folder_that_cannot_be_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(str(tmp_path / "file"), 1 << 30, part_bytes=PART_BYTES)
    assert cache.open(identity_of(0)) is None
    assert len(caplog.records) == 1
    cache.close()


_ON_A_REAL_DISK = """
import logging, sys
sys.path[:0] = [sys.argv[2]]
from test_fetch_disk_full import *

class Kept(logging.Handler):
    found = []
    def emit(self, record):
        self.found.append(record.getMessage())

logging.getLogger("streamload").addHandler(Kept())
cache = DiskCache(sys.argv[1], 1 << 30, part_bytes=PART_BYTES)
for number in range(N_SHARDS):
    assert read_as_a_fetcher(cache, identity_of(number, N_PARTS)) == content(identity_of(number, N_PARTS))
cache.close()
print(len(Kept.found), check_whole(sys.argv[1]), len(partial_names(sys.argv[1])))
"""


@pytest.mark.parametrize("pages", [4, 6, 9, 12, 40])
def test_a_real_disk_that_is_full(tmp_path: Path, pages: int) -> None:
    """A file system in memory of few pages, in a mount namespace of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size={pages * 4096},nr_inodes=100 none {folder} && exec "
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "sh", "-c", mount + "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting is not permitted here")
    program = [sys.executable, "-c", _ON_A_REAL_DISK, str(folder), str(Path(__file__).parent)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount + '"$@"', "sh", *program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warnings, whole, partial = map(int, done.stdout.split())
    assert partial == 0
    assert (warnings, whole == N_SHARDS) == ((0, True) if pages == 40 else (1, False))
