"""Storages are requested about many shards at once where no listing has their sizes, but not about too many."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from threading import Barrier, Event, Lock
from typing import Any

import pytest
from nobody import Nobody

from streamload.errors import ShardNotFoundError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.part_fetching import PartFetcher
from streamload.fetch.parts import PART_BYTES
from streamload.index.finder import Finder, look_at
from streamload.storage.download import Pin
from streamload.storage.filesystem_storage import ReadBody
from streamload.storage.protocol import ShardInfo
from streamload.storage.storages import Storages

DEADLINE_S = 20.0
AT_ONCE = 16


class MeetingStorages(Storages):
    """Answers only when 16 requests are there; tells of each, and how many were there at once."""

    def __init__(self, answer: Callable[[str], ShardInfo]) -> None:
        super().__init__()
        self.answer = answer
        self.requested: Counter[str] = Counter()
        self.most_beside = 0
        self._here = 0
        self._mutex = Lock()
        self._one_more = Event()
        self._all_here = Barrier(AT_ONCE, action=lambda: self._one_more.wait(0.05))  # it would be here by then

    def for_url(self, url: str) -> Any:
        return self

    def absolute(self, url: str) -> str:
        return url

    def info(self, url: str) -> ShardInfo:
        with self._mutex:
            self.requested[url] += 1
            self._here += 1
            self.most_beside = max(self.most_beside, self._here)
            if self._here > AT_ONCE:
                self._one_more.set()
        try:
            self._all_here.wait(DEADLINE_S)
            return self.answer(url)
        finally:
            with self._mutex:
                self._here -= 1


class MeetingRequests(Storages):
    """The same for the first bytes of shards, in a loop; other ranges are never answered."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: Counter[str] = Counter()
        self.most_beside = 0
        self._here = 0
        self._all_here = asyncio.Event()

    def for_url(self, url: str) -> Any:
        return self

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> Any:
        if (start, end) != (0, 1):
            await asyncio.Event().wait()
        self.requested[url] += 1
        self._here += 1
        self.most_beside = max(self.most_beside, self._here)
        all_here = self._all_here
        if self._here == AT_ONCE:
            self._all_here = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05, all_here.set)  # one more would be here by then
        await all_here.wait()
        self._here -= 1
        return ReadBody(b"x", 2 * PART_BYTES, None)


def numbered(url: str) -> ShardInfo:
    """A shard as large as the number in its url says."""
    return ShardInfo(url, int(url.rpartition("-")[2].removesuffix(".tar")), 0)


URLS = [f"s3://bucket-{number}/a-{number}.tar" for number in range(2 * AT_ONCE)]


@pytest.mark.parametrize("named_alone", [False, True])
def test_shards_are_requested_together(*, named_alone: bool) -> None:
    storages = MeetingStorages(numbered)
    if named_alone:
        found = [(info.url, info.bytes) for info in Finder(storages, None).find(URLS)]
    else:
        found = [*look_at(URLS, storages).items()]
    assert found == [(url, number) for number, url in enumerate(URLS)]
    assert storages.most_beside == AT_ONCE
    assert storages.requested == Counter(URLS)


@pytest.mark.parametrize("named_alone", [False, True])
def test_the_first_missing_shard_is_named_whichever_answer_comes_first(*, named_alone: bool) -> None:
    told = Barrier(2)

    def answer(url: str) -> ShardInfo:
        if url in (URLS[3], URLS[5]):
            if url == URLS[3]:
                told.wait(DEADLINE_S)
            try:
                raise ShardNotFoundError("there is none", url=url)
            finally:
                if url == URLS[5]:
                    told.wait(DEADLINE_S)
        return numbered(url)

    storages = MeetingStorages(answer)
    with pytest.raises(ShardNotFoundError) as caught:
        if named_alone:
            Finder(storages, None).find(URLS[:AT_ONCE])
        else:
            look_at(URLS[:AT_ONCE], storages)
    assert caught.value.url == URLS[3]


def test_the_disk_cache_requests_shards_together_and_each_once(tmp_path: Any) -> None:
    async def run() -> MeetingRequests:
        storages = MeetingRequests()
        cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
        states = [FetchedShard(number, url, Pin(), None, 0, None) for number, url in enumerate(URLS)]
        part_fetcher = PartFetcher(storages, cache, lambda _: -1, Nobody(states))
        try:
            for state in states:
                for part in (0, 1):
                    part_fetcher.fetch(state, part)
            async with asyncio.timeout(DEADLINE_S):
                while not all(state.looked_up for state in states):
                    await asyncio.sleep(0.001)
        finally:
            await part_fetcher.close()
        return storages

    storages = asyncio.run(run())
    assert storages.most_beside == AT_ONCE
    assert storages.requested == Counter(URLS)
