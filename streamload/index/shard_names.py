"""The names of shards: of a url, and of the numbered shards that a writer makes, finds and removes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from streamload.errors import without_secrets
from streamload.storage.protocol import protocol_of
from streamload.storage.urls import chain_links

_SHARD = re.compile(r"\.(?:tar|tar\.(?:gz|bz2|xz|zst|zstd)|tgz|tbz2?|txz|tzst)(?:::.*)?\Z", re.IGNORECASE)
_UNKNOWN_COMPRESSION = re.compile(r"\.(?:tar\.(?:z|lz|lz4|lzo|lzma|lrz|br|sz|7z|zip|rar)|taz|tlz)\Z", re.IGNORECASE)

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
    """Return True if a name ends as a tar archive's does, compressed or not."""
    return name.endswith(".tar") or _SHARD.search(name) is not None


def refuse_unknown_compression(url: str) -> None:
    """Raise ValueError for an unsupported compression."""
    if not url.endswith(".tar") and _UNKNOWN_COMPRESSION.search(url):
        raise ValueError(
            f"urls names {without_secrets(url)!r}, but shards compressed this way are not supported; decompress them, "
            "or use gz, zst, xz or bz2"
        )


# What `normpath` changes of an absolute path is at such places.
_UNTIDY = re.compile(r"//|/\.|/\Z")


def refuse_repetitions(found: Sequence[str]) -> None:
    """Raise ValueError if a shard is named twice."""
    plain = [os.path.normpath(url) if url.startswith("/") and _UNTIDY.search(url) else url for url in found]
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


_NUMBER = re.compile(r"%0?(\d*)d")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ShardNaming:
    """A name such as `shard-%06d.tar`, taken apart; or, without a number, any visible name such as `*.tar`.

    Attributes:
        before: the text before the number.
        digits: the least number of digits; None where any text takes the number's place.
        after: the text after the number.
    """

    before: str
    digits: int | None
    after: str

    def name(self, number: int) -> str:
        """The name of one shard, where names are numbered."""
        return f"{self.before}{number:0{self.digits}d}{self.after}"

    def matches(self, name: str) -> bool:
        """Whether a name has this form."""
        number = name[len(self.before) : len(name) - len(self.after)]
        if self.digits is None:
            return name == f"{self.before}{number}{self.after}" and not name.startswith(".")
        return (
            name == f"{self.before}{number}{self.after}"
            and len(number) >= max(1, self.digits)
            and number.isascii()
            and number.isdigit()
        )


def destination_of(pattern_or_folder: str | os.PathLike[str], prefix: str) -> tuple[str, ShardNaming]:
    """The folder and the names that a writer is to use.

    Args:
        pattern_or_folder: a path that ends in `.tar` and holds one `%06d`, or a folder.
        prefix: how names begin in a folder.

    Raises:
        TypeError, ValueError: the pattern has no number or two, is hidden, or the prefix is no visible name.
    """
    path = os.fspath(pattern_or_folder) if isinstance(pattern_or_folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise TypeError(f"pattern_or_folder must be a non-empty string or path, not {pattern_or_folder!r}")
    folder, name = os.path.split(path)
    if not name.endswith(".tar"):
        if not prefix or prefix.startswith(".") or "/" in prefix or _CONTROL.search(prefix):
            raise ValueError(f"prefix must be a visible file name without '/', not {prefix!r}")
        return path, ShardNaming(f"{prefix}-", 6, ".tar")
    numbers = list(_NUMBER.finditer(name))
    if len(numbers) != 1 or name.startswith("."):
        raise ValueError(
            f"pattern_or_folder is {path!r}; a pattern needs exactly one %06d for the shard's number, "
            "as in 'out/train-%06d.tar', and must not be hidden"
        )
    number = numbers[0]
    return folder or ".", ShardNaming(name[: number.start()], int(number[1] or 0), name[number.end() :])
