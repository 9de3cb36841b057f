"""Where shards lie: a few operations that every storage offers, and the one on local files."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from streamload.errors import ShardNotFoundError, StorageError

__all__ = ["LocalStorage", "RangeBody", "ShardInfo", "Storage", "is_pattern", "same_etag", "storage_for"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FILE_SCHEME = re.compile(r"file:", re.IGNORECASE)
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a storage knows of a shard without reading it.

    Attributes:
        url: the shard; an absolute path where it is local.
        bytes: its size.
        mtime_ns: its time of modification in nanoseconds since the epoch.
        etag: the version of the object where the storage has one; local files have none.
    """

    url: str
    bytes: int
    mtime_ns: int
    etag: str | None = None


class RangeBody(Protocol):
    """The answer to a request for a range, on its way. Whoever gets it reads it to the end or closes it."""

    @property
    def total_bytes(self) -> int:
        """The size of the whole object."""
        ...

    @property
    def etag(self) -> str | None:
        """The version of the object that answers, where the storage has one."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The bytes of the range in order, in pieces of any size, as they arrive; may be called once.

        Raises:
            TransientStorageError: the body broke off, or is not as long as the range. What was given out is right.
        """
        ...

    async def aclose(self) -> None:
        """Give up what has not arrived; its connection is dropped. Twice is fine."""
        ...


class Storage(Protocol):
    """What reading shards needs of a storage. Every failure is a `StorageError` that names the url."""

    def info(self, url: str) -> ShardInfo:
        """Size and version of one shard. Raises ShardNotFoundError where there is none."""
        ...

    def absolute(self, url: str) -> str:
        """The url by which any process finds the same thing, wherever it was started."""
        ...

    def list(self, pattern: str, *, folders: bool = False) -> list[str]:
        """The files (or the folders) that a glob of `*`, `?`, `[...]` stands for, sorted; without hidden ones."""
        ...

    def is_folder(self, url: str) -> bool:
        """Whether the url is a folder rather than a shard."""
        ...

    def open(self, url: str) -> int:
        """A read-only descriptor of the shard, which can be mapped; the caller closes it."""
        ...


class LocalStorage:
    """Files by path or by `file://` url."""

    def info(self, url: str) -> ShardInfo:
        """Size and time of one file; see `Storage.info`. A folder or a device is a StorageError."""
        path = local_path(url)
        try:
            found = os.stat(path)
        except OSError as exc:
            raise _storage_error(path, exc) from exc
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise StorageError(f"this is {kind}, and a shard must be a file; check the path", url=path)
        return ShardInfo(path, found.st_size, found.st_mtime_ns)

    def absolute(self, url: str) -> str:
        """The absolute path; see `local_path`."""
        return local_path(url)

    def list(self, pattern: str, *, folders: bool = False) -> list[str]:
        """What matches in the file system; see `Storage.list`. `**` is no more than `*`."""
        path = local_path(pattern)
        if os.path.exists(path) and os.path.isdir(path) == folders:
            return [path]  # a name that really holds a bracket or an asterisk
        head, *parts = _split(path)
        found = [head]
        for part in parts[:-1]:
            found = [match for folder in found for match in _matches(folder, part, folders=True)]
        return sorted(match for folder in found for match in _matches(folder, parts[-1], folders=folders))

    def is_folder(self, url: str) -> bool:
        """Whether the path is a folder, also behind a symbolic link."""
        return os.path.isdir(local_path(url))

    def open(self, url: str) -> int:
        """A read-only descriptor, closed on exec; see `Storage.open`."""
        path = local_path(url)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise _storage_error(path, exc) from exc


_LOCAL = LocalStorage()


def storage_for(url: str) -> Storage:
    """The storage that a url belongs to.

    Raises:
        ValueError: the url's scheme is not `file`, or it is a `file://` url of another host.
    """
    scheme = _SCHEME.match(url) if "://" in url else None
    if scheme is not None and scheme[1].lower() != "file":
        raise ValueError(
            f"urls names {url!r}, but remote storage ({scheme[1]}://) is not supported yet by this version of "
            "streamload; copy the shards to a local or mounted folder and give its path"
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
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(
                f"urls names {url!r}, but a file url has three slashes and a full path: file:///data/a.tar"
            )
        return unquote(parts.path)
    return os.path.join(os.getcwd(), os.path.expanduser(url))


def is_pattern(url: str) -> bool:
    """Whether a url holds `*`, `?` or `[`."""
    return _GLOB.search(url) is not None


def _split(pattern: str) -> list[str]:
    """The folder before the first glob, and then the components from there on, at least one."""
    components = pattern.split("/")
    first = next((number for number, part in enumerate(components) if is_pattern(part)), len(components) - 1)
    return ["/".join(components[:first]) or "/", *(part for part in components[first:] if part)]


def _matches(folder: str, component: str, *, folders: bool) -> list[str]:
    """What in a folder matches one component of a pattern; nothing where the folder is missing or is a file."""
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
                if wanted(entry.name) and (hidden or not entry.name.startswith(".")) and entry.is_dir() == folders
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise _storage_error(folder, exc) from exc


def _storage_error(path: str, exc: OSError) -> StorageError:
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return ShardNotFoundError(f"no such shard: {_what_is_there(path)}", url=path)
    if isinstance(exc, PermissionError):
        return StorageError("no permission to read this; check the rights of the file and its folders", url=path)
    return StorageError(f"cannot be read: {exc.strerror or exc}; check the disk and the path", url=path)


def _what_is_there(path: str) -> str:
    """What would help whoever mistyped a path: the folder that is missing, or the names that are like it."""
    folder, name = os.path.split(path)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return f"its folder {folder!r} does not exist; check the path"
    except OSError:
        return f"its folder {folder!r} cannot be listed; check the path and its rights"
    close = difflib.get_close_matches(name, sorted(names)[:10_000], n=3)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"nothing in {folder!r} has a name like this"


def same_etag(one: str | None, other: str | None) -> bool:
    """Whether two ETags can be of the same version; quotes don't count, and what is not known differs from nothing."""
    return one is None or other is None or _bare(one) == _bare(other)


def _bare(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
