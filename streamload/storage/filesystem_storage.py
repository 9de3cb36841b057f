"""Read and write files with fsspec: its protocols, chained urls, and the user's own filesystem."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import fsspec
from fsspec.asyn import sync

from streamload.errors import ShardNotFoundError, StorageError
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
)

_Result = TypeVar("_Result")

_ETAGS = ("ETag", "etag", "e_tag", "blob_id", "md5Hash")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
# Protocols that show a file before it is complete. So a file is written under another name first.
_RENAMING = frozenset(("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp"))
# Time-outs for a file's metadata, and for reading a small file or a range. Synchronous filesystems ignore them, except
# in `open_range`, where requests fail in time although their threads go on.
INFO_TIMEOUT_S, FILE_TIMEOUT_S = 30.0, 120.0
# Seconds until a file's version is requested again, since ranges are read without checking it.
LOOK_AGAIN_S = 30.0
# Maximum number of ranges read at once: each is held whole, and twice while its pieces are joined.
RANGES_AT_ONCE = 16
# Seconds between empty pieces while a range is being read.
PROGRESS_S = 5.0
_PYARROW = "fsspec.implementations.arrow"


def shard_info(url: str, known: Mapping[str, Any]) -> ShardInfo:
    """Translate a file's entry in a filesystem's `info` or `ls`. Size and time replace a missing ETag.

    Raises StorageError for a folder.
    """
    if known.get("type") == "directory":
        raise StorageError("this is a folder, but a shard must be a file; check the path", url=url)
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


class FilesystemStorage:
    """Read and write files by any url that fsspec knows.

    Coroutines of asynchronous filesystems run on fsspec's own loop; other filesystems read ranges on threads.
    """

    def __init__(self, options: Mapping[str, Any], filesystem: Any = None, retries: Retries | None = None) -> None:
        self._options = options
        self._filesystem = filesystem
        self._retries = retries or Retries()
        self._opened: dict[tuple[int, str], Any] = {}
        self._known: dict[str, tuple[ShardInfo, float]] = {}
        self._bounds: WeakKeyDictionary[Any, tuple[asyncio.Semaphore, defaultdict[str, asyncio.Lock]]]
        self._bounds = WeakKeyDictionary()  # by event loop

    def info(self, url: str) -> ShardInfo:
        """Return size and version of one file."""

        def look(fs: Any, path: str) -> ShardInfo:
            try:
                return shard_info(url, _call(fs, "info", path, timeout_s=INFO_TIMEOUT_S))
            except FileNotFoundError:
                pass
            folder, _, name = path.rpartition("/")
            try:
                with errors.fsspec_errors(url):
                    names = [entry.path.rpartition("/")[2] for entry in _level(fs, folder)]
            except StorageError:
                raise errors.answer_error(url, 404) from None
            raise errors.missing_error(url, name, names, url.rpartition("/")[0])

        return self._retried(url, look)

    def absolute(self, url: str) -> str:
        """Return the url itself."""
        return url

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """Return the matches, by one `ls` of each folder; links count as their targets."""

        def matching(fs: Any, path: str) -> list[ShardInfo]:
            entries = find_entries(path, partial(_level, fs), folders=folders)
            bare, path = pattern.rstrip("/"), path.strip("/")
            before = bare.removesuffix(path) if bare.endswith(path) else ""  # the part of urls before the path
            return [shard_info(before + entry.path.strip("/"), {} if folders else entry.known) for entry in entries]

        return self._retried(pattern, matching)

    def is_folder(self, url: str) -> bool:
        """Return True if the filesystem calls the url a folder."""
        return self._retried(url, lambda fs, path: bool(fs.isdir(path)))

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """Read a small file by `cat_file`."""

        def read(fs: Any, path: str) -> bytes:
            size_bytes = shard_info(url, _call(fs, "info", path, timeout_s=INFO_TIMEOUT_S)).bytes
            if size_bytes == UNKNOWN_BYTES:
                raise errors.answer_error(url, "unknown length")
            errors.check_small(url, size_bytes, most_bytes)
            content: bytes = _call(fs, "cat_file", path, timeout_s=FILE_TIMEOUT_S)
            errors.check_length(url, content, size_bytes, size_bytes)
            return content

        return self._retried(url, read)

    async def open_range(self, url: str, start: int, end: int | None) -> RangeBody:
        """Read a range whole by `cat_file`.

        Size and version are requested before the first range of a file, and again after `LOOK_AGAIN_S`.
        """
        fs, path = self._open(url)
        bounds = asyncio.Semaphore(RANGES_AT_ONCE), defaultdict[str, asyncio.Lock](asyncio.Lock)
        at_once, locks = self._bounds.setdefault(asyncio.get_running_loop(), bounds)
        async with locks[url]:  # one request for all ranges that begin together
            known, known_until_s = self._known.get(url, (None, 0.0))
            if known is None or time.monotonic() >= known_until_s:
                with errors.fsspec_errors(url):
                    async with asyncio.timeout(INFO_TIMEOUT_S):
                        known = shard_info(url, await _start(fs, "info", path))
                self._known[url] = known, time.monotonic() + LOOK_AGAIN_S
        if known.bytes == start == 0:
            return RangeBody(0, known.etag, one_piece(b""))
        if known.bytes == UNKNOWN_BYTES:
            raise errors.answer_error(url, "unknown length")
        stop = known.bytes if end is None else min(end, known.bytes)
        if start >= stop:
            raise errors.answer_error(url, 416)
        # Pyarrow's filesystems, such as `hdfs://`, need this option to seek in a range that begins at 0.
        seeking = {"seekable": True} if any(type(layer).__module__ == _PYARROW for layer in layers(fs)) else {}

        async def read() -> bytes:
            async with at_once, asyncio.timeout(FILE_TIMEOUT_S):
                content: bytes = await _start(fs, "cat_file", path, start=start, end=stop, **seeking)
                return content

        return RangeBody(known.bytes, known.etag, _when_read(url, read, stop - start, known.bytes))

    def write(self, url: str, source: bytes | str) -> None:
        """Write by `pipe_file` or `put_file`, under another name if the file would appear while it is written."""
        protocols = {protocol_of(url)} if self._filesystem is None else protocols_of(self._filesystem)
        renames = not _RENAMING.isdisjoint(protocols)
        name = secrets.token_hex(8)  # the same for all tries, so a later try replaces a file that was not removed

        def put(fs: Any, path: str) -> None:
            written = f"{path}.{name}.tmp" if renames else path
            try:
                if renames:
                    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                if isinstance(source, bytes):
                    fs.pipe_file(written, source)
                else:
                    fs.put_file(source, written)
                if renames:
                    fs.mv(written, path)
            except BaseException:
                if renames:
                    with suppress(StorageError), errors.fsspec_errors(url):
                        fs.rm_file(written)
                raise

        self._retried(url, put)

    def delete(self, url: str) -> None:
        """Delete a file, if it exists."""
        with suppress(ShardNotFoundError):
            self._retried(url, lambda fs, path: fs.rm_file(path))

    async def aclose(self) -> None:
        """Drop the filesystems, which close their connections when nothing refers to them."""
        self._opened.clear()

    def _retried(self, url: str, act: Callable[[Any, str], _Result]) -> _Result:

        def once() -> _Result:
            fs, path = self._open(url)
            with errors.fsspec_errors(url):
                if fs.async_impl:
                    fs.invalidate_cache()
                return act(fs, path)

        return self._retries.repeat(url, once)

    def _open(self, url: str) -> tuple[Any, str]:
        """Return a url's filesystem, opened once for each host or bucket, and the url's path in it.

        Raises:
            StorageError: a package is missing, or the filesystem cannot connect.
            ValueError: the filesystem does not take these options.
        """
        key = os.getpid(), place_of(url) if self._filesystem is None else ""
        try:
            with errors.fsspec_errors(url, ImportError, ValueError):
                if key not in self._opened:
                    self._opened[key] = self._new(url)
                fs = self._opened[key]
                return fs, str(methodcaller("_strip_protocol", url)(fs))
        except ImportError as exc:
            raise StorageError(f"this storage needs a package that is not installed: {exc}", url=url) from exc
        except TypeError as exc:
            raise ValueError(f"storage_options do not fit {protocol_of(url)}://: {exc}") from None

    def _new(self, url: str) -> Any:
        fs = self._filesystem
        if fs is None:
            fs_class, args = fsspec.get_filesystem_class(protocol_of(url)), ()
            options = methodcaller("_get_kwargs_from_urls", url)(fs_class) | self._options
        elif not type(fs).async_impl:
            return fs
        else:
            fs_class, args, options = type(fs), fs.storage_args, fs.storage_options
        if fs_class.async_impl:  # a new one, not fsspec's cached one with its connections and listings
            options = {**options, "asynchronous": False, "skip_instance_cache": True}
        return fs_class(*args, **options)


def _call(fs: Any, method: str, path: str, *, timeout_s: float) -> Any:
    """Call a method; the time-out applies only on fsspec's loop."""
    if fs.async_impl and not hasattr(fs, "fs"):  # a filesystem that wraps another is called directly
        return sync(fs.loop, getattr(fs, f"_{method}"), path, timeout=timeout_s)
    return getattr(fs, method)(path)


def _start(fs: Any, method: str, path: str, **options: Any) -> asyncio.Future[Any]:
    """Start a method on fsspec's loop if the filesystem is asynchronous, else on a thread."""
    if fs.async_impl and not hasattr(fs, "fs"):
        call = getattr(fs, f"_{method}")(path, **options)
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, fs.loop))
    return asyncio.ensure_future(asyncio.to_thread(getattr(fs, method), path, **options))


def _level(fs: Any, folder: str) -> Iterator[Entry]:
    """List a folder; links count as their targets."""
    try:
        entries = fs.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        name, known = str(entry["name"]).rstrip("/"), entry
        if entry.get("type") not in ("file", "directory"):
            try:
                known = fs.info(entry["name"])
            except OSError as exc:
                if not isinstance(exc, FileNotFoundError) and exc.errno != errno.ELOOP:
                    raise
                known = {}
        if name.strip("/") != folder.strip("/"):  # an object can stand for the folder itself
            yield Entry(name, known.get("type") == "directory", known)


async def _when_read(
    url: str, read: Callable[[], Coroutine[Any, Any, bytes]], range_bytes: int, total_bytes: int
) -> AsyncGenerator[bytes, None]:
    """Yield a range once it is read, and empty pieces until then."""
    reading = asyncio.create_task(read())
    try:
        while not (await asyncio.wait([reading], timeout=PROGRESS_S))[0]:
            yield b""
        with errors.fsspec_errors(url):
            errors.check_length(url, reading.result(), range_bytes, total_bytes)
        yield reading.result()
    finally:
        reading.cancel()
