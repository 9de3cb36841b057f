"""The storage of all that fsspec can read: its protocols, chained urls, and a filesystem of the user's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeVar

from streamload.errors import ShardNotFoundError, StorageError, without_secrets
from streamload.storage.errors import (
    changed_error,
    check_length,
    check_small,
    close_matches,
    transient_error,
    unknown_length_error,
)
from streamload.storage.filesystems import OpenFilesystem, layers, open_filesystem, path_in
from streamload.storage.fsspec_errors import ReportsErrors, filesystem_error
from streamload.storage.local_storage import LocalStorage
from streamload.storage.patterns import ANY_FOLDERS, pattern_steps
from streamload.storage.protocol import (
    UNKNOWN_BYTES,
    RangeBody,
    ShardInfo,
    WholeBody,
    is_pattern,
    matches,
    place_of,
    quoted,
    same_etag,
)
from streamload.storage.retry_policy import Retries

_ETAGS = ("ETag", "etag", "e_tag", "blob_id", "md5Hash")
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


def shard_info(url: str, found: Mapping[str, Any]) -> ShardInfo:
    """What a filesystem's `info` or `ls` says of a file.

    Where it has no ETag, its size and time stand for one, so that a change is seen there too.
    """
    size = found.get("size")
    size_bytes = size if isinstance(size, int) else UNKNOWN_BYTES
    mtime_ns = next((time for name in _TIMES if (time := _nanoseconds(found.get(name)))), 0)
    etag = next((found[name] for name in _ETAGS if isinstance(found.get(name), str)), None)
    if etag is None and mtime_ns:
        etag = f"{mtime_ns:x}-{size_bytes:x}"
    return ShardInfo(url, size_bytes, mtime_ns, quoted(etag))


def _nanoseconds(time: object) -> int:
    if isinstance(time, datetime):
        time = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return round(time * 1_000_000) * 1000 if isinstance(time, int | float) else 0


# Protocols where a file appears while it is written, so that it has to be written under another name.
_RENAMING = frozenset(("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp"))

# Between two empty pieces of a range that is being read.
_PROGRESS_S = 5.0

_Result = TypeVar("_Result")


class FilesystemBody:
    """A range that a filesystem reads whole; see `RangeBody`.

    Args:
        known: the file.
        read: reads the range.
        timeout_s: how long that may take, from all requests that share the link.
    """

    def __init__(self, known: ShardInfo, read: Callable[[], Coroutine[Any, Any, bytes]], timeout_s: float) -> None:
        self.total_bytes = known.bytes
        self.etag = known.etag
        self._url = known.url
        self._read = read
        self._timeout_s = timeout_s
        self._reading: asyncio.Task[bytes] | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`; the pieces are empty while the range is being read."""
        self._reading = reading = asyncio.ensure_future(self._read())
        clock = asyncio.get_running_loop().time
        end_s = clock() + self._timeout_s
        try:
            while not (await asyncio.wait([reading], timeout=_PROGRESS_S))[0]:
                if clock() > end_s:
                    raise transient_error(self._url, f"no answer within {self._timeout_s:g} s")
                yield b""
            yield reading.result()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """See `RangeBody.aclose`."""
        if self._reading is not None:
            self._reading.cancel()


class FilesystemStorage:
    """Files by any url that fsspec knows.

    Asynchronous filesystems are awaited on the running loop, with an instance of their own, which `aclose` closes;
    blocking calls run a loop of their own while they run. All others are called on threads.

    Args:
        options: `storage_options`.
        filesystem: what to read with; None finds it by the url.
        retries: how requests are made again.
        info_timeout_s: how long one answer about a file may take. Time-outs of asynchronous filesystems are long, and
            met several times for one question.
        file_timeout_s: how long reading a small file or a range may take.
        look_again_s: how often the version is requested where answers do not have it; a change in between is not
            noticed.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        filesystem: Any = None,
        retries: Retries | None = None,
        *,
        info_timeout_s: float = 30.0,
        file_timeout_s: float = 120.0,
        look_again_s: float = 30.0,
    ) -> None:
        self._options = options
        self._info_timeout_s = info_timeout_s
        self._file_timeout_s = file_timeout_s
        self._look_again_s = look_again_s
        self._filesystem = filesystem
        self._opened: dict[str, OpenFilesystem] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._known: dict[str, tuple[ShardInfo, float]] = {}
        self._retries = retries or Retries()

    def info(self, url: str) -> ShardInfo:
        """See `Storage.info`; a missing file comes with the names that are like it."""

        async def look(opened: OpenFilesystem, path: str) -> ShardInfo:
            try:
                return await _look(opened, path, self._info_timeout_s)
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
            size_bytes = (await _look(opened, path, self._info_timeout_s)).bytes
            if size_bytes == UNKNOWN_BYTES:
                raise unknown_length_error(url)
            check_small(url, size_bytes, most_bytes)
            content: bytes = await opened.call("cat_file", path, timeout_s=self._file_timeout_s)
            check_length(url, content, size_bytes, size_bytes)
            return content

        return self._alone(url, read)

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None = None) -> RangeBody:
        """See `Storage.open_range`.

        The file's size and version are requested with its first range, and again after a while.
        """
        opened, path = self._on_loop(url)
        known, known_until_s = self._known.get(url, (None, 0.0))
        if known is None or monotonic() >= known_until_s:
            with self._reports_errors(url):
                known = await _look(opened, path, self._info_timeout_s)
            self._known[url] = known, monotonic() + self._look_again_s
        if not same_etag(etag, known.etag):
            raise changed_error(url, etag, known.etag)
        if known.bytes == start == 0:
            return WholeBody(b"", 0, known.etag)
        if known.bytes == UNKNOWN_BYTES:
            raise unknown_length_error(url)
        stop, total_bytes = known.bytes if end is None else min(end, known.bytes), known.bytes
        if start >= stop:
            raise changed_error(url, etag, known.etag)

        async def read() -> bytes:
            with self._reports_errors(url):
                content: bytes = await opened.call("cat_file", path, start=start, end=stop, **_seeking(opened.fs))
                check_length(url, content, stop - start, total_bytes)
                return content

        return FilesystemBody(known, read, self._file_timeout_s)

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

    def _reports_errors(self, url: str) -> ReportsErrors:
        return ReportsErrors(url, by_options=bool(self._options) and self._filesystem is None)

    def _open(self, url: str) -> tuple[OpenFilesystem, str]:
        """A filesystem for a url, and the url's path in it."""
        return open_filesystem(url, self._options, self._filesystem)

    def _on_loop(self, url: str) -> tuple[OpenFilesystem, str]:
        """The filesystem for a url on the running loop; opened once for each host, chain or bucket of its own."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._opened = loop, {}
        key = self._key(url)
        opened = self._opened.get(key)
        if opened is None:
            opened, path = self._open(url)
            self._opened[key] = opened
            return opened, path
        return opened, path_in(opened.fs, url)

    def _key(self, url: str) -> str:
        """What urls have in common that the same filesystem reads."""
        return place_of(url) if self._filesystem is None else ""

    def _alone(self, url: str, act: Callable[[OpenFilesystem, str], Coroutine[Any, Any, _Result]]) -> _Result:
        """Do something on a loop that ends with it, again as long as it may succeed; on a thread, where a loop runs."""
        attempts = self._retries.begin(url)

        async def whole() -> _Result:
            opened, path = self._open(url)
            try:
                while True:
                    try:
                        with self._reports_errors(url):
                            answer = await act(opened, path)
                        attempts.progressed()
                        return answer
                    except StorageError as exc:
                        if (wait_s := attempts.wait_s(exc)) is None:
                            raise
                    await asyncio.sleep(wait_s)
            finally:
                await opened.aclose()

        return _run_alone(whole)


def _seeking(fs: Any) -> dict[str, bool]:
    """What `cat_file` of pyarrow's filesystems needs besides, which else cannot seek in a range that begins at 0."""
    from fsspec.implementations.arrow import ArrowFSWrapper

    return {"seekable": True} if any(isinstance(layer, ArrowFSWrapper) for layer in layers(fs)) else {}


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


async def _look(opened: OpenFilesystem, path: str, timeout_s: float) -> ShardInfo:
    url = opened.url(path)
    try:
        found = await opened.call("info", path, timeout_s=timeout_s)
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


# Folders in each other; more of them are a link that leads back to where it lies.
_DEEPEST = 32


async def find_matches(opened: OpenFilesystem, path: str, *, folders: bool) -> Sequence[ShardInfo]:
    """The files, or the folders, that a pattern stands for, in the order of their urls; see `Storage.list`.

    Links count as what they lead to.
    """
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(opened.fs, LocalFileSystem):  # which tells links from files in listings, and can be led round by them
        found = await asyncio.to_thread(LocalStorage().list, path, folders=folders)
        return [_local_info(opened, match, folders=folders) for match in found]
    components = path.split("/")
    first = next((number for number, part in enumerate(components) if is_pattern(part)), len(components) - 1)
    *between, last = pattern_steps(components[first:])
    prefixes = ["/".join(components[:first])]
    for step in between:
        prefixes = [*dict.fromkeys(await _folders(opened, prefixes, step))]
    kind = "directory" if folders else "file"
    entries = [entry for prefix in prefixes for entry in await _level(opened, prefix, last, kind=kind)]
    if folders:
        return [ShardInfo(url, UNKNOWN_BYTES, 0) for url in sorted(opened.url(str(entry["name"])) for entry in entries)]
    return sorted((shard_info(opened.url(entry["name"]), entry) for entry in entries), key=lambda info: info.url)


def _local_info(opened: OpenFilesystem, match: ShardInfo, *, folders: bool) -> ShardInfo:
    """As the filesystem describes it, with the version that it will give to the answers."""
    url = opened.url(match.url)
    if folders or match.bytes == UNKNOWN_BYTES:
        return ShardInfo(url, UNKNOWN_BYTES, 0)
    return shard_info(url, opened.fs.info(match.url))


async def _folders(opened: OpenFilesystem, prefixes: Sequence[str], step: str) -> Iterable[str]:
    """The folders that one step of a pattern, which is not the last, leads to."""
    if step != ANY_FOLDERS:
        return [folder for prefix in prefixes for folder in await _folders_in(opened, prefix, step)]
    found, level = [*prefixes], prefixes
    for _ in range(_DEEPEST):
        level = [folder for prefix in level for folder in await _folders_in(opened, prefix, "*")]
        if not level:
            return found
        found += level
    raise StorageError(
        f"more than {_DEEPEST} folders lie in each other here, so a link leads back to where it lies; "
        "name the folders without `**`",
        url=without_secrets(opened.url(level[0])),
    )


async def _folders_in(opened: OpenFilesystem, folder: str, component: str) -> list[str]:
    entries = await _level(opened, folder, component, kind="directory")
    names = [str(entry["name"]).rstrip("/") for entry in entries]
    return [name for name in names if name.strip("/") != folder.strip("/")]  # an object may mark the folder itself


async def _level(opened: OpenFilesystem, folder: str, component: str, *, kind: str) -> Sequence[dict[str, Any]]:
    """What in a folder matches one component of a pattern; nothing where there is no such folder."""
    try:
        entries = await opened.call("ls", folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [await _followed(opened, entry) for entry in entries if matches(str(entry["name"]), component)]
    return [entry for entry in found if entry.get("type") == kind]


async def _followed(opened: OpenFilesystem, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry itself, or what is known of that to which it leads; what leads nowhere is a file that cannot be read."""
    if entry.get("type") in ("file", "directory"):
        return entry
    try:
        return {**await opened.call("info", entry["name"]), "name": entry["name"]}
    except FileNotFoundError:
        return {"name": entry["name"], "type": "file"}
