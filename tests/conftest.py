"""What every test gets: a cache folder of its own, and the proof that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path

import obstore
import psutil
import pytest
from feeder_in_thread import use_feeders_in_threads
from fsspec.asyn import get_loop
from hypothesis import settings
from make_shards import write_numbers
from obstore.store import MemoryStore
from preloaded import Preloaded
from ray_cluster import LocalRayCluster, ray_cluster
from servers.nginx import WebServer, serve_http
from servers.rclone import S3Server, serve_s3

_WAIT_S = 20.0
"""Against what stays only: on a busy machine anything may take seconds."""


def pytest_configure(config: pytest.Config) -> None:
    """A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("exhaustive", max_examples=200)
    settings.register_profile("usual", max_examples=15)
    settings.load_profile("usual" if config.option.markexpr else "exhaustive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on a Ray cluster come first, so that one process has all of them and one cluster serves a module."""
    items.sort(key=lambda item: "cluster" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """What importing has made stays: garbage collections, of which tests ask for many, need not look at it."""
    gc.freeze()


def _descriptors() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor that listed them
            continue
        if target.startswith(("socket:", "/memfd:", "anon_inode:", "pipe:")) or "/pytest-of-" in target:
            found.add(f"descriptor {number} -> {target}")
    return found


@pytest.fixture(scope="session")
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where temporary files go, of programs that tests start too; not among those of tests that run beside these."""
    resource_tracker.ensure_running()  # Python's own; it lives as long as a process that has started others
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield folder


def _inventory(temporary_folder: str) -> set[str]:
    """Processes are all of the machine: whose they are takes much longer, and is asked only of new ones, in `_ours`."""
    folders = [temporary_folder, *(["/dev/shm"] if os.path.isdir("/dev/shm") else [])]
    return {
        *(f"process {pid}" for pid in psutil.pids()),
        *(f"thread {thread.name}" for thread in threading.enumerate() if not thread.name.startswith("fsspec")),
        *_descriptors(),
        *(f"{folder}/{name}" for folder in folders for name in os.listdir(folder)),
    }


def _ours(name: str) -> bool:
    """Other programs share the machine and its shared memory; libraries have temporary files of their own.

    streamload never names shared memory; torch's names for it hold the process that made it.
    """
    if name.startswith("process "):
        return _is_descendant(int(name.removeprefix("process ")))
    if name.startswith(("thread ", "descriptor ")):
        return True
    return "streamload" in os.path.basename(name) or name.startswith(f"/dev/shm/torch_{os.getpid()}_")


def _is_descendant(pid: int) -> bool:
    try:
        return psutil.Process() in psutil.Process(pid).parents()
    except psutil.NoSuchProcess:  # it has ended
        return False


@pytest.fixture(autouse=True)
def nothing_left_behind(own_temporary_folder: str) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor, shared memory or temporary file."""
    before = _inventory(own_temporary_folder)
    yield
    deadline = time.monotonic() + _WAIT_S
    while left := {name for name in _inventory(own_temporary_folder) - before if _ours(name)}:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(left)))
        gc.collect()
        MemoryStore()  # what obstore's threads have released is freed with the next call into it only
        time.sleep(0.02)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two shards with 60 numbers, which no test changes; modules that need others have a fixture of this name."""
    return write_numbers(tmp_path_factory.mktemp("numbers") / "shards", [25, 35])


@pytest.fixture
def shard_folder(tmp_path: Path) -> Path:
    """An empty folder for shards."""
    folder = tmp_path / "shards"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """No test shows what a crash of the machine leaves, and writing small shards is mostly waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def runtimes() -> None:
    """Start what obstore and fsspec start once for a process and keep, so that no test seems to leave it behind."""

    async def put() -> None:
        await obstore.put_async(MemoryStore(), "a", b"")

    obstore.put(MemoryStore(), "a", b"")
    asyncio.run(put())
    get_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="fsspec"))


@pytest.fixture(scope="session")
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with keys for the whole session; make a folder in its folder for a bucket."""
    folder = tmp_path_factory.mktemp("s3") / "buckets"
    folder.mkdir()
    with serve_s3(folder) as server:
        yield server


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """A web server for the whole session over an empty folder."""
    folder = tmp_path_factory.mktemp("web") / "root"
    folder.mkdir()
    with serve_http(folder) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalRayCluster]:
    """A Ray cluster: a head without processors and two nodes with two each; no test kills its nodes."""
    with ray_cluster({"a": 2, "b": 2}) as running:
        yield running


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Where programs that import torch start from, for the whole session."""
    started = Preloaded()
    yield started
    started.close()


@pytest.fixture
def feeders_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is read: a feeder's process imports for longer than they read. Those with workers have one."""
    use_feeders_in_threads(monkeypatch)
