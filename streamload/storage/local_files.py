"""Local files and folders: replaced atomically, opened only if regular, and private to one user."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from typing import BinaryIO

from streamload.errors import without_secrets


def replace_file(path: str, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Write a file under a hidden temporary name in its own folder, then move it to its place.

    Args:
        path: the file to make or to replace.
        write: called once, with the open file to write to.
        durable: True waits until the bytes are on the disk before the move, so that a crash of the machine cannot
            leave a file with its name but without its bytes.

    Raises:
        OSError: the folder does not exist, cannot be written or is full; its filename is `path`. Whatever else `write`
            raises comes through. In either case the temporary file is gone, and what was at `path` before is there.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    # Not `tempfile`: its files are for the owner only, and these are for everyone whom the umask lets in.
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


def open_regular(path: str) -> int:
    """A read-only descriptor of a regular file, closed on exec.

    Raises:
        OSError: it cannot be opened, or is no regular file. A pipe in place of a file is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "this is a folder, not a file" if stat.S_ISDIR(mode) else "this is not a regular file"
            raise OSError(errno.EINVAL, what, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def why_not_opened(exc: OSError) -> str:
    """What went wrong where a file that is there could not be opened or read, and what to do about it."""
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        advice = "close files or loaders that are not needed, or raise the limit (`ulimit -n`)"
    elif exc.errno in (errno.EACCES, errno.EPERM):
        advice = "check the rights of the file and its folders"
    elif exc.errno == errno.ENOMEM:
        advice = "free some memory, or use fewer workers"
    else:
        advice = "check the path and the disk"
    return f"{exc.strerror or exc}; {advice}"


_ROOT = 0
# With one slash too, which is what `pathlib` leaves of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")


def refuse_url(argument: str, folder: str | os.PathLike[str]) -> None:
    """Raises ValueError for a url where the path of a local folder is wanted: it would be taken for a path as well."""
    given = os.fspath(folder)
    if _URL.match(given):
        raise ValueError(
            f"{argument}={without_secrets(given)!r} is a url, and must be the path of a folder on a local disk"
        )


def why_not_private(folder: str) -> str | None:
    """Return why a folder may hold what another user or program put there; None if it is missing or private.

    A folder of this user that others may write to is no reason: `make_private_folder` closes it.
    """
    try:
        found = os.lstat(folder)
    except OSError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return f"{folder!r} is a symbolic link"
    if found.st_uid not in (os.geteuid(), _ROOT):
        return f"{folder!r} belongs to another user (uid {found.st_uid})"
    if found.st_uid != os.geteuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder!r} may be written by other users"
    return None


def make_private_folder(folder: str) -> None:
    """Make a folder for this user alone, or check that an existing one is.

    Raises:
        OSError: it cannot be made, is a link, or may hold what another user put there.
    """
    if not os.path.islink(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    if (why := why_not_private(folder)) is not None:
        raise PermissionError(f"{why}; name a folder of your own")
    found = os.stat(folder)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(folder, stat.S_IMODE(found.st_mode) & ~0o077)
