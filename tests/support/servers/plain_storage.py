"""Ranges over plain HTTP with obstore as it is, without its own second tries: each request is one at the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.store import HTTPStore

from streamload.storage.errors import obstore_error
from streamload.storage.protocol import quoted


class PlainStorage:
    """`open_range` on a server without keys. Opens its connections in the loop that is running."""

    def __init__(self, url: str) -> None:
        self._store = HTTPStore.from_url(
            url,
            client_options={"allow_http": True, "timeout": "1h", "pool_max_idle_per_host": "64"},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        )

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> PlainBody:
        options = {"range": {"offset": start} if end is None else (start, end)} | (
            {} if etag is None else {"if_match": etag}
        )
        try:
            result = await obstore.get_async(self._store, urlsplit(url).path.lstrip("/"), options=options)
        except (obstore.exceptions.BaseError, OSError) as exc:
            raise obstore_error(url, exc) from exc
        return PlainBody(url, result)


class PlainBody:
    """An answer of `PlainStorage`."""

    def __init__(self, url: str, result: Any) -> None:
        self.total_bytes = result.meta["size"]
        self.etag = quoted(result.meta["e_tag"])
        self._url = url
        self._result = result

    @property
    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._result.stream(min_chunk_size=1):
                yield piece
        except (obstore.exceptions.BaseError, OSError) as exc:
            raise obstore_error(self._url, exc) from exc

    async def aclose(self) -> None:
        self._result = None
