"""Ranges and whole files over plain HTTP by aiohttp, with every length and Content-Range checked."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.errors import StorageError
from streamload.storage.errors import (
    WholeAnswerError,
    changed_error,
    connection_error,
    status_error,
    transient_error,
    unknown_length_error,
    whole_answer_error,
)
from streamload.storage.protocol import UNKNOWN_BYTES, EmptyBody, RangeBody, quoted, same_etag, version_of
from streamload.text import counted

if TYPE_CHECKING:
    import aiohttp

__all__ = ["ServedParts", "Wanted", "covered_bytes", "open_http_file", "open_http_range", "strong_etag"]

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\Z")
_RANGE_OF_UNKNOWN = re.compile(r"bytes \d+-\d+/\*\Z")
_NO_RANGE_OF_NOTHING = re.compile(r"bytes \*/0\Z")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_ERROR_BYTES = 64 << 10


def _range_headers(wanted: Wanted) -> dict[str, str]:
    """The headers of a request for a range."""
    last = "" if wanted.end is None else wanted.end - 1
    headers = {"Range": f"bytes={wanted.start}-{last}", "Accept-Encoding": "identity"}
    if (strong := strong_etag(wanted.etag)) is not None:
        headers["If-Match"] = strong
    return headers


def _request(passing: Mapping[str, Any] | None, headers: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of one of aiohttp's requests."""
    import aiohttp

    passing = passing or {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)
    return {**passing, "headers": {**(passing.get("headers") or {}), **headers}, "timeout": timeout}


def strong_etag(etag: str | None) -> str | None:
    """The ETag as If-Match takes it: quoted; None for a weak one, which never matches there."""
    return None if etag is None or etag.startswith("W/") else quoted(etag)


class Wanted(NamedTuple):
    """A range that is requested; see `Storage.open_range`.

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
    passing: Mapping[str, Any] | None = None,
    on_close: Callable[[], Awaitable[None]] | None = None,
) -> RangeBody:
    """Request a range; see `Storage.open_range`.

    A server may answer with status 200 as long as its Content-Range is that of the range.

    Args:
        session: what to request with.
        address: what to request, which may hold a signature.
        wanted: the range.
        passing: more arguments of aiohttp's requests, as `headers` and `ssl`.
        on_close: awaited when the body was read or given up, or could not be had.
    """

    async def checked(response: aiohttp.ClientResponse) -> RangeBody:
        if response.status == 412:
            now = await _etag_now(session.head(address, **_request(passing, {})))
            raise changed_error(wanted.url, wanted.etag, now)
        return await _checked_range(response, wanted, on_close)

    try:
        return await _answered(session.get(address, **_request(passing, _range_headers(wanted))), wanted.url, checked)
    except BaseException:
        if on_close is not None:
            await on_close()
        raise


async def open_http_file(
    session: aiohttp.ClientSession,
    address: str,
    wanted: Wanted,
    *,
    passing: Mapping[str, Any] | None = None,
) -> RangeBody:
    """Request a file whole, also from servers that serve no ranges.

    Args:
        session: what to request with.
        address: what to request, which may hold a signature.
        wanted: all of the file.
        passing: more arguments of aiohttp's requests, as `headers` and `ssl`.

    Returns:
        Its body; `total_bytes` is `UNKNOWN_BYTES` where the server does not say it, or compresses what it sends.

    Raises:
        ShardChangedError: the file has another version.
        StorageError: see `Storage.read_bytes`.
    """

    async def checked(response: aiohttp.ClientResponse) -> RangeBody:
        return await _checked_file(response, wanted)

    request = session.get(address, **_request(passing, {"Accept-Encoding": "identity"}))
    return await _answered(request, wanted.url, checked)


async def _answered(
    request: Awaitable[aiohttp.ClientResponse],
    url: str,
    checked: Callable[[aiohttp.ClientResponse], Awaitable[RangeBody]],
) -> RangeBody:
    """The body of an answer that passes a check; any other is closed."""
    import aiohttp

    try:
        response = await request
        try:
            return await checked(response)
        except BaseException:
            response.close()
            raise
    except aiohttp.ClientConnectorError as exc:
        raise connection_error(url, str(exc)) from None
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise transient_error(url, f"no answer from the storage ({type(exc).__name__})") from None


def covered_bytes(wanted: Wanted, content_range: str | None) -> tuple[int, int]:
    """How many bytes an answer holds, and how many the whole object does, by the answer's Content-Range.

    Raises:
        TransientStorageError: there is none, or it is of another range than the one that was requested.
        StorageError: it leaves open how long the object is.
    """
    if _RANGE_OF_UNKNOWN.match(content_range or ""):
        raise unknown_length_error(wanted.url)
    found = _CONTENT_RANGE.match(content_range or "")
    if found is None:
        raise whole_answer_error(wanted.url)
    first, last, total_bytes = (int(number) for number in found.groups())
    end = total_bytes if wanted.end is None else min(wanted.end, total_bytes)
    if (first, last + 1) != (wanted.start, end):
        raise transient_error(wanted.url, "the server sent another part of the object than was requested")
    return end - first, total_bytes


def _file_bytes(url: str, headers: Mapping[str, str]) -> int:
    """How long a whole file is; unknown where it comes in chunks, after which there is a mark, or compressed."""
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        return UNKNOWN_BYTES
    if "Content-Length" not in headers:
        raise StorageError(
            "the server does not say how long its answer is, so that one which breaks off cannot be distinguished from "
            "a whole one; read from a server that sends Content-Length",
            url=url,
        )
    return UNKNOWN_BYTES if "Content-Encoding" in headers else int(headers["Content-Length"])


async def _checked_file(response: aiohttp.ClientResponse, wanted: Wanted) -> RangeBody:
    if response.status != 200:
        raise await _refusal(response, wanted.url)
    total_bytes = _file_bytes(wanted.url, response.headers)
    now = version_of(response.headers.get("ETag"), _last_modified(response.headers), response.content_length or 0)
    if not same_etag(wanted.etag, now):
        raise changed_error(wanted.url, wanted.etag, now)
    return _HttpBody(response, wanted.url, total_bytes, total_bytes, now)


async def _checked_range(
    response: aiohttp.ClientResponse,
    wanted: Wanted,
    on_close: Callable[[], Awaitable[None]] | None,
) -> RangeBody:
    if wanted.start == 0 and _is_empty(response):
        response.close()
        if on_close is not None:
            await on_close()
        return EmptyBody(quoted(response.headers.get("ETag")))
    if response.status not in (200, 206):
        raise await _refusal(response, wanted.url)
    range_bytes, total_bytes = covered_bytes(wanted, response.headers.get("Content-Range"))
    now = version_of(response.headers.get("ETag"), _last_modified(response.headers), total_bytes)
    if not same_etag(wanted.etag, now):
        raise changed_error(wanted.url, wanted.etag, now)
    return _HttpBody(response, wanted.url, range_bytes, total_bytes, now, on_close=on_close)


def _last_modified(headers: Mapping[str, str]) -> datetime | None:
    try:
        return parsedate_to_datetime(headers["Last-Modified"])
    except (KeyError, ValueError):
        return None


def _is_empty(response: aiohttp.ClientResponse) -> bool:
    """Whether the answer says that the object has no byte: some servers refuse a range of it then, others don't."""
    if response.status == 416:
        return _NO_RANGE_OF_NOTHING.match(response.headers.get("Content-Range", "")) is not None
    return response.status == 200 and response.headers.get("Content-Length") == "0"


async def _refusal(response: aiohttp.ClientResponse, url: str) -> StorageError:
    code = _CODE.search((await response.content.read(_ERROR_BYTES)).decode("utf-8", "replace"))
    return status_error(url, response.status, code[1] if code else None)


async def _etag_now(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> str | None:
    async with request as response:
        return quoted(response.headers.get("ETag")) if response.status == 200 else None


class _HttpBody:
    def __init__(
        self,
        response: aiohttp.ClientResponse,
        url: str,
        range_bytes: int,
        total_bytes: int,
        etag: str | None,
        *,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self.etag = etag
        self._response = response
        self._url = url
        self._range_bytes = range_bytes
        self._on_close = on_close

    async def chunks(self) -> AsyncIterator[bytes]:
        import aiohttp

        expected, received = self._range_bytes, 0
        try:
            async for chunk in self._response.content.iter_any():
                received += len(chunk)
                if received > expected != UNKNOWN_BYTES:
                    raise transient_error(self._url, "the server sent more bytes than its headers say")
                yield chunk
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise transient_error(self._url, f"the answer broke off ({type(exc).__name__})") from None
        finally:
            await self.aclose()
        if received < expected:
            raise transient_error(self._url, f"the answer ended {counted(expected - received, 'byte')} early")

    async def aclose(self) -> None:
        self._response.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            await on_close()


class ServedParts:
    """Remembers which servers have ever answered with a part."""

    def __init__(self) -> None:
        self._places: set[str] = set()

    async def noted(self, place: str, answer: Awaitable[RangeBody]) -> RangeBody:
        """An answer of the server at some place.

        Raises:
            WholeAnswerError: it was the whole object; with `never_parts`, if no answer of this server was a part yet.
        """
        try:
            body = await answer
        except WholeAnswerError as exc:
            exc.never_parts = place not in self._places
            raise
        self._places.add(place)
        return body
