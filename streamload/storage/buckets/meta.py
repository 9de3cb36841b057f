"""What obstore says of an object, as our size, time and version."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from streamload.storage.protocol import ShardInfo, version_of

__all__ = ["info_of", "version_in"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def info_of(url: str, meta: Mapping[str, Any]) -> ShardInfo:
    """What is known of a shard by a listing, or by the head of an answer."""
    changed: datetime = meta["last_modified"]
    # Whole seconds, since a listing may be finer than the header of an answer.
    mtime_ns = (changed - _EPOCH) // timedelta(seconds=1) * 1_000_000_000
    return ShardInfo(url, meta["size"], mtime_ns, version_in(meta))


def version_in(meta: Mapping[str, Any]) -> str | None:
    """The version of the object that was asked for; see `version_of`."""
    return version_of(meta["e_tag"], meta["last_modified"], meta["size"])
