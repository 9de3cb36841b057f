"""The sizes of shards that no listing tells."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from streamload.fetch.storage.storages import Storages

__all__ = ["look_at"]

_LOOKS_AT_ONCE = 32


def look_at(urls: Sequence[str], storages: Storages) -> dict[str, int]:
    """The size of each shard in bytes, by a request for each of them, many at once. It blocks.

    Raises:
        ShardNotFoundError, StorageError: one of them cannot be looked at.
    """
    with ThreadPoolExecutor(_LOOKS_AT_ONCE, "streamload-look") as threads:
        found = threads.map(lambda url: storages.for_url(url).info(url).bytes, urls)
        return dict(zip(urls, found, strict=True))
