"""The names of shards: folder and last component of a url, and what names are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

from streamload.storage.protocol import protocol_of, without_secrets
from streamload.storage.urls import chain_links

__all__ = [
    "WEB",
    "folder_and_name",
    "is_shard_name",
    "refuse_repetitions",
    "refuse_unknown_compression",
    "shard_name",
]

_SHARD = re.compile(r"\.(?:tar|(?i:tar\.(?:gz|bz2|xz|zst|zstd)|tgz|tbz2?|txz|tzst))(?:::.*)?\Z")
_UNKNOWN_COMPRESSION = re.compile(r"\.tar\.(?:lz4|lzma|br)\Z", re.IGNORECASE)

WEB = ("http", "https")
"""Protocols whose storages do not list."""


def folder_and_name(url: str) -> tuple[str, str]:
    """A shard's url without its last component, and that component as an index knows it."""
    if not ("%" in url or "?" in url or "::" in url):
        folder, _, name = url.rpartition("/")
        return folder or "/", name
    web = protocol_of(url) in WEB
    folder = url.split("?", 1)[0] if web else url
    chain = chain_links(folder)
    first = next((number for number, part in enumerate(chain) if "://" in part), 0)
    chain[first], _, name = chain[first].rpartition("/")
    return "::".join(chain) or "/", unquote(name) if web and "%" in name else name


def shard_name(url: str) -> str:
    """The last component of a shard's url."""
    return folder_and_name(url)[1]


def is_shard_name(name: str) -> bool:
    """Whether a name ends as a tar archive's does, compressed or not."""
    return _SHARD.search(name) is not None


def refuse_unknown_compression(url: str) -> None:
    """Raises ValueError for a shard that is compressed in a way that cannot be read."""
    if _UNKNOWN_COMPRESSION.search(url):
        raise ValueError(
            f"urls names {without_secrets(url)!r}, but shards compressed this way are not supported; decompress them, "
            "or use gz, zst, xz or bz2"
        )


def refuse_repetitions(found: Sequence[str]) -> None:
    """Raises ValueError if a shard is named twice."""
    plain = [os.path.normpath(url) if url.startswith("/") else url for url in found]
    if len(set(plain)) == len(plain):
        return
    seen: set[str] = set()
    for path in plain:
        if path in seen:
            raise ValueError(
                f"urls names the shard {without_secrets(path)!r} twice, which would give each of its samples twice; "
                "remove one of them (to see samples more often, iterate more often)"
            )
        seen.add(path)
