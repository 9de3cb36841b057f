"""The storage of everything that fsspec reads: its protocols, chained urls, and a filesystem of the user's."""

from __future__ import annotations

import asyncio
import errno
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

import fsspec

from streamload.errors import ShardNotFoundError, StorageError, TransientStorageError
from streamload.storage import errors
from streamload.storage.download import Retries
from streamload.storage.protocol import (
    UNKNOWN_BYTES,
    Entry,
    RangeBody,
    ShardInfo,
    find_entries,
    layers,
    one_piece,
    place_of,
    protocol_of,
    protocols_of,
    quoted,
    same_etag,
    split_pattern,
)

_Result = TypeVar("_Result")

_ETAGS = ("ETag", "etag", "e_tag", "blob_id", "md5Hash")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
# Protocols where a file appears while it is written, so that it is written under another name.
_RENAMING = frozenset(("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp"))
# How long one answer about a file may take, and reading a small file or a range.
INFO_TIMEOUT_S, FILE_TIMEOUT_S = 30.0, 120.0
# How often the version of a file is requested, since ranges are read without it.
LOOK_AGAIN_S = 30.0
# Between two empty pieces of a range that is being read.
_PROGRESS_S = 5.0
_PYARROW = "fsspec.implementations.arrow"
# Calls one of fsspec's methods by its name.
_Call = Callable[..., Any]


def shard_info(url: str, known: Mapping[str, Any]) -> ShardInfo:
    """Translate a filesystem's `info` or `ls` of a file; without an ETag, size and time stand for one."""
    size = known.get("size")
    size_bytes = size if isinstance(size, int) else UNKNOWN_BYTES
    mtime_ns = next((time_ns for name in _TIMES if (time_ns := _nanoseconds(known.get(name)))), 0)
    etag = next((known[name] for name in _ETAGS if isinstance(known.get(name), str)), None)
    if etag is None and mtime_ns:
        etag = f"{mtime_ns:x}-{size_bytes:x}"
    return ShardInfo(url, size_bytes, mtime_ns, quoted(etag))


def _nanoseconds(moment: object) -> int:
    if isinstance(moment, datetime):
        moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return round(moment * 1_000_000) * 1000 if isinstance(moment, int | float) else 0


class _Opened(NamedTuple):
    """A filesystem; if `is_async`, its methods can be awaited on the running loop."""

    fs: Any
    is_async: bool

    async def call(self, method: str, path: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Call one of fsspec's methods, on the loop if the filesystem can, else on a thread without a time-out."""
        if not self.is_async:
            return await asyncio.to_thread(getattr(self.fs, method), path, *args, **options)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await getattr(self.fs, f"_{method}")(path, *args, **options)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TransientStorageError(f"no answer within {timeout_s:g} s; try again later", url=path) from None

    async def aclose(self) -> None:
        """Close the connections, for which fsspec has no method."""
        session = getattr(self.fs, "_session", None) or getattr(self.fs, "_s3", None)
        if self.is_async and session is not None:
            with suppress(RuntimeError):  # of a loop that is closed already
                await session.close()


class FilesystemStorage:
    """Files by any url that fsspec knows.

    Asynchronous filesystems are awaited on the running loop, with an instance of their own, which `aclose` closes, or
    for blocking calls on a loop that ends with the call. All others are called on threads.
    """

    def __init__(self, options: Mapping[str, Any], filesystem: Any = None, retries: Retries | None = None) -> None:
        self._options = options
        self._filesystem = filesystem
        self._retries = retries or Retries()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: dict[str, _Opened] = {}
        self._known: dict[str, tuple[ShardInfo, float]] = {}

    def info(self, url: str) -> ShardInfo:
        """Return size and version of one file; see `Storage.info`."""

        def look(call: _Call, path: str) -> ShardInfo:
            try:
                return _checked(url, call("info", path, timeout_s=INFO_TIMEOUT_S))
            except FileNotFoundError:
                pass
            folder, _, name = path.rpartition("/")
            try:
                with errors.fsspec_errors(url):
                    names = [entry.path.rpartition("/")[2] for entry in _level(call, folder)]
            except StorageError:
                raise errors.answer_error(url, 404) from None
            advice = errors.close_matches(name, names, url.rpartition("/")[0])
            raise ShardNotFoundError(f"no such shard: {advice}", url=url)

        return self._blocking(url, look)

    def absolute(self, url: str) -> str:
        """Return the url itself."""
        return url

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """Return the matches, by one `ls` of each folder; links count as their targets."""

        def matching(call: _Call, path: str) -> list[ShardInfo]:
            to_url = _url_maker(pattern, path)
            folder, steps = split_pattern(path)
            entries = find_entries(folder, steps, partial(_level, call), folders=folders)
            return sorted(shard_info(to_url(entry.path), {} if folders else entry.known) for entry in entries)

        return self._blocking(pattern, matching)

    def is_folder(self, url: str) -> bool:
        """Return True if the filesystem says so."""
        return self._blocking(url, lambda call, path: bool(call("isdir", path)))

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """Read a small file by `cat_file`; see `Storage.read_bytes`."""

        def read(call: _Call, path: str) -> bytes:
            size_bytes = _checked(url, call("info", path, timeout_s=INFO_TIMEOUT_S)).bytes
            if size_bytes == UNKNOWN_BYTES:
                raise errors.answer_error(url, "unknown length")
            errors.check_small(url, size_bytes, most_bytes)
            content: bytes = call("cat_file", path, timeout_s=FILE_TIMEOUT_S)
            errors.check_length(url, content, size_bytes, size_bytes)
            return content

        return self._blocking(url, read)

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None = None) -> RangeBody:
        """Read a range whole by `cat_file`; see `Storage.open_range`.

        Size and version are requested before the first range of a file, and again after a while.
        """
        opened, path = await self._on_loop(url)
        known, known_until_s = self._known.get(url, (None, 0.0))
        if known is None or time.monotonic() >= known_until_s:
            with errors.fsspec_errors(url):
                known = _checked(url, await opened.call("info", path, timeout_s=INFO_TIMEOUT_S))
            self._known[url] = known, time.monotonic() + LOOK_AGAIN_S
        if not same_etag(etag, known.etag):
            raise errors.changed_error(url, etag, known.etag)
        if known.bytes == start == 0:
            return RangeBody(0, known.etag, one_piece(b""))
        if known.bytes == UNKNOWN_BYTES:
            raise errors.answer_error(url, "unknown length")
        stop, total_bytes = known.bytes if end is None else min(end, known.bytes), known.bytes
        if start >= stop:
            raise errors.changed_error(url, etag, known.etag)

        async def read() -> bytes:
            with errors.fsspec_errors(url):
                content: bytes = await opened.call("cat_file", path, start=start, end=stop, **_seeking(opened.fs))
                errors.check_length(url, content, stop - start, total_bytes)
                return content

        return RangeBody(total_bytes, known.etag, _when_read(url, read, FILE_TIMEOUT_S))

    def write(self, url: str, source: bytes | str) -> None:
        """Write by `pipe_file` or `put_file`, under another name if the file would appear while it is written."""
        name = secrets.token_hex(8)
        protocols = {protocol_of(url)} if self._filesystem is None else protocols_of(self._filesystem)

        def put(call: _Call, path: str) -> None:
            if isinstance(source, bytes):
                call("pipe_file", path, source)
            else:
                call("put_file", source, path)

        def put_and_rename(call: _Call, path: str) -> None:
            written = f"{path}.{name}.tmp"
            try:
                call("makedirs", path.rpartition("/")[0], exist_ok=True)
                put(call, written)
                call("mv", written, path)
            except BaseException:
                with suppress(StorageError), errors.fsspec_errors(url):
                    call("rm_file", written)
                raise

        self._blocking(url, put_and_rename if _RENAMING & protocols else put)

    def delete(self, url: str) -> None:
        """Delete a file; see `Storage.delete`."""

        def remove(call: _Call, path: str) -> None:
            with suppress(FileNotFoundError):
                call("rm_file", path)

        self._blocking(url, remove)

    async def aclose(self) -> None:
        """Close the filesystems of the running loop."""
        opened, self._opened = list(self._opened.values()), {}
        for each in opened:
            await each.aclose()

    async def _on_loop(self, url: str) -> tuple[_Opened, str]:
        """Return the filesystem of a url on the running loop, opened once for each host or bucket, and the path."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._opened = loop, {}
        place = place_of(url) if self._filesystem is None else ""
        opened = self._opened.get(place)
        if opened is None:
            opened, path = await self._open(url)
            self._opened[place] = opened
            return opened, path
        return opened, _path_in(opened.fs, url)

    def _blocking(self, url: str, act: Callable[[_Call, str], _Result]) -> _Result:
        """Run `act(call, path)`, retried, on a loop that ends with it."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._run(url, act)
        with ThreadPoolExecutor(1, "streamload-listing") as thread:
            return thread.submit(self._run, url, act).result()

    def _run(self, url: str, act: Callable[[_Call, str], _Result]) -> _Result:
        opened: tuple[_Opened, str] | None = None
        with asyncio.Runner() as runner:

            def call(method: str, *args: Any, **options: Any) -> Any:
                assert opened is not None
                return runner.run(opened[0].call(method, *args, **options))

            def once() -> _Result:
                nonlocal opened
                if opened is None:
                    opened = runner.run(self._open(url))
                with errors.fsspec_errors(url):
                    return act(call, opened[1])

            try:
                return self._retries.repeat(url, once)
            finally:
                if opened is not None:
                    runner.run(opened[0].aclose())

    async def _open(self, url: str) -> tuple[_Opened, str]:
        """Open the filesystem of a url, for the running loop if it is asynchronous, and return it with the url's path.

        Raises:
            StorageError: the package for this protocol is missing, or the filesystem cannot connect.
            ValueError: the filesystem does not take these options.
        """
        fs = self._filesystem
        try:
            with errors.fsspec_errors(url, ImportError, ValueError):
                if fs is None:
                    made_by, args = fsspec.get_filesystem_class(protocol_of(url)), ()
                    options = methodcaller("_get_kwargs_from_urls", url)(made_by) | self._options
                else:
                    made_by, args, options = type(fs), fs.storage_args, fs.storage_options
                is_async = made_by.async_impl and not hasattr(fs, "fs")  # one that wraps another is called on a thread
                if is_async:
                    fs = made_by(*args, **{**options, "asynchronous": True, "skip_instance_cache": True})
                elif fs is None:
                    fs = made_by(**options)
                return _Opened(fs, is_async), _path_in(fs, url)
        except ImportError as exc:
            raise StorageError(f"this storage needs a package that is not there: {exc}", url=url) from exc
        except TypeError as exc:
            raise ValueError(f"storage_options do not fit {protocol_of(url)}://: {exc}") from None


def _path_in(filesystem: Any, url: str) -> str:
    return str(methodcaller("_strip_protocol", url)(filesystem))


def _seeking(fs: Any) -> dict[str, bool]:
    # Pyarrow's filesystems, as `hdfs://` is one, cannot seek in a range that begins at 0.
    return {"seekable": True} if any(type(layer).__module__ == _PYARROW for layer in layers(fs)) else {}


def _level(call: _Call, folder: str) -> Iterator[Entry]:
    """List a folder; links count as their targets."""
    try:
        entries = call("ls", folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        name, known = str(entry["name"]).rstrip("/"), entry
        if entry.get("type") not in ("file", "directory"):
            try:
                known = call("info", entry["name"])
            except OSError as exc:
                if not isinstance(exc, FileNotFoundError) and exc.errno != errno.ELOOP:
                    raise
                known = {}
        if name.strip("/") != folder.strip("/"):  # an object may mark the folder itself
            yield Entry(name, known.get("type") == "directory", known)


def _checked(url: str, known: Mapping[str, Any]) -> ShardInfo:
    if known.get("type") == "directory":
        raise StorageError("this is a folder, and a shard must be a file; check the path", url=url)
    return shard_info(url, known)


async def _when_read(url: str, read: Callable[[], Any], timeout_s: float) -> AsyncGenerator[bytes, None]:
    """Yield what a coroutine reads, and empty pieces until then."""
    reading = asyncio.ensure_future(read())
    clock = asyncio.get_running_loop().time
    end_s = clock() + timeout_s
    try:
        while not (await asyncio.wait([reading], timeout=_PROGRESS_S))[0]:
            if clock() > end_s:
                raise TransientStorageError(f"no answer within {timeout_s:g} s; try again later", url=url)
            yield b""
        yield reading.result()
    finally:
        reading.cancel()


def _url_maker(url: str, path: str) -> Callable[[str], str]:
    """Return the function from a filesystem's paths to urls like one whose path is known."""
    url, path = url.rstrip("/"), path.strip("/")
    before = url[: len(url) - len(path)] if url.endswith(path) else ""
    return lambda path: f"{before}{path.strip('/')}"
