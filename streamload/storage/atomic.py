"""A file that appears whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from typing import BinaryIO

__all__ = ["replace_file"]


def replace_file(path: str, write: Callable[[BinaryIO], object], *, durable: bool = True, mode: int = 0o666) -> None:
    """Write a file under a hidden temporary name in its own folder, then move it to its place.

    Args:
        path: the file to make or to replace.
        write: called once, with the open file to write to.
        durable: True waits until the bytes are on the disk before the move, so that a crash of the machine cannot
            leave a file with its name but without its bytes.
        mode: who may read and write it, as far as the umask allows.

    Raises:
        OSError: the folder does not exist, cannot be written or is full. Whatever `write` raises comes through.
            In either case the temporary file is gone and what was at `path` before is still there.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.tmp")
    # Not `tempfile`: its files are for the owner only, and these are for everyone whom the umask lets in.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
