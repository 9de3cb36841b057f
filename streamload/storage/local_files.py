"""Local files: the storage of paths and `file://` urls, atomic replacement, and folders private to one user."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO
from urllib.parse import unquote

from streamload.errors import ShardNotFoundError, StorageError, without_secrets
from streamload.storage.errors import answer_error, check_length, check_small, close_matches
from streamload.storage.protocol import UNKNOWN_BYTES, Entry, RangeBody, ShardInfo, find_entries

_ROOT_UID = 0
_CHUNK_BYTES = 1 << 20
# One slash is enough, since `pathlib` drops the other.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")
# `?` is a wildcard, as in other urls; `#` is part of a name.
_FILE_URL = re.compile(r"file:(?://(?:localhost)?(?=/)|(?!//))(/.*)", re.IGNORECASE | re.DOTALL)


# -- files and folders ---------------------------------------------------------------------------------------------


def replace_file(path: str, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Write a file under a hidden temporary name in its own folder, then rename it.

    On an error, the temporary file is removed and a previous file at `path` stays. If `durable`, the bytes are flushed
    to disk before renaming.

    Raises:
        OSError: the folder is missing, cannot be written or is full; the error's filename is `path`.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    # Not `tempfile`, whose files only the owner can read: here permissions follow the umask.
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as exc:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(exc, OSError):
            exc.filename, exc.filename2 = path, None
        raise


def refuse_url(argument: str, folder: str | os.PathLike[str]) -> None:
    """Raise ValueError for a url in place of a local folder."""
    path = os.fspath(folder)
    if _URL.match(path):
        raise ValueError(
            f"{argument}={without_secrets(path)!r} is a url, but must be the path of a folder on a local disk"
        )


def why_not_private(folder: str) -> str | None:
    """Return why a folder may hold other users' files; None if it is missing or this user's, or only root can write."""
    try:
        status = os.lstat(folder)
    except OSError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return f"{folder!r} is a symbolic link"
    if status.st_uid not in (os.geteuid(), _ROOT_UID):
        return f"{folder!r} belongs to another user (uid {status.st_uid})"
    if status.st_uid != os.geteuid() and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder!r} may be written by other users"
    return None


def make_private_folder(folder: str) -> None:
    """Make a folder for this user alone. Raises OSError for a link, or a folder that may hold files of another user."""
    if not os.path.islink(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if (why := why_not_private(folder)) is not None:
        raise PermissionError(f"{why}; name a folder of your own")
    status = os.stat(folder)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
        os.chmod(folder, stat.S_IMODE(status.st_mode) & ~0o077)


# -- the storage ---------------------------------------------------------------------------------------------------


def local_path(url: str) -> str:
    """Return a local url's absolute path. Raises ValueError for a `file:` url with another host or a relative path."""
    if url.startswith("/"):
        return url
    if url[:5].lower() == "file:":
        match = _FILE_URL.match(url)
        if match is None:
            raise ValueError(
                f"urls names {url!r}, but a file url has three slashes and a full path: file:///data/a.tar"
            )
        return unquote(match[1])
    return os.path.join(os.getcwd(), os.path.expanduser(url))


def open_regular(url: str) -> tuple[int, os.stat_result]:
    """Open a regular file; return its read-only descriptor and its status. Raises StorageError."""
    path = local_path(url)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise _storage_error(path, exc) from None
    status = os.fstat(descriptor)
    try:
        _check_regular(path, status.st_mode)
    except StorageError:
        os.close(descriptor)
        raise
    return descriptor, status


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """Read and write files by path or `file://` url; if `durable`, `write` waits until the bytes are on disk."""

    durable: bool = True

    def info(self, url: str) -> ShardInfo:
        """Return size and time of a file."""
        path = local_path(url)
        try:
            status = os.stat(path)
        except OSError as exc:
            raise _storage_error(path, exc) from None
        _check_regular(path, status.st_mode)
        return ShardInfo(path, status.st_size, status.st_mtime_ns)

    def absolute(self, url: str) -> str:
        """Return the absolute path."""
        return local_path(url)

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """Return the matches, also through symbolic links. Matches that are not regular files have `UNKNOWN_BYTES`."""
        path = local_path(pattern)
        if os.path.exists(path) and os.path.isdir(path) == folders:
            return [_listed(path)]  # not a pattern, even if it holds a bracket or an asterisk
        return [_listed(entry.path) for entry in find_entries(path, _level, folders=folders, root="/")]

    def is_folder(self, url: str) -> bool:
        """Return True if the path is a folder, or a link to one."""
        return os.path.isdir(local_path(url))

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """Read a small file whole."""
        path = local_path(url)
        descriptor, status = open_regular(path)
        with open(descriptor, "rb") as file:
            try:
                # `read(most_bytes)` would first allocate a buffer of that size.
                content = file.read(min(most_bytes, status.st_size) + 1)
            except OSError as exc:
                raise _storage_error(path, exc) from None
        check_small(path, len(content), most_bytes)
        return content

    async def open_range(self, url: str, start: int, end: int | None) -> RangeBody:
        """Open a range of a file."""
        path, total_bytes = local_path(url), self.info(url).bytes
        if start >= max(1, total_bytes):
            raise answer_error(path, 416)
        stop = total_bytes if end is None else min(end, total_bytes)

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                with open(open_regular(path)[0], "rb", buffering=0) as file:
                    for position in range(start, stop, _CHUNK_BYTES):
                        piece_bytes = min(_CHUNK_BYTES, stop - position)
                        piece = await asyncio.to_thread(os.pread, file.fileno(), piece_bytes, position)
                        check_length(path, piece, piece_bytes, total_bytes)
                        yield piece
            except OSError as exc:
                raise _storage_error(path, exc) from None

        return RangeBody(total_bytes, None, pieces())

    def write(self, url: str, source: bytes | str) -> None:
        """Write bytes, or copy a file; create missing folders."""
        path = local_path(url)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as opened:
                replace_file(path, partial(shutil.copyfileobj, opened, length=_CHUNK_BYTES), durable=self.durable)
        except OSError as exc:
            raise StorageError(
                f"cannot be written: {exc.strerror or exc}; check permissions and free space", url=path
            ) from exc

    def delete(self, url: str) -> None:
        """Delete a file, if it exists."""
        path = local_path(url)
        try:
            os.unlink(path)
        except OSError as exc:
            if not isinstance(exc, FileNotFoundError):
                raise StorageError(f"cannot be deleted: {exc.strerror or exc}; check permissions", url=path) from exc

    async def aclose(self) -> None:
        """Do nothing."""


def _check_regular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
    raise StorageError(f"this is {kind}, but a shard must be a file; check the path", url=path)


def _listed(path: str) -> ShardInfo:
    try:
        status = os.stat(path)
    except OSError:
        return ShardInfo(path, UNKNOWN_BYTES, 0)
    return ShardInfo(path, status.st_size if stat.S_ISREG(status.st_mode) else UNKNOWN_BYTES, status.st_mtime_ns)


def _level(folder: str) -> Iterator[Entry]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
                yield Entry(entry.path, is_folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as exc:
        raise _storage_error(folder, exc) from None


def _storage_error(path: str, exc: OSError) -> StorageError:
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        what = "shard" if "." in os.path.basename(path) else "shard or folder"
        folder, name = os.path.split(path)
        if os.path.islink(path):
            return ShardNotFoundError(f"the link leads to {os.readlink(path)!r}, which does not exist", url=path)
        try:
            advice = close_matches(name, os.listdir(folder), folder)
        except (FileNotFoundError, NotADirectoryError):
            advice = f"its folder {folder!r} does not exist; check the path"
        except OSError:
            advice = f"its folder {folder!r} cannot be listed; check the path and its permissions"
        return ShardNotFoundError(f"no such {what}: {advice}", url=path)
    if isinstance(exc, PermissionError):
        return StorageError("no permission to read this; check the permissions of the file and its folders", url=path)
    advice = "check the path, the disk and free memory"
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        advice = "close files or loaders that are not needed, or raise the limit (`ulimit -n`)"
    return StorageError(f"cannot be read: {exc.strerror or exc}; {advice}", url=path)
