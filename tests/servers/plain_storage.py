"""Ranges over plain HTTP with obstore, without its own second tries: what the transfers' tests read with."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from urllib.parse import urlsplit

from streamload.errors import ShardChangedError, ShardNotFoundError, StorageError, TransientStorageError

_THROTTLED = re.compile(r"\b(429|503)\b")
_PASSING = re.compile(r"\b5\d\d\b|error sending request|error decoding response body|body error|connection|reset|timed out", re.I)


class PlainStorage:
    """`open_range` on a server without keys. Opens its connections in the loop that is running."""

    def __init__(self, url: str) -> None:
        from obstore.store import HTTPStore

        self._store = HTTPStore.from_url(
            url,
            client_options={"allow_http": True, "timeout": "1h", "pool_max_idle_per_host": "64"},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        )

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> PlainBody:
        from obstore import get_async

        options = {"range": {"offset": start} if end is None else (start, end)} | ({} if etag is None else {"if_match": etag})
        try:
            result = await get_async(self._store, urlsplit(url).path.lstrip("/"), options=options)
        except FileNotFoundError as exc:
            raise ShardNotFoundError("no such shard", url=url) from exc
        except Exception as exc:
            raise _meaning(exc, url) from exc
        return PlainBody(url, result)


class PlainBody:
    """An answer of `PlainStorage`."""

    def __init__(self, url, result) -> None:
        self.total_bytes = result.meta["size"]
        self.etag = result.meta["e_tag"]
        self._url = url
        self._result = result

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._result.stream(min_chunk_size=1 << 16):
                yield piece
        except Exception as exc:
            raise _meaning(exc, self._url) from exc

    async def aclose(self) -> None:
        self._result = None


def _meaning(exc: Exception, url: str) -> StorageError:
    text = str(exc)
    if "412" in text:
        return ShardChangedError("the storage says that it is another version now", url=url)
    if _PASSING.search(text):
        return TransientStorageError(text.splitlines()[0], url=url, throttled=bool(_THROTTLED.search(text)))
    return StorageError(text.splitlines()[0], url=url)
