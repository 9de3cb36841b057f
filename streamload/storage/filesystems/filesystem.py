"""The storage of whatever fsspec can read: its protocols, chained urls, and a filesystem that the user gives."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from streamload.errors import ShardNotFoundError, StorageError
from streamload.storage.errors import changed_error, check_small, close_matches, transient_error
from streamload.storage.filesystems.fsspec_errors import ReportsErrors, filesystem_error
from streamload.storage.filesystems.listing import find_matches
from streamload.storage.filesystems.opening import OpenFilesystem, open_filesystem, path_in, shard_info
from streamload.storage.filesystems.s3fs_range import open_s3fs_range
from streamload.storage.http_range import Wanted, open_http_range, read_http
from streamload.storage.protocol import (
    EmptyBody,
    RangeBody,
    ShardInfo,
    place_of,
    same_etag,
    without_secrets,
)
from streamload.storage.retry_policy import Retries
from streamload.storage.served_parts import ServedParts
from streamload.text import counted

__all__ = ["FilesystemStorage", "ReadBody"]

_LOOK_AGAIN_S = 30.0
"""Where an answer does not tell its version, that is asked for so often; in between a change is not noticed."""

_INFO_S, _SMALL_FILE_S = 30.0, 120.0
"""How long one answer of an asynchronous filesystem may take, whose own time-outs are long, and met several times."""

_RENAMING = frozenset(("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp"))
"""Protocols where a file appears while it is written, so that it has to be written under another name."""

_CHUNK_BYTES = 1 << 20
_Result = TypeVar("_Result")


class ReadBody:
    """A range that was read whole, where a filesystem gives no stream of it; see `RangeBody`."""

    def __init__(self, content: bytes, total_bytes: int, etag: str | None) -> None:
        self.total_bytes = total_bytes
        self.etag = etag
        self._content = content

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`."""
        content, self._content = self._content, b""
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]

    async def aclose(self) -> None:
        """See `RangeBody.aclose`."""
        self._content = b""


class FilesystemStorage:
    """Files by any url that fsspec knows.

    Asynchronous filesystems are awaited on the running loop, with an instance of their own, which `aclose` closes;
    blocking calls run a loop of their own for as long as they take. All others are called on threads.

    Args:
        options: `storage_options`.
        filesystem: what to read with; None finds it by the url.
        retries: how requests are made again.
    """

    def __init__(self, options: Mapping[str, Any], filesystem: Any = None, retries: Retries | None = None) -> None:
        self._options = options
        self._filesystem = filesystem
        self._opened: dict[str, OpenFilesystem] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._known: dict[str, tuple[ShardInfo, float]] = {}
        self._retries = retries or Retries()
        self._served_parts = ServedParts()

    def info(self, url: str) -> ShardInfo:
        """See `Storage.info`; a missing file comes with the names that are like it."""

        async def look(opened: OpenFilesystem, path: str) -> ShardInfo:
            try:
                return await _look(opened, path)
            except ShardNotFoundError as exc:
                raise await _with_advice(opened, path, exc) from None

        return self._alone(url, look)

    def absolute(self, url: str) -> str:
        """The url itself."""
        return url

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """What matches, by one listing of each folder that a component of the pattern leads to."""

        async def find(opened: OpenFilesystem, path: str) -> Sequence[ShardInfo]:
            return await find_matches(opened, path, folders=folders)

        return [*self._alone(pattern, find)]

    def is_folder(self, url: str) -> bool:
        """See `Storage.is_folder`."""

        async def look(opened: OpenFilesystem, path: str) -> bool:
            return bool(await opened.call("isdir", path))

        return self._alone(url, look)

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """See `Storage.read_bytes`."""

        async def read(opened: OpenFilesystem, path: str) -> bytes:
            if not _streams(opened):
                content: bytes = await opened.call("cat_file", path, timeout_s=_SMALL_FILE_S)
                check_small(url, len(content), most_bytes)
                return content
            if not hasattr(opened.fs, "_call_s3"):
                return await read_http(url, most_bytes, *await _http_request(opened, path))
            body = await _stream(opened, path, Wanted(url, 0, None, None))
            check_small(url, body.total_bytes, most_bytes)
            return b"".join([piece async for piece in body.chunks()])

        return self._alone(url, read)

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None = None) -> RangeBody:
        """See `Storage.open_range`.

        Of http servers and of s3fs the bytes stream; elsewhere a range is read whole. There its size and version are
        asked for with the first range, and again after a while.
        """
        opened, path = self._on_loop(url)
        wanted = Wanted(url, start, end, etag)
        with ReportsErrors(url):
            if _streams(opened):
                return await self._served_parts.noted(place_of(url), _stream(opened, path, wanted))
            return await self._read(opened, path, wanted)

    async def _read(self, opened: OpenFilesystem, path: str, wanted: Wanted) -> RangeBody:
        known, known_until_s = self._known.get(wanted.url, (None, 0.0))
        if known is None or monotonic() >= known_until_s:
            known = await _look(opened, path)
            self._known[wanted.url] = known, monotonic() + _LOOK_AGAIN_S
        if not same_etag(wanted.etag, known.etag):
            raise changed_error(wanted.url, wanted.etag, known.etag)
        if known.bytes == wanted.start == 0:
            return EmptyBody(known.etag)
        end = known.bytes if wanted.end is None else min(wanted.end, known.bytes)
        if wanted.start >= end:
            raise changed_error(wanted.url, wanted.etag, known.etag)
        content: bytes = await opened.call("cat_file", path, start=wanted.start, end=end)
        if len(content) != end - wanted.start:
            raise transient_error(
                wanted.url,
                f"the storage gave {counted(len(content), 'byte')} where {end - wanted.start:,} were asked for",
            )
        return ReadBody(content, known.bytes, known.etag)

    def write(self, url: str, source: bytes | str) -> None:
        """See `Storage.write`; all of it is written again where that may succeed.

        Where a file appears while it is written, that is one of another name, the same one at each try.
        """
        name = secrets.token_hex(8)

        async def put(opened: OpenFilesystem, path: str) -> None:
            if not _renames(opened):
                await _put(opened, source, path)
                return
            written = f"{path}.{name}.tmp"
            try:
                await opened.call("makedirs", path.rpartition("/")[0], exist_ok=True)
                await _put(opened, source, written)
                await opened.call("mv", written, path)
            except BaseException:
                with suppress(StorageError), ReportsErrors(url):
                    await opened.call("rm_file", written)
                raise

        self._alone(url, put)

    def delete(self, url: str) -> None:
        """See `Storage.delete`."""

        async def remove(opened: OpenFilesystem, path: str) -> None:
            try:
                await opened.call("rm_file", path)
            except FileNotFoundError:
                return

        self._alone(url, remove)

    async def aclose(self) -> None:
        """Close what reading from the running loop has opened."""
        opened, self._opened = list(self._opened.values()), {}
        for one in opened:
            await one.aclose()

    def _on_loop(self, url: str) -> tuple[OpenFilesystem, str]:
        """The filesystem for a url on the running loop; opened once for each host, chain or bucket of its own."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._opened = loop, {}
        key = self._key(url)
        opened = self._opened.get(key)
        if opened is None:
            opened, path = open_filesystem(url, self._options, self._filesystem)
            self._opened[key] = opened
            return opened, path
        return opened, path_in(opened.fs, url)

    def _key(self, url: str) -> str:
        """What urls have in common that the same filesystem reads."""
        return place_of(url) if self._filesystem is None else ""

    def _alone(
        self,
        url: str,
        act: Callable[[OpenFilesystem, str], Coroutine[Any, Any, _Result]],
    ) -> _Result:
        """Do something on a loop that ends with it, again as long as it may succeed; on a thread, where a loop runs."""
        patience = self._retries.begin(url)

        async def once(opened: OpenFilesystem, path: str) -> _Result:
            with ReportsErrors(url):
                return await act(opened, path)

        async def whole() -> _Result:
            opened, path = open_filesystem(url, self._options, self._filesystem)
            try:
                while True:
                    try:
                        answer = await once(opened, path)
                        patience.progressed()
                        return answer
                    except StorageError as exc:
                        if (wait_s := patience.wait_s(exc)) is None:
                            raise
                    await asyncio.sleep(wait_s)
            finally:
                await opened.aclose()

        return _run_alone(whole)


def _streams(opened: OpenFilesystem) -> bool:
    """Whether the bytes of a range come as they arrive; else a range is read whole."""
    return opened.is_async and (hasattr(opened.fs, "encode_url") or hasattr(opened.fs, "_call_s3"))


async def _stream(opened: OpenFilesystem, path: str, wanted: Wanted) -> RangeBody:
    if hasattr(opened.fs, "_call_s3"):
        return await open_s3fs_range(opened.fs, path, wanted)
    session, address, besides = await _http_request(opened, path)
    return await open_http_range(session, address, wanted, besides=besides)


async def _http_request(opened: OpenFilesystem, path: str) -> tuple[Any, str, Mapping[str, Any]]:
    """What fsspec asks a web server with, for what, and what it says besides, as headers."""
    return await opened.fs.set_session(), str(opened.fs.encode_url(path)), opened.fs.kwargs


def _renames(opened: OpenFilesystem) -> bool:
    """Whether a file is to be written under another name."""
    protocols = opened.fs.protocol
    return bool(_RENAMING.intersection([protocols] if isinstance(protocols, str) else protocols))


async def _put(opened: OpenFilesystem, source: bytes | str, path: str) -> None:
    if isinstance(source, bytes):
        await opened.call("pipe_file", path, source)
    else:
        await opened.call("put_file", source, path)


def _run_alone(whole: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(whole())
    with ThreadPoolExecutor(1, "streamload-listing") as thread:
        return thread.submit(lambda: asyncio.run(whole())).result()


async def _look(opened: OpenFilesystem, path: str) -> ShardInfo:
    url = opened.url(path)
    try:
        found = await opened.call("info", path, timeout_s=_INFO_S)
    except FileNotFoundError as exc:
        raise filesystem_error(url, exc) from None
    if found.get("type") == "directory":
        raise StorageError("this is a folder, and a shard must be a file; check the path", url=without_secrets(url))
    return shard_info(url, found)


async def _with_advice(opened: OpenFilesystem, path: str, error: ShardNotFoundError) -> ShardNotFoundError:
    folder, _, name = path.rpartition("/")
    try:
        with ReportsErrors(opened.url(folder)):
            entries = await opened.call("ls", folder, detail=True)
    except ShardNotFoundError:
        entries = []
    except StorageError:
        return error
    names = [str(entry["name"]).rpartition("/")[2] for entry in entries]
    advice = close_matches(name, names, opened.url(folder))
    return ShardNotFoundError(f"no such shard: {advice}", url=error.url)
