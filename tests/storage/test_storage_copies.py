"""`simplecache::` before a url: files are copied whole, and no copy outlives those who read it."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import get_loop
from fsspec.implementations.cached import SimpleCacheFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from make_shards import write_numbers
from servers.faults import FaultServer, Script

from streamload import StreamLoader
from streamload.errors import ShardChangedError, StorageError, WorkerError
from streamload.storage import whole_copies
from streamload.storage.download import Pin, download
from streamload.storage.retry_policy import Retries, RetryPolicy
from streamload.storage.storages import Storages

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def loop_of_fsspec() -> None:
    """It stays, on a thread of its own, from the first filesystem on that needs it."""
    get_loop()


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


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """A filesystem that is called on threads."""
    memory = fsspec.filesystem("memory")
    memory.mkdir("/copied")
    yield memory
    memory.rm("/copied", recursive=True)


async def fetched(url: str, parts: int, policy: RetryPolicy | None = None, **options: Any) -> bytes:
    """A file, by parts that are requested together."""
    storages = Storages(options, retries=Retries(policy))
    try:
        return await fetched_by(storages, url, parts)
    finally:
        await storages.aclose()


async def fetched_by(storages: Storages, url: str, parts: int = 1) -> bytes:
    storage = storages.for_url(url)
    size_bytes = (await asyncio.to_thread(storage.info, url)).bytes
    content, step = bytearray(size_bytes), -(-size_bytes // parts)

    def write(offset: int, piece: bytes) -> None:
        content[offset : offset + len(piece)] = piece

    pin, retries = Pin(), storages.retries
    async with asyncio.TaskGroup() as group:
        for start in range(0, size_bytes, step):
            group.create_task(download(storage, url, start, start + step, write, pin=pin, retries=retries))
    return bytes(content)


def copies_in(folder: Path) -> list[int]:
    """The sizes of the files without a name that this process has open in a folder."""
    sizes = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # a thread may have closed it since
            link = f"/proc/self/fd/{number}"
            if os.readlink(link).startswith(f"{folder}/"):
                sizes.append(os.stat(link).st_size)
    return sizes


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


def test_of_any_filesystem(memory: MemoryFileSystem) -> None:
    content = os.urandom(3 * MIB)
    memory.pipe_file("/copied/a.tar", content)
    assert asyncio.run(fetched("simplecache::memory://copied/a.tar", 5)) == content


def test_a_copy_that_is_short_is_made_again(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a filesystem that takes the end of a connection for the end of a file."""
    content, given = os.urandom(MIB), [MIB // 2]

    def get_file(memory: MemoryFileSystem, path: str, target: str) -> None:
        Path(target).write_bytes(content[: given.pop() if given else None])

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    memory.pipe_file("/copied/a.tar", content)
    assert asyncio.run(fetched("simplecache::memory://copied/a.tar", 1)) == content


def test_an_object_is_copied_by_one_answer_that_is_checked() -> None:
    """s3fs copies what is larger than a block by ranges, whose lengths it does not check."""
    content = os.urandom(3 * MIB)
    options = {"key": "k", "secret": "s", "default_block_size": MIB}
    with FaultServer({"b/a.tar": content}, Script(seed=1, short_share=0.6)) as server:
        s3 = {**options, "endpoint_url": server.url}
        assert asyncio.run(fetched("simplecache::s3://b/a.tar", 4, s3=s3)) == content
        ranges = [requested for method, _, requested in server.report().log if method == "GET"]
    assert len(ranges) > 1
    assert set(ranges) == {"bytes=0-"}


def test_a_copy_that_always_breaks_off_is_given_up() -> None:
    """What an earlier copy had too is no progress."""
    policy = RetryPolicy(stall_timeout_s=2.0, tries=3)
    script = Script(cut_share=1.0, cut_at=MIB // 2, bytes_per_s=MIB, whole_share=1.0)
    with FaultServer({"a.tar": bytes(MIB)}, script) as server:
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(asyncio.wait_for(fetched(f"simplecache::{server.url}/a.tar", 1, policy), 60))
        assert sum(method == "GET" for method, _, _ in server.report().log) == 3
    assert caught.group_contains(StorageError, match="3 copies in a row had no more than 524,288 of 1,048,576 bytes")


def test_copies_of_which_no_byte_comes_are_given_up_for_what_has_ended_them(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_file(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    memory.pipe_file("/copied/a.tar", b"12345")
    policy = RetryPolicy(stall_timeout_s=0.4, give_up_timeout_s=2.0)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fetched("simplecache::memory://copied/a.tar", 1, policy))
    assert caught.group_contains(StorageError, match="copies in a row had no more than 0 of 5 bytes, .*broke off")


def test_a_copy_that_hangs_is_given_up(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def get_file(memory: MemoryFileSystem, path: str, target: str) -> None:
        Path(target).write_bytes(b"123")
        released.wait(60)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    memory.pipe_file("/copied/a.tar", b"12345")
    policy = RetryPolicy(stall_timeout_s=0.4, give_up_timeout_s=2)
    try:
        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(fetched("simplecache::memory://copied/a.tar", 1, policy))
        assert caught.group_contains(StorageError, match=r"requests in a row .*0\.4 s")
    finally:
        released.set()
        wait_for_copying_threads()


def wait_for_copying_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "streamload-copy":
            thread.join()


HANGING = """
import asyncio, threading
import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from streamload.storage.storages import Storages

MemoryFileSystem.get_file = lambda *_: threading.Event().wait(600)
fsspec.filesystem("memory").pipe_file("/copied/a.tar", b"12345")

async def ask():
    storages, url = Storages(), "simplecache::memory://copied/a.tar"
    body = await storages.for_url(url).open_range(url, 0, 5, etag=None)
    try:
        async with asyncio.timeout(1):
            await anext(body.chunks())
    except TimeoutError:
        await storages.aclose()

asyncio.run(ask())
"""


def test_a_copy_that_hangs_does_not_keep_a_program_from_its_end() -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)


async def test_copies_leave_a_connection_to_ask_for_the_next_file() -> None:
    """More of them than botocore has connections by default."""
    files = {f"b/{number}.tar": bytes(MIB) for number in range(12)}
    with FaultServer(files, Script(bytes_per_s=MIB / 60)) as server:
        storages = Storages({"s3": {"key": "k", "secret": "s", "endpoint_url": server.url}})
        try:
            for number in range(12):
                url = f"simplecache::s3://b/{number}.tar"
                await storages.for_url(url).open_range(url, 0, MIB, etag=None)
                while sum(method == "GET" for method, _, _ in server.report().log) <= number:
                    await asyncio.sleep(0.01)
            assert len(server.report().spans) == 12  # of the answers about the files: no file has come
        finally:
            await storages.aclose()


async def test_a_copy_that_fails_leaves_no_file_to_the_next_one(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, temporary_folder: Path
) -> None:
    """Nor does one that gets further each time end: two in a row that do not would."""
    get_file, calls = MemoryFileSystem.get_file, []

    def broken(memory: MemoryFileSystem, path: str, target: str) -> None:
        calls.append(path)
        deadline = time.monotonic() + 30
        while len(copies_in(temporary_folder)) > 1:  # the thread of the copy before may be about to end
            assert time.monotonic() < deadline, "more files than the one to copy to"
            time.sleep(0.01)
        if len(calls) == 6:
            get_file(memory, path, target)
            return
        Path(target).write_bytes(bytes(len(calls)))
        raise ConnectionError

    monkeypatch.setattr(MemoryFileSystem, "get_file", broken)
    memory.pipe_file("/copied/a.tar", b"1234567")
    storages = Storages(retries=Retries(RetryPolicy(tries=2, first_backoff_s=0.0)))
    gc.disable()
    try:
        assert await fetched_by(storages, "simplecache::memory://copied/a.tar") == b"1234567"
        assert len(calls) == 6
    finally:
        gc.enable()
        await storages.aclose()


async def test_a_copy_that_fails_takes_no_room_until_it_is_made_again(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, temporary_folder: Path
) -> None:
    failed = threading.Event()

    def broken(memory: MemoryFileSystem, path: str, target: str) -> None:
        failed.set()
        raise ConnectionError

    monkeypatch.setattr(MemoryFileSystem, "get_file", broken)
    memory.pipe_file("/copied/a.tar", b"1234567")
    url, storages = "simplecache::memory://copied/a.tar", Storages(retries=Retries(RetryPolicy(first_backoff_s=600.0)))
    try:
        await storages.for_url(url).open_range(url, 0, 5, etag=None)
        async with asyncio.timeout(60):
            while not failed.is_set() or copies_in(temporary_folder):
                await asyncio.sleep(0.01)
    finally:
        await storages.aclose()


async def test_copies_take_no_threads_from_those_who_read(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, get_file = threading.Event(), MemoryFileSystem.get_file

    def blocked(memory: MemoryFileSystem, path: str, target: str) -> None:
        assert "a.tar" in path or released.wait(60)
        get_file(memory, path, target)

    monkeypatch.setattr(MemoryFileSystem, "get_file", blocked)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    storages, urls = Storages(), [f"simplecache::memory://copied/{name}.tar" for name in "abcd"]
    try:
        for name in "abcd":
            memory.pipe_file(f"/copied/{name}.tar", b"12345")
        await fetched_by(storages, urls[0])
        others = [asyncio.create_task(fetched_by(storages, url)) for url in urls[1:]]
        await asyncio.sleep(0.2)  # they copy
        async with asyncio.timeout(30):
            assert await fetched_by(storages, urls[0]) == b"12345"
        released.set()
        assert await asyncio.gather(*others) == [b"12345"] * 3
    finally:
        released.set()
        await storages.aclose()


async def test_a_copy_that_waits_for_its_turn_gets_on_with_the_others(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, get_file, running = threading.Event(), MemoryFileSystem.get_file, []

    def slow(memory: MemoryFileSystem, path: str, target: str) -> None:
        running.append(path)
        while not released.wait(0.01) and "a.tar" in path:
            with open(target, "ab") as file:
                file.write(b"1")
        get_file(memory, path, target)

    monkeypatch.setattr(MemoryFileSystem, "get_file", slow)
    monkeypatch.setattr(whole_copies, "SMALL_REQUESTS", 1)
    storages = Storages()
    try:
        bodies = []
        for name in "ab":
            memory.pipe_file(f"/copied/{name}.tar", b"12345")
            url = f"simplecache::memory://copied/{name}.tar"
            bodies.append(await storages.for_url(url).open_range(url, 0, 5, etag=None))
        pieces = bodies[1].chunks()
        async with asyncio.timeout(60):
            assert await anext(pieces) == b""
            assert running == ["/copied/a.tar"]
            released.set()
            assert b"".join([piece async for piece in pieces]) == b"12345"
    finally:
        released.set()
        await storages.aclose()


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


async def test_a_copy_that_is_abandoned_while_threads_are_busy_leaves_no_descriptor(
    temporary_folder: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/copied/a.tar", b"12345")
    url, storages, released = "simplecache::memory://copied/a.tar", Storages(), threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    await fetched_by(storages, url)  # its version is known for a while
    await storages.aclose()
    busy = loop.run_in_executor(None, released.wait, 60)
    await storages.for_url(url).open_range(url, 0, 5, etag=None)
    await asyncio.sleep(0.1)
    await storages.aclose()
    released.set()
    await busy
    gc.collect()
    assert copies_in(temporary_folder) == []


def test_a_copy_stays_open_while_a_thread_writes_it(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()

    def slow(piece: bytes) -> memoryview:
        begun.set()
        released.wait(60)
        return memoryview(piece)

    monkeypatch.setattr(whole_copies, "memoryview", slow, raising=False)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(whole_copies.UnnamedFile().write, b"12345")
        begun.wait(60)
        open_then = copies_in(temporary_folder)
        released.set()
        writing.result()
    assert open_then == [0]
    assert copies_in(temporary_folder) == []


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_temporary_folder_is_named(
    temporary_folder: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "get_file", failing(errno.ENOSPC))
    memory.pipe_file("/copied/a.tar", b"12345")
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fetched("simplecache::memory://copied/a.tar", 1))
    assert caught.group_contains(StorageError, match=f"temporary folder {temporary_folder} has no room for .*TMPDIR")


def test_a_copy_that_is_cut_by_a_full_disk_in_its_last_piece_is_no_short_answer(temporary_folder: Path) -> None:
    with FaultServer({"a.tar": os.urandom(300_000)}, Script(whole_share=1.0)) as server:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (299_000, hard))
        try:
            with pytest.raises(ExceptionGroup) as caught:
                asyncio.run(fetched(f"simplecache::{server.url}/a.tar", 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sum(method == "GET" for method, _, _ in server.report().log) == 1
    assert caught.group_contains(StorageError, match=f"temporary folder {temporary_folder} has no room for .*TMPDIR")


async def test_a_folder_that_stays_full_is_not_blamed_on_the_network(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def get_file(memory: MemoryFileSystem, path: str, target: str) -> None:
        failing(errno.ENOSPC)() if "a.tar" in path else released.wait(60)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    storages = Storages(retries=Retries(RetryPolicy(tries=2)))
    try:
        for name in "ab":
            memory.pipe_file(f"/copied/{name}.tar", b"12345")
        other = "simplecache::memory://copied/b.tar"
        await storages.for_url(other).open_range(other, 0, 5, etag=None)  # may leave room when it is done
        with pytest.raises(ExceptionGroup) as caught:
            await fetched_by(storages, "simplecache::memory://copied/a.tar")
        (error,) = caught.value.exceptions
        assert "2 copies in a row" in str(error)
        assert "TMPDIR names another one" in str(error)
        assert "network" not in str(error)
    finally:
        released.set()
        await storages.aclose()
        await asyncio.to_thread(wait_for_copying_threads)


async def test_old_copies_go_where_the_temporary_folder_is_full(
    temporary_folder: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_file = MemoryFileSystem.get_file

    def get_within_room(memory: MemoryFileSystem, path: str, target: str) -> None:
        if sum(copies_in(temporary_folder)) >= 2 * 1000:
            failing(errno.ENOSPC)()
        get_file(memory, path, target)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_within_room)
    storages = Storages()
    try:
        for number in range(5):
            memory.pipe_file(f"/copied/{number}.tar", bytes(1000))
            assert await fetched_by(storages, f"simplecache::memory://copied/{number}.tar") == bytes(1000)
        assert copies_in(temporary_folder) == [1000, 1000]
    finally:
        await storages.aclose()


async def test_copies_take_a_share_of_the_descriptors_that_a_process_may_have(
    temporary_folder: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_copies, "descriptor_limit", lambda: 64)
    storages = Storages()
    try:
        for number in range(20):
            memory.pipe_file(f"/copied/{number}.tar", b"12345")
            await fetched_by(storages, f"simplecache::memory://copied/{number}.tar")
        assert len(copies_in(temporary_folder)) <= 64 // 8
    finally:
        await storages.aclose()


def test_a_temporary_folder_that_cannot_be_used_is_named(
    tmp_path: Path, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/copied/a.tar", b"12345")
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/missing")
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fetched("simplecache::memory://copied/a.tar", 1))
    (error,) = caught.value.exceptions
    assert type(error) is StorageError
    assert f"temporary folder {tmp_path}/missing (No such file or directory); TMPDIR" in str(error)


def test_no_temporary_folder_is_called_by_no_name(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe_file("/copied/a.tar", b"12345")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/missing"])
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fetched("simplecache::memory://copied/a.tar", 1))
    assert caught.group_contains(StorageError, match=r"temporary folder \(No usable .*'/missing'\]\); TMPDIR names")


def test_a_copy_beyond_the_limit_of_open_files_names_that(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/copied/a.tar", b"12345")
    monkeypatch.setattr(tempfile, "TemporaryFile", failing(errno.EMFILE))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fetched("simplecache::memory://copied/a.tar", 1))
    assert caught.group_contains(WorkerError, match="too many open files")


def test_the_copies_have_no_name(tmp_path: Path, temporary_folder: Path) -> None:
    write_numbers(tmp_path / "data", [20, 10], index=False)
    with FaultServer(tmp_path / "data", Script(whole_share=1.0)) as server:
        urls = f"simplecache::{server.url}/part{{000..001}}-000000.tar"
        with StreamLoader(urls, 5, shuffle=False, fields=("cls",), num_workers=1) as loader:
            for batches in (loader, loader):
                assert [label for (batch,) in batches for label in batch.tolist()] == list(range(30))
                assert list(temporary_folder.iterdir()) == []


def test_a_signed_url_is_copied(tmp_path: Path) -> None:
    """What follows its question mark is neither a pattern nor part of the name."""
    write_numbers(tmp_path / "data", [20], index=False)
    with FaultServer(tmp_path / "data", Script(whole_share=1.0)) as server:
        assert labels(f"simplecache::{server.url}/part000-000000.tar?X-Amz-Signature=a[1]") == list(range(20))


def test_a_denial_of_a_web_server_is_explained_as_one() -> None:
    with FaultServer({"a.tar": bytes(1024)}, Script(status=403, status_share=1.0)) as server:
        with pytest.raises(StorageError, match="https://USER:PASSWORD@HOST/"):
            labels(f"simplecache::{server.url}/a.tar")


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
    with pytest.raises(ValueError, match="only a leading simplecache:: is accepted, .* cache_dir keeps"):
        StreamLoader(url, 5)


@pytest.mark.parametrize("options", [{"simplecache": {"cache_storage": "/kept"}}, {"cache_storage": "/kept"}])
def test_options_for_copies_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="storage_options for simplecache:: .* cache_dir keeps"):
        StreamLoader("simplecache::http://h/a.tar", 5, storage_options=options)


@pytest.mark.parametrize("behind", [False, True])
def test_a_cache_as_filesystem_or_behind_it_is_refused(tmp_path: Path, behind: bool) -> None:
    cache = SimpleCacheFileSystem(fs=fsspec.filesystem("memory"), cache_storage=str(tmp_path))
    with pytest.raises(ValueError, match="SimpleCacheFileSystem keeps copies .*`.fs`.* cache_dir"):
        StreamLoader("a.tar", 5, filesystem=DirFileSystem("/copied", cache) if behind else cache)
