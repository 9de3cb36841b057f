"""The storage of local files, by path or by `file://` url."""

from __future__ import annotations

import asyncio
import difflib
import fnmatch
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from urllib.parse import unquote

from streamload.errors import ShardChangedError, ShardNotFoundError, StorageError, TransientStorageError
from streamload.storage.local_files import open_regular, replace_file, why_not_opened
from streamload.storage.patterns import ANY_FOLDERS, pattern_steps
from streamload.storage.protocol import UNKNOWN_BYTES, RangeBody, ShardInfo, is_pattern, protocol_of

_FILE_SCHEME = re.compile(r"file:", re.IGNORECASE)
# A question mark is a pattern here as in any other url, and `#` a letter of a name.
_FILE_URL = re.compile(r"file:(?://(?:localhost)?(?=/)|(?!//))(/.*)", re.IGNORECASE | re.DOTALL)

_CHUNK_BYTES = 1 << 20


class LocalStorage:
    """Files by path or by `file://` url.

    Args:
        durable: `write` waits until the bytes are on the disk.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._durable = durable

    def info(self, url: str) -> ShardInfo:
        """Size and time of one file; see `Storage.info`. A folder or a device is a StorageError."""
        path = local_path(url)
        try:
            found = os.stat(path)
        except OSError as exc:
            raise _storage_error(path, exc) from None
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise StorageError(f"this is {kind}, and a shard must be a file; check the path", url=path)
        return ShardInfo(path, found.st_size, found.st_mtime_ns)

    def absolute(self, url: str) -> str:
        """The absolute path; see `local_path`."""
        return local_path(url)

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """What matches in the file system; see `Storage.list`.

        Symbolic links are followed, by `**` too, except back into a folder that they lie in. What cannot be looked
        at, or is neither file nor folder, is listed with `UNKNOWN_BYTES`.

        Raises:
            StorageError: a folder cannot be listed, so what it holds would be missing.
        """
        path = local_path(pattern)
        if os.path.exists(path) and os.path.isdir(path) == folders:
            return [_listed(path)]  # a name that really holds a bracket or an asterisk
        head, *parts = _split(path)
        *between, last = pattern_steps(parts)
        found = [head]
        for step in between:
            found = [*dict.fromkeys(match for folder in found for match in _folders(folder, step))]
        matches = (match for folder in found for match in _matches(folder, last, folders=folders))
        return [_listed(match) for match in sorted(matches)]

    def is_folder(self, url: str) -> bool:
        """Whether the path is a folder, also behind a symbolic link."""
        return os.path.isdir(local_path(url))

    def open(self, url: str) -> int:
        """A read-only descriptor of a regular file, closed on exec; see `Storage.open`."""
        path = local_path(url)
        try:
            return open_regular(path)
        except OSError as exc:
            raise _storage_error(path, exc) from None

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """See `Storage.read_bytes`."""
        path = local_path(url)
        try:
            with open(open_regular(path), "rb") as file:
                # Not simply so many: a buffer of that size is allocated first.
                content = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
        except OSError as exc:
            raise _storage_error(path, exc) from None
        if len(content) > most_bytes:
            raise StorageError(f"this has more than {most_bytes:,} bytes, so it is not what it should be", url=path)
        return content

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None = None) -> RangeBody:
        """See `Storage.open_range`."""
        del etag  # local files have none
        path = local_path(url)
        descriptor = self.open(path)
        try:
            total_bytes = os.fstat(descriptor).st_size
        except OSError as exc:
            os.close(descriptor)
            raise _storage_error(path, exc) from None
        if start >= max(1, total_bytes):
            os.close(descriptor)
            raise ShardChangedError(f"the file ends at {total_bytes} bytes, before the requested {start}", url=path)
        return _FileRange(path, descriptor, total_bytes, start, total_bytes if end is None else min(end, total_bytes))

    def write(self, url: str, source: bytes | str) -> None:
        """See `Storage.write`; missing folders are made."""
        path = local_path(url)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if isinstance(source, bytes):
                replace_file(path, lambda file: file.write(source), durable=self._durable)
            else:
                with open(source, "rb") as opened:
                    copy = partial(shutil.copyfileobj, opened, length=_CHUNK_BYTES)
                    replace_file(path, copy, durable=self._durable)
        except OSError as exc:
            raise StorageError(
                f"cannot be written: {exc.strerror or exc}; check permissions and free space", url=path
            ) from exc

    def delete(self, url: str) -> None:
        """See `Storage.delete`."""
        path = local_path(url)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StorageError(f"cannot be deleted: {exc.strerror or exc}; check the rights", url=path) from exc

    async def aclose(self) -> None:
        """Nothing is kept open."""


class _FileRange:
    """A range of a local file; it owns the descriptor."""

    etag: str | None = None

    def __init__(self, path: str, descriptor: int, total_bytes: int, start: int, end: int) -> None:
        self.total_bytes = total_bytes
        self._path = path
        self._descriptor = descriptor
        self._start = start
        self._end = end

    async def chunks(self) -> AsyncIterator[bytes]:
        position = self._start
        try:
            while position < self._end:
                wanted_bytes = min(_CHUNK_BYTES, self._end - position)
                chunk = await asyncio.to_thread(os.pread, self._descriptor, wanted_bytes, position)
                if not chunk:
                    raise TransientStorageError(f"the file ends at {position} instead of {self._end}", url=self._path)
                position += len(chunk)
                yield chunk
        except OSError as exc:
            raise _storage_error(self._path, exc) from None
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_LOCAL = LocalStorage()


def storage_for(url: str) -> LocalStorage:
    """The storage of a local url, for what works on local files alone.

    Raises:
        ValueError: the url's scheme is not `file`, or it is a `file://` url of another host.
    """
    if protocol_of(url) != "file":
        raise ValueError(
            f"urls names {url!r}, which this command cannot read: it reads local files only; copy the shards to a "
            "local or mounted folder and give its path"
        )
    local_path(url)
    return _LOCAL


def local_path(url: str) -> str:
    """The absolute path of a local url; symbolic links and `..` stay as they are.

    Raises:
        ValueError: a `file://` url of another host.
    """
    if url.startswith("/"):
        return url
    if _FILE_SCHEME.match(url):
        found = _FILE_URL.match(url)
        if found is None:
            raise ValueError(
                f"urls names {url!r}, but a file url has three slashes and a full path: file:///data/a.tar"
            )
        return unquote(found[1])
    return os.path.join(os.getcwd(), os.path.expanduser(url))


def _listed(path: str) -> ShardInfo:
    try:
        found = os.stat(path)
    except OSError:
        return ShardInfo(path, UNKNOWN_BYTES, 0)
    return ShardInfo(path, found.st_size if stat.S_ISREG(found.st_mode) else UNKNOWN_BYTES, found.st_mtime_ns)


def _split(pattern: str) -> list[str]:
    """The folder before the first glob, and then the components from there on, at least one."""
    components = pattern.split("/")
    first = next((number for number, part in enumerate(components) if is_pattern(part)), len(components) - 1)
    return ["/".join(components[:first]) or "/", *(part for part in components[first:] if part)]


def _folders(folder: str, step: str) -> Iterable[str]:
    """The folders that one step of a pattern, which is not the last, leads to from a folder."""
    return _below(folder) if step == ANY_FOLDERS else _matches(folder, step, folders=True)


def _below(folder: str) -> Iterator[str]:
    """A folder and all folders in it, at any depth, but for hidden ones."""
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while waiting:
        folder, around = waiting.pop()
        try:
            found = os.stat(folder)
        except OSError:
            continue  # there is none, or no longer
        if (found.st_dev, found.st_ino) not in around:
            yield folder
            around |= {(found.st_dev, found.st_ino)}
            waiting += [(inside, around) for inside in _matches(folder, "*", folders=True)]


def _matches(folder: str, component: str, *, folders: bool) -> list[str]:
    """The matches of one component in a folder; none where the folder is missing or is a file."""
    if not is_pattern(component):
        path = os.path.join(folder, component)
        return [path] if os.path.exists(path) and os.path.isdir(path) == folders else []
    wanted = re.compile(fnmatch.translate(component)).match
    hidden = component.startswith(".")
    try:
        with os.scandir(folder) as entries:
            return [
                os.path.join(folder, entry.name)
                for entry in entries
                if wanted(entry.name) and (hidden or not entry.name.startswith(".")) and _is_folder(entry) == folders
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise _storage_error(folder, exc) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


def _storage_error(path: str, exc: OSError) -> StorageError:
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        what = "shard" if "." in os.path.basename(path) else "shard or folder"
        return ShardNotFoundError(f"no such {what}: {_what_is_there(path)}", url=path)
    if isinstance(exc, PermissionError):
        return StorageError("no permission to read this; check the rights of the file and its folders", url=path)
    return StorageError(f"cannot be read: {why_not_opened(exc)}", url=path)


def _what_is_there(path: str) -> str:
    """Advice for a mistyped path: the missing folder, or similar names."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return f"its folder {folder!r} does not exist; check the path"
    except OSError:
        return f"its folder {folder!r} cannot be listed; check the path and its rights"
    close = difflib.get_close_matches(name, sorted(names)[:10_000], n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"nothing in {folder!r} has a name like this"
