"""Where shards lie: the operations that every storage offers, and the values that they give."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import lru_cache
from glob import escape
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from streamload.storage.urls import chain_links

UNKNOWN_BYTES = -1
"""The size of a shard where only a request for that shard would give it."""

# What was changed more recently may be changed again within the second; and some servers always say that it is now.
_RESOLVED_S = 60.0

_GLOB = re.compile(r"[*?\[]")
_IPV6_HOST = re.compile(r"://(?:[^/]*@)?\[[^\[\]/]*\]")
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class ShardInfo(NamedTuple):
    """What a storage knows of a shard without reading it; a tuple, because there may be hundreds of thousands.

    Attributes:
        url: the shard; an absolute path where it is local.
        bytes: its size; `UNKNOWN_BYTES` where the storage cannot say.
        mtime_ns: its time of modification in nanoseconds since the epoch; 0 where the storage has none.
        etag: the version of the object where the storage has one; local files have none.
    """

    url: str
    bytes: int
    mtime_ns: int
    etag: str | None = None


class RangeBody(Protocol):
    """The answer to a request for a range, in flight. Whoever gets it reads it to the end or closes it."""

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

        An empty piece says that the storage makes progress on the way to the next one.

        Raises:
            TransientStorageError: the body broke off, or is not as long as the range. What was given out is right.
        """
        ...

    async def aclose(self) -> None:
        """Abandon what has not arrived, and drop the connection. Idempotent."""
        ...


class WholeBody:
    """A range that was read whole; see `RangeBody`."""

    def __init__(self, content: bytes, total_bytes: int, etag: str | None) -> None:
        self.total_bytes = total_bytes
        self.etag = etag
        self._content = content

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`."""
        if self._content:
            yield self._content

    async def aclose(self) -> None:
        """Nothing to give up."""


class Storage(Protocol):
    """What reading and writing shards needs of a storage. Every failure is a `StorageError` that names the url.

    The blocking methods must not be called from the thread of a running event loop.
    """

    def info(self, url: str) -> ShardInfo:
        """Size and version of one shard. Raises ShardNotFoundError where there is none."""
        ...

    def absolute(self, url: str) -> str:
        """The url by which any process finds the same thing, wherever it was started."""
        ...

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """The files (or the folders) that a glob of `*`, `?`, `[...]` stands for, sorted by url, each once.

        `**` as a whole component is any number of folders, none included. Names that begin with a dot are found by
        components that do, and `**` enters no such folder.
        """
        ...

    def is_folder(self, url: str) -> bool:
        """Whether something lies below the url as in a folder; costs one request where the storage is remote."""
        ...

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """A small file whole.

        Raises:
            ShardNotFoundError: there is none.
            StorageError: it has more than `most_bytes`, or cannot be read.
        """
        ...

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> RangeBody:
        """Request the bytes from `start` to `end` (exclusive; None for all that follow; cut at the object's end).

        Args:
            url: the shard.
            start: the first byte; the object must have it, unless it is 0 and the object is empty.
            end: one past the last byte.
            etag: the version that the object must still have; None takes any.

        Raises:
            ShardNotFoundError: the object is gone.
            ShardChangedError: it is another version, or too short for `start`.
            TransientStorageError: the request may succeed when it is made again.
            StorageError: it will not.
        """
        ...

    def write(self, url: str, source: bytes | str) -> None:
        """Write a file whole or not at all: bytes, or what a local file (given by its path) holds."""
        ...

    def delete(self, url: str) -> None:
        """Delete a file; it is no error that there is none."""
        ...

    async def aclose(self) -> None:
        """Close the connections that reading from the running loop has opened; reading again opens new ones."""
        ...


def is_pattern(url: str) -> bool:
    """Whether a url holds `*`, `?` or `[`; of an http url only `*` counts, since the others have another meaning."""
    if url.startswith(("http://", "https://")):
        return "*" in url and "*" in urlsplit(url).path
    return _GLOB.search(_IPV6_HOST.sub("", url)) is not None


def escaped(url: str) -> str:
    """The pattern that stands for one url only; a host in brackets stays as it is."""
    host = _IPV6_HOST.search(url)
    return escape(url) if host is None else url[: host.end()] + escape(url[host.end() :])


def matches(path: str, component: str) -> bool:
    """Whether the name at the end of a path matches one component of a pattern; hidden names match hidden ones only."""
    name = path.rstrip("/").rpartition("/")[2]
    if name.startswith(".") and not component.startswith("."):
        return False
    return _named(component).match(name) is not None


@lru_cache(64)
def _named(component: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(component))


def protocol_of(url: str) -> str:
    """The lower-cased protocol before `://`, or `file` for a path."""
    found = _PROTOCOL.match(url)
    return found[1].lower() if found else "file"


def place_of(url: str) -> str:
    """The common part of urls of one filesystem: protocol and host; for chained urls the whole folder."""
    return url.rpartition("/")[0] if len(chain_links(url)) > 1 else "/".join(url.split("/", 3)[:3])


def quoted(etag: str | None) -> str | None:
    """An ETag with its quotes, which some servers leave out in listings."""
    return etag if etag is None or etag.startswith(('"', "W/")) else f'"{etag}"'


def version_of(etag: str | None, changed: datetime | None, total_bytes: int) -> str | None:
    """The version of an object by an answer: its ETag, else one made of time and size; None where these say nothing.

    What is made is a weak ETag, which no request holds the server to: it has not given it.
    """
    if etag is not None or changed is None:
        return quoted(etag)
    changed_s = changed.timestamp()
    if changed_s <= 0 or datetime.now(UTC).timestamp() - changed_s < _RESOLVED_S:
        return None
    return f'W/"{int(changed_s):x}-{total_bytes:x}"'


def same_etag(one: str | None, other: str | None) -> bool:
    """Whether two ETags can be of the same version; quotes don't count, and what is not known differs from nothing."""
    return one is None or other is None or _bare(one) == _bare(other)


def _bare(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
