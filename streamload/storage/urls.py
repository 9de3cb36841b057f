"""What a user writes for a dataset, expanded to a flat list of urls; nothing is looked up.

Braces follow bash (`{000000..000123}` keeps its zeros, `{a,b}`, nested) and `::` separates urls within one string,
as in WebDataset; chains of fsspec stay whole. Both mean the same in a lone string, in a path and in a list of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import pairwise

from braceexpand import braceexpand

from streamload.errors import without_secrets

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

MAX_URLS = 10_000_000
"""More urls than this are taken for a slip of the pen, and refused before they fill the memory."""

_RUNS_A_PROGRAM = re.compile(r"\s*(?:pipe|cmd|exec|shell|sh)\s*:(?!//)|\s*\||.*\|\s*\Z", re.IGNORECASE | re.DOTALL)
# Protocols of fsspec whose files lie in what stands behind the `::`.
_ARCHIVES = frozenset(("zip", "tar", "libarchive"))

CACHING = frozenset(("simplecache", "filecache", "blockcache", "cached"))
"""Protocols of fsspec that keep copies of files, which are refused: `cache_dir` does that."""

# Protocols of fsspec that stand alone before a `::`.
_WRAPPERS = frozenset(("dir", *CACHING, *_ARCHIVES))

# Separates urls, and the links of a chain; what stands in brackets is part of an IPv6 address.
_LINK = re.compile(r"::(?![^\[\]/]*\])")

_WORD = re.compile(r"[A-Za-z]\w*")

# What stands for itself and does nothing, as most of the urls in long lists do: found out in one step.
_PLAIN = re.compile(r"(?:[a-z0-9]+://[\w.-]+(?::\d+)?/)?[\w./-]+")

_CHARACTER_RANGE = re.compile(r"[A-Za-z]\.\.[A-Za-z](?:\.\.-?\d+)?\Z")
_INT_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\Z")


def expand_urls(urls: Urls) -> list[str]:
    """Expand braces and `::` in a string, a path, or a list of them.

    Globs and folders stay as they are: what they stand for is known only to the storage. A backslash before a brace
    keeps that brace; in strings without braces a backslash is an ordinary character.

    Args:
        urls: one string or path, or a sequence of them.

    Returns:
        At least one url, in the order in which they are written. Repetitions are kept.

    Raises:
        TypeError: `urls` or one of its items is neither a string nor a path.
        ValueError: nothing is named, a url is empty, braces don't match, there are more than `MAX_URLS`, or a url
            would run a program (`pipe:`).
    """
    expanded: list[str] = []
    for argument, written in _strings(urls):
        if _PLAIN.fullmatch(written) and len(expanded) < MAX_URLS:
            expanded.append(written)
            continue
        _refuse_programs(argument, written)
        _refuse_unknown_prefixes(argument, written)
        for part in _parts(written):
            if len(expanded) + _count(part) > MAX_URLS:
                raise ValueError(
                    f"{argument} stands for more than {MAX_URLS:,} urls: {_shown(written)}; "
                    "check the ranges in its braces"
                )
            for url in _expand_braces(argument, part):
                _refuse_programs(argument, url)
                if not url.strip():
                    raise ValueError(
                        f"{argument} holds an empty url: {_shown(written)}; "
                        "each must name a shard, a pattern or a folder"
                    )
                expanded.append(url)
    return expanded


def as_strings(urls: Urls) -> tuple[str, ...]:
    """What was given, as it is written; raises what `expand_urls` raises for what is no string and no path."""
    return tuple(written for _, written in _strings(urls))


def chain_links(url: str) -> list[str]:
    """What `::` separates: the links of one of fsspec's chains, or the url alone. `http://[::1]/a.tar` is no chain."""
    return _LINK.split(url) if "::" in url else [url]


def _parts(written: str) -> list[str]:
    """What `::` separates, with fsspec's chains kept whole: `zip://a.tar::s3://b/z.zip`."""
    parts: list[str] = []
    chain = ""
    for piece in chain_links(written):
        if piece in _WRAPPERS or piece.split("://", 1)[0] in _ARCHIVES:
            chain += f"{piece}::"
        else:
            parts.append(chain + piece)
            chain = ""
    return [*parts, chain.removesuffix("::")] if chain else parts


def _refuse_unknown_prefixes(argument: str, written: str) -> None:
    """Refuse a lone word before a remote url: as two urls, it would be a path that is not there."""
    for word, following in pairwise(chain_links(written)):
        if "://" in following and _WORD.fullmatch(word) and word not in _WRAPPERS:
            raise ValueError(
                f"{argument} has the unknown prefix {word}:: in {_shown(written)}; leave it out (if {word} is a "
                f"folder, write ./{word})"
            )


def _strings(urls: object) -> list[tuple[str, str]]:
    """Each string that was given, with the name of the argument for messages."""
    if isinstance(urls, str | os.PathLike):
        items: list[tuple[str, object]] = [("urls", urls)]
    elif isinstance(urls, Sequence) and not isinstance(urls, bytes | bytearray | memoryview):
        items = [(f"urls[{number}]", item) for number, item in enumerate(urls)]
    else:
        said = f"urls must be a string, a path, or a list of them, not {type(urls).__name__}: {_shown(urls)}"
        if any(kind.__name__ == "Dataset" for kind in type(urls).__mro__):
            said += "; a Dataset goes to torch's DataLoader, or is packed into shards with streamload.ShardWriter"
        raise TypeError(said)
    if not items:
        raise ValueError(f"urls is empty ({urls!r}); name at least one shard, pattern or folder")
    return [(argument, _string(argument, item)) for argument, item in items]


def _string(argument: str, item: object) -> str:
    path = os.fspath(item) if isinstance(item, os.PathLike) else item
    if not isinstance(path, str):
        raise TypeError(f"{argument} must be a string or a path, not {type(path).__name__}: {_shown(item)}")
    if "\0" in path:
        raise ValueError(f"{argument} holds a NUL character, which no name can have: {_shown(path)}")
    return path


def _expand_braces(argument: str, part: str) -> list[str]:
    if "{" not in part and "}" not in part:
        return [part]
    try:
        return list(braceexpand(part, escape="\\" in part))
    except ValueError:
        raise ValueError(
            f"{argument} has a brace without its partner: {_shown(part)}; close it, "
            "or write \\{ for a brace that belongs to the name"
        ) from None  # it shows all of the url


def _refuse_programs(argument: str, url: str) -> None:
    # The test for ":" and "|" spares the regular expression for the millions of urls that are nothing of the kind.
    if (":" in url or "|" in url) and _RUNS_A_PROGRAM.match(url):
        raise ValueError(
            f"{argument} would run a program: {_shown(url)}; streamload never does. "
            "Name the file or the object itself, or fetch it first"
        )


def _count(pattern: str) -> int:
    """How many strings a pattern stands for, found without making them."""
    total, depth, start, position = 1, 0, 0, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
            if depth == 1:
                start = position + 1
        elif character == "}" and depth:
            depth -= 1
            if depth == 0:
                total *= _count_braces(pattern[start:position])
        position += 1
    return total


def _count_braces(inside: str) -> int:
    """The same for what stands between one pair of braces."""
    if numbers := _INT_RANGE.match(inside):
        first, last, step = numbers.groups()
        return abs(int(last) - int(first)) // max(1, int(step or 1)) + 1
    if _CHARACTER_RANGE.match(inside):
        return len(list(braceexpand("{" + inside + "}")))
    parts, depth, start, position = [], 0, 0, 0
    while position < len(inside):
        character = inside[position]
        if character == "\\":
            position += 1
        elif character in "{}":
            depth += 1 if character == "{" else -1
        elif character == "," and depth == 0:
            parts.append(inside[start:position])
            start = position + 1
        position += 1
    return sum(_count(part) for part in [*parts, inside[start:]])


def _shown(value: object) -> str:
    text = repr(without_secrets(value)) if isinstance(value, str) else without_secrets(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."
