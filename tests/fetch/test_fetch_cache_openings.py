"""Opening files of the disk cache from a loop: whoever is cancelled meanwhile leaves nothing open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from nobody import Nobody

from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.openings import CacheOpenings
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.part_fetching import PartFetcher
from streamload.fetch.parts import PART_BYTES
from streamload.storage.download import Pin
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of

DEADLINE_S = 20.0
SIZE_BYTES = 2 * PART_BYTES
URL = "s3://bucket/a.tar"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="it counts descriptors")


class TellingCache(DiskCache):
    """Tells when it has opened a file, before it is given to whoever asked."""

    def __init__(self, folder: Path, opened: Callable[[], object]) -> None:
        super().__init__(str(folder), 4 * SIZE_BYTES, part_bytes=PART_BYTES)
        self.opened = opened

    def open(self, identity: ShardIdentity, *, concurrently: bool = False) -> CacheFile | None:
        file = super().open(identity, concurrently=concurrently)
        assert file is not None
        self.opened()
        return file


def files_open_in(folder: Path) -> list[str]:
    """The files in a folder that this process has open."""
    paths = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    found = [os.readlink(path) for path in paths if path.is_symlink()]
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize("turns", range(6))
async def test_an_opening_that_is_cancelled_as_the_file_is_open_closes_it(tmp_path: Path, turns: int) -> None:
    """At each of the loop's turns between the opening on a thread and its arrival."""

    async def run() -> bool:
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        loop.set_default_executor(threads)

        def is_open() -> None:
            threads.submit(int).result(DEADLINE_S)  # what opened it has told the loop
            cancel(turns)

        def cancel(turns: int) -> None:
            if turns:
                loop.call_soon(cancel, turns - 1)
            else:
                opening.cancel()

        cache = TellingCache(tmp_path, lambda: loop.call_soon_threadsafe(is_open))
        opening = asyncio.create_task(CacheOpenings(cache, Storages()).open(URL, Pin(SIZE_BYTES, '"1"')))
        await asyncio.wait((opening,), timeout=DEADLINE_S)
        if not opening.cancelled():
            file = opening.result()
            assert file is not None
            file.close()
        left = files_open_in(tmp_path)
        assert left == []
        return opening.cancelled()

    assert await run() == (turns < 3)


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
async def test_a_bringer_that_is_closed_as_a_file_is_opened_leaves_none_open(tmp_path: Path, name: str) -> None:
    loop, opened, go_on = asyncio.get_running_loop(), asyncio.Event(), Event()

    def wait() -> None:
        loop.call_soon_threadsafe(opened.set)
        assert go_on.wait(DEADLINE_S)

    cache = TellingCache(tmp_path, wait)
    url = f"s3://bucket/{name}"
    state = FetchedShard(0, url, Pin(SIZE_BYTES, '"1"'), compression_of(url), 0, SIZE_BYTES)
    part_fetcher = PartFetcher(Storages(), cache, lambda _: -1, Nobody([state]))
    part_fetcher.fetch(state, 0)
    async with asyncio.timeout(DEADLINE_S):
        await opened.wait()
        closing = asyncio.create_task(part_fetcher.close())
        await asyncio.sleep(0)
        assert files_open_in(tmp_path)
        go_on.set()
        await closing
    left = files_open_in(tmp_path)
    state.close()
    assert left == []
