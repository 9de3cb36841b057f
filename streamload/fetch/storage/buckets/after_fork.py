"""Refuses obstore in a fork of a process that has used it: its threads are the parent's, and it would wait for ever."""

from __future__ import annotations

import os

from streamload.errors import StorageError
from streamload.fetch.storage.protocol import without_secrets

__all__ = ["use_here"]

_used_by: list[int] = []


def use_here(url: str) -> None:
    """Note that this process uses obstore.

    Raises:
        StorageError: it was forked from one that has.
    """
    process = os.getpid()
    if not _used_by:
        _used_by.append(process)
    elif _used_by[0] != process:
        raise StorageError(
            "this process was forked from one that has read from a storage, and would wait for ever here; give the "
            "loader num_workers=1 or more, so that a process of its own reads, or start this one by spawn",
            url=without_secrets(url),
        )
