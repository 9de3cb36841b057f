"""Folders of caches, which hold what training reads: local, of one user, and for nobody else to read or to write."""

from __future__ import annotations

import os
import re
import stat

from streamload.errors import without_secrets

__all__ = ["make_own_folder", "refuse_url", "why_not_own"]

_ROOT = 0
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")
"""With one slash too, which is what `pathlib` leaves of two."""


def refuse_url(argument: str, folder: str | os.PathLike[str]) -> None:
    """Raises ValueError for a url where the path of a local folder is wanted: it would be taken for a path as well."""
    given = os.fspath(folder)
    if _URL.match(given):
        raise ValueError(
            f"{argument}={without_secrets(given)!r} is a url, and must be the path of a folder on a local disk"
        )


def why_not_own(folder: str) -> str | None:
    """Why what lies in a folder may be another user's, or None: it is not there, or is this user's or root's.

    One of this user's that others may write to is no reason: `make_own_folder` closes it.
    """
    try:
        found = os.stat(folder)
    except OSError:
        return None
    if found.st_uid not in (os.geteuid(), _ROOT):
        return f"{folder!r} belongs to another user (uid {found.st_uid})"
    if found.st_uid != os.geteuid() and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder!r} may be written by other users"
    return None


def make_own_folder(folder: str) -> None:
    """Make a folder for this user alone, or see that one is.

    Raises:
        OSError: it cannot be made, or what is in it may be another user's.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if (why := why_not_own(folder)) is not None:
        raise PermissionError(f"{why}; name a folder of your own")
    found = os.stat(folder)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(folder, stat.S_IMODE(found.st_mode) & ~0o077)
