"""What storages say of shards that no listing tells of, asked for many shards at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from streamload.storage.protocol import ShardInfo
from streamload.storage.storages import Storages

__all__ = ["Looks", "look_at"]

_LOOKS_AT_ONCE = 16
"""How many shards a storage is asked about at a time."""


def look_at(urls: Sequence[str], storages: Storages) -> dict[str, int]:
    """The size of each shard in bytes, by a request for each of them, many at once. It blocks.

    Raises:
        ShardNotFoundError, StorageError: one of them cannot be looked at; of several, the first of `urls`.
    """
    with Looks(storages, urls) as looks:
        return {url: looks.info(url).bytes for url in urls}


class Looks:
    """Requests about shards, one for each, at most 16 at a time; all of them begin with the `with` block.

    The block's end waits for those that are in flight, and drops the others.

    Args:
        storages: where the shards lie.
        urls: the shards, in the order in which they are asked about.
    """

    def __init__(self, storages: Storages, urls: Iterable[str]) -> None:
        self._storages = storages
        self._urls = urls
        self._answers: dict[str, Future[ShardInfo]] = {}

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(_LOOKS_AT_ONCE, "streamload-look")
        self._answers = {url: self._threads.submit(self._look, url) for url in self._urls}
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def info(self, url: str) -> ShardInfo:
        """What the storage says of one of the shards; it blocks. Raises what `Storage.info` raises."""
        return self._answers[url].result()

    def _look(self, url: str) -> ShardInfo:
        return self._storages.for_url(url).info(url)
