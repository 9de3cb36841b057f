"""Reading and checking a member of a sample."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from streamload.pack.sources.check import fault_of
from streamload.pack.sources.source import SourceFile

ANY_SIZE = -1
"""A size that is not known."""


class Fault(NamedTuple):
    """A file that cannot be packed, and why."""

    path: str
    reason: str


def load(file: SourceFile, expected_bytes: int = ANY_SIZE) -> tuple[bytes, str | None]:
    """A file's bytes, and why it cannot be packed, or None.

    Args:
        file: the file.
        expected_bytes: its size when it was listed, from which the shards were planned.
    """
    if file.field is None:
        reason = "its extension is not that of an image" if file.decodable else "it has no extension to name its field"
        return b"", reason
    try:
        data = read_regular(file.path)
    except OSError as exc:
        return b"", f"it cannot be read: {exc.strerror or exc}"
    if data is None:
        return b"", "it is not a regular file"
    if expected_bytes not in (ANY_SIZE, len(data)):
        return data, f"it had {expected_bytes:,} bytes when packing began, and has {len(data):,} now"
    return data, fault_of(file.field, data, decodable=file.decodable)


def read_regular(path: str) -> bytes | None:
    """The bytes of a file; None if it is a folder, a pipe or the like. Raises OSError."""
    # Without O_NONBLOCK, opening a named pipe would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        data = os.read(descriptor, found.st_size + 1)
        if len(data) == found.st_size:
            return data
        rest = [data]
        while piece := os.read(descriptor, 1 << 20):
            rest.append(piece)
        return b"".join(rest)
    finally:
        os.close(descriptor)
