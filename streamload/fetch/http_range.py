"""A range of an object over plain HTTP by aiohttp, with every length and Content-Range checked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamload.errors import StorageError
from streamload.fetch.storage import RangeBody, quoted, same_etag
from streamload.fetch.storage_errors import changed_error, connection_error, status_error, transient_error

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Wanted", "open_http_range", "strong_etag"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\Z")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_ERROR_BYTES = 64 << 10


def _range_headers(wanted: Wanted) -> dict[str, str]:
    """The headers of a request for a range."""
    last = "" if wanted.end is None else wanted.end - 1
    headers = {"Range": f"bytes={wanted.start}-{last}", "Accept-Encoding": "identity"}
    if (strong := strong_etag(wanted.etag)) is not None:
        headers["If-Match"] = strong
    return headers


def strong_etag(etag: str | None) -> str | None:
    """The ETag as If-Match takes it: quoted; None for a weak one, which never matches there."""
    return None if etag is None or etag.startswith("W/") else quoted(etag)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range that is asked for; see `Storage.open_range`.

    Attributes:
        url: how errors name the object.
        start: the first byte.
        end: one past the last byte, or None.
        etag: the version that the object must have; None takes any.
    """

    url: str
    start: int
    end: int | None
    etag: str | None


async def open_http_range(
    session: aiohttp.ClientSession,
    address: str,
    wanted: Wanted,
    *,
    headers: Mapping[str, str] | None = None,
    on_close: Callable[[], Awaitable[None]] | None = None,
) -> RangeBody:
    """Ask for a range; see `Storage.open_range`.

    A server may answer with status 200 as long as its Content-Range is that of the range.

    Args:
        session: what to ask with.
        address: what to ask for, which may hold a signature.
        wanted: the range.
        headers: sent besides.
        on_close: awaited when the body was read or given up, or could not be had.
    """
    import aiohttp

    done = False
    try:
        asked = session.get(address, headers={**(headers or {}), **_range_headers(wanted)})
        response = await asked
        try:
            body = await _checked(response, wanted, on_close)
            done = True
        finally:
            if not done:
                response.close()
    except aiohttp.ClientConnectorError as exc:
        raise connection_error(wanted.url, str(exc)) from None
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise transient_error(wanted.url, f"no answer from the storage ({type(exc).__name__})") from None
    finally:
        if not done and on_close is not None:
            await on_close()
    return body


async def _checked(
    response: aiohttp.ClientResponse,
    wanted: Wanted,
    on_close: Callable[[], Awaitable[None]] | None,
) -> _HttpBody:
    url, start, end, etag = wanted.url, wanted.start, wanted.end, wanted.etag
    if response.status not in (200, 206):
        raise await _refusal(response, url, etag)
    found = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
    if found is None:
        raise transient_error(url, "the server sent the whole object where a part was asked for")
    first, last, total_bytes = (int(number) for number in found.groups())
    if (first, last + 1) != (start, total_bytes if end is None else min(end, total_bytes)):
        raise transient_error(url, "the server sent another part of the object than was asked for")
    now = response.headers.get("ETag")
    if not same_etag(etag, now):
        raise changed_error(url, etag, now)
    return _HttpBody(response, url, last + 1 - first, total_bytes, on_close)


async def _refusal(response: aiohttp.ClientResponse, url: str, etag: str | None) -> StorageError:
    if response.status == 412:
        return changed_error(url, etag, None)
    code = _CODE.search((await response.content.read(_ERROR_BYTES)).decode("utf-8", "replace"))
    return status_error(url, response.status, code[1] if code else None)


class _HttpBody:
    def __init__(
        self,
        response: aiohttp.ClientResponse,
        url: str,
        range_bytes: int,
        total_bytes: int,
        on_close: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.total_bytes = total_bytes
        self.etag = quoted(response.headers.get("ETag"))
        self._response = response
        self._url = url
        self._range_bytes = range_bytes
        self._on_close = on_close

    async def chunks(self) -> AsyncIterator[bytes]:
        import aiohttp

        left = self._range_bytes
        try:
            async for chunk in self._response.content.iter_any():
                left -= len(chunk)
                if left < 0:
                    raise transient_error(self._url, "the server sent more bytes than its headers say")
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise transient_error(self._url, f"the answer broke off ({type(exc).__name__})") from None
        finally:
            await self.aclose()
        if left:
            raise transient_error(self._url, f"the answer ended {left:,} bytes early")

    async def aclose(self) -> None:
        self._response.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()
