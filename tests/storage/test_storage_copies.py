"""`simplecache::` before a url: files are copied whole, each once, and no copy outlives those who read it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.cached import SimpleCacheFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from make_shards import write_numbers
from servers.faults import FaultServer, Script

from streamload import StreamLoader
from streamload.errors import ShardChangedError, StorageError
from streamload.storage.download import Pin, download
from streamload.storage.retry_policy import Retries, RetryPolicy
from streamload.storage.storages import Storages

MIB = 1 << 20


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder for this process and those that it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def labels(url: str, **options: Any) -> list[int]:
    with StreamLoader(url, 5, shuffle=False, fields=("cls",), num_workers=1, **options) as loader:
        return [label for (batch,) in loader for label in batch.tolist()]


async def fetched(url: str, parts: int, policy: RetryPolicy | None = None) -> bytes:
    """A file, by parts that are requested together."""
    storages = Storages()
    storage = storages.for_url(url)
    size_bytes = (await asyncio.to_thread(storage.info, url)).bytes
    content, step = bytearray(size_bytes), -(-size_bytes // parts)

    def write(offset: int, piece: bytes) -> None:
        content[offset : offset + len(piece)] = piece

    pin, retries = Pin(), Retries(policy)
    try:
        async with asyncio.TaskGroup() as group:
            for start in range(0, size_bytes, step):
                group.create_task(download(storage, url, start, start + step, write, pin=pin, retries=retries))
    finally:
        await storages.aclose()
    return bytes(content)


@pytest.mark.parametrize("seed", range(4))
def test_parts_that_are_requested_together_are_of_one_copy(seed: int) -> None:
    """With a copy for each, a late one would empty the file under those who read the first one."""
    content = os.urandom(6 * MIB)
    with FaultServer({"a.tar": content}, Script(seed=seed, sleep_share=0.5, sleep_s=0.3, whole_share=1.0)) as server:
        assert asyncio.run(fetched(f"simplecache::{server.url}/a.tar", 8)) == content
        assert sum(method == "GET" for method, _, _ in server.report().log) == 1


def test_a_copy_that_breaks_off_is_made_again() -> None:
    content = os.urandom(3 * MIB)
    with FaultServer({"a.tar": content}, Script(seed=1, cut_share=0.6, whole_share=1.0)) as server:
        assert asyncio.run(fetched(f"simplecache::{server.url}/a.tar", 4)) == content
        assert sum(method == "GET" for method, _, _ in server.report().log) > 1


def test_a_file_that_takes_longer_than_a_stall_may_is_waited_for_as_long_as_it_arrives() -> None:
    content = bytes(3 * MIB)
    policy = RetryPolicy(stall_timeout_s=2.0, give_up_timeout_s=2.5)
    with FaultServer({"a.tar": content}, Script(bytes_per_s=0.75 * MIB, whole_share=1.0)) as server:
        assert asyncio.run(fetched(f"simplecache::{server.url}/a.tar", 3, policy)) == content
        assert sum(method == "GET" for method, _, _ in server.report().log) == 1


def test_a_file_that_changes_while_it_is_copied_is_refused() -> None:
    with FaultServer({"a.tar": os.urandom(MIB)}, Script(swap_at=0, whole_share=1.0)) as server:
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(fetched(f"simplecache::{server.url}/a.tar", 2))
    assert caught.group_contains(ShardChangedError)


def test_of_any_filesystem() -> None:
    content = os.urandom(3 * MIB)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/copied/a.tar", content)
    assert asyncio.run(fetched("simplecache::memory://copied/a.tar", 5)) == content
    memory.rm("/copied", recursive=True)


def test_a_copy_that_is_short_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a filesystem that takes the end of a connection for the end of a file."""
    content, given = os.urandom(MIB), [MIB // 2]

    def get_file(memory: MemoryFileSystem, path: str, target: str) -> None:
        Path(target).write_bytes(content[: given.pop() if given else None])

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/copied/a.tar", content)
    assert asyncio.run(fetched("simplecache::memory://copied/a.tar", 1)) == content
    memory.rm("/copied", recursive=True)


def test_a_copy_that_is_abandoned_at_once_leaves_no_descriptor() -> None:
    async def ask(url: str) -> None:
        storages = Storages()
        await storages.for_url(url).open_range(url, 0, 10, etag=None)
        await storages.aclose()

    with FaultServer({"a.tar": bytes(MIB)}, Script(whole_share=1.0)) as server:
        asyncio.run(ask(f"simplecache::{server.url}/a.tar"))
        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(ask(f"simplecache::{server.url}/a.tar"))
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_temporary_folder_is_named(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_file(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/copied/a.tar", b"12345")
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fetched("simplecache::memory://copied/a.tar", 1))
    memory.rm("/copied", recursive=True)
    assert caught.group_contains(StorageError, match=f"no room in the temporary folder {temporary_folder}.*TMPDIR")


def test_the_copies_have_no_name(tmp_path: Path, temporary_folder: Path) -> None:
    write_numbers(tmp_path / "data", [20, 10], index=False)
    with FaultServer(tmp_path / "data", Script(whole_share=1.0)) as server:
        urls = f"simplecache::{server.url}/part{{000..001}}-000000.tar"
        with StreamLoader(urls, 5, shuffle=False, fields=("cls",), num_workers=1) as loader:
            for batches in (loader, loader):
                assert [label for (batch,) in batches for label in batch.tolist()] == list(range(30))
                assert list(temporary_folder.iterdir()) == []


PROGRAM = """
import sys
from streamload import StreamLoader

with StreamLoader(sys.argv[1], 5, fields=("cls",), num_workers=1) as loader:
    for _ in loader:
        print("a batch", flush=True)
"""


def test_nothing_is_left_of_a_program_that_is_killed_while_it_copies(tmp_path: Path, temporary_folder: Path) -> None:
    write_numbers(tmp_path / "data", [20, 10], index=False, width=MIB // 8)
    script = Script(bytes_per_s=2 * MIB, whole_share=1.0)
    with FaultServer(tmp_path / "data", script) as server:
        url = f"simplecache::{server.url}/part{{000..001}}-000000.tar"
        with subprocess.Popen([sys.executable, "-c", PROGRAM, url], start_new_session=True) as program:
            while server.report().sent_bytes < MIB // 2:
                assert program.poll() is None
            os.killpg(program.pid, signal.SIGKILL)
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "filecache::http://h/a.tar",
        "blockcache::http://h/a.tar",
        "simplecache::simplecache::http://h/a.tar",
        "zip://a.tar::simplecache::http://h/a.zip",
    ],
)
def test_other_caches_of_fsspec_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="only simplecache:: before everything else .* cache_dir keeps"):
        StreamLoader(url, 5)


@pytest.mark.parametrize("options", [{"simplecache": {"cache_storage": "/kept"}}, {"cache_storage": "/kept"}])
def test_options_for_copies_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="storage_options for simplecache:: .* cache_dir keeps"):
        StreamLoader("simplecache::http://h/a.tar", 5, storage_options=options)


def test_a_cache_as_filesystem_is_refused(tmp_path: Path) -> None:
    cache = SimpleCacheFileSystem(fs=fsspec.filesystem("memory"), cache_storage=str(tmp_path))
    with pytest.raises(ValueError, match="SimpleCacheFileSystem keeps copies .*`.fs`.* cache_dir"):
        StreamLoader("a.tar", 5, filesystem=cache)
