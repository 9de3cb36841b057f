"""One shard of a dataset, as it was listed."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Shard"]


class Shard(NamedTuple):
    """One shard of a dataset; a tuple, because hundreds of thousands of them go to the feeder at once.

    Attributes:
        url: where it lies; an absolute path where it is local.
        name: the last component of the url, by which an index knows it.
        bytes: its size; `UNKNOWN_BYTES` where only reading tells it.
        mtime_ns: its time of modification in nanoseconds since the epoch; 0 where it is not known.
        folder: the url without its last component.
        etag: its version in the storage, where it is known.
    """

    url: str
    name: str
    bytes: int
    mtime_ns: int
    folder: str
    etag: str | None = None
