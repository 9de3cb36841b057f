"""Which shards are compressed, by the ends of their names."""

from __future__ import annotations

import re

__all__ = ["compression_name", "is_compressed"]

_SUFFIX = re.compile(
    r"\.(?:(?P<GZIP>tgz|tar\.gz)|(?P<ZSTD>tzst|tar\.zstd?)|(?P<XZ>txz|tar\.xz)|(?P<BZIP2>tbz2?|tar\.bz2))\Z",
    re.IGNORECASE,
)
_QUERY = re.compile(r"[?#].*", re.DOTALL)


def compression_name(url: str) -> str | None:
    """`GZIP`, `ZSTD`, `XZ` or `BZIP2` by the end of a name in any case; None where it is none of them.

    What follows a `?` or `#` in a url with a scheme is no part of the name.
    """
    match = _SUFFIX.search(_QUERY.sub("", url) if "://" in url else url)
    return None if match is None else match.lastgroup


def is_compressed(url: str) -> bool:
    """Whether the size of a shard is another one than that of the archive in it."""
    return compression_name(url) is not None
