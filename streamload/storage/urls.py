"""Expand a dataset as a user writes it to a flat list of urls; nothing is requested.

Braces follow bash (`{000000..000123}` keeps its zeros, `{a,b}`, nested), and `::` separates urls, as in WebDataset.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from braceexpand import braceexpand

from streamload.errors import without_secrets

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

MAX_URLS = 10_000_000
"""More urls are probably a mistake, and are refused."""

_RUNS_A_PROGRAM = re.compile(r"\s*(?:pipe|cmd|exec|shell|sh)\s*:(?!//)|\s*\||.*\|\s*\Z", re.IGNORECASE | re.DOTALL)
CACHING = frozenset(("simplecache", "filecache", "blockcache", "cached"))
"""Protocols of fsspec that keep copies of files, which are refused: `cache_dir` does that."""

# Protocols of fsspec that chain urls by `::`.
_CHAINING = frozenset(("dir", "zip", "tar", "libarchive", *CACHING))

_WORD = re.compile(r"[A-Za-z]\w*")

# Brackets hold an IPv6 address, as in `http://[::1]/a.tar`.
_SEPARATOR = re.compile(r"::(?![^\[\]/]*\])")

# What stands for itself and does nothing, as most of the urls in long lists do: found out in one step.
_PLAIN = re.compile(r"(?:[a-z0-9]+://[\w.-]+(?::\d+)?/)?[\w./-]+")

_INT_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")


def expand_urls(urls: Urls) -> list[str]:
    """Expand braces and `::` in a string, a path, or a list of them, in order.

    A backslash before a brace keeps that brace; in strings without braces it is an ordinary character.

    Raises:
        TypeError: `urls` or an item is neither a string nor a path.
        ValueError: there is no url, an empty one, or more than `MAX_URLS`; braces don't match; or a url would run a
            program (`pipe:`).
    """
    expanded: list[str] = []
    for argument, written in _strings(urls):
        if _PLAIN.fullmatch(written) and len(expanded) < MAX_URLS:
            expanded.append(written)
            continue
        _refuse_programs(argument, written)
        parts = _SEPARATOR.split(written) if "::" in written else [written]
        for word, following in pairwise(parts):
            if word.partition("://")[0] in _CHAINING and "://" in word + following:
                what = f"{argument} is a chain of fsspec's, {_shown(written)}, and `::` separates urls here"
                raise ValueError(f"{what}; give filesystem=fsspec.filesystem(...), or cache_dir= for copies")
            if "://" in following and _WORD.fullmatch(word):
                what = f"{argument} has the unknown prefix {word}:: in {_shown(written)}"  # else a missing path
                raise ValueError(f"{what}; leave it out (if {word} is a folder, write ./{word})")
        for part in parts:
            for url in _expand_braces(argument, part):
                _refuse_programs(argument, url)
                if not url.strip():
                    what = f"{argument} holds an empty url: {_shown(written)}"
                    raise ValueError(f"{what}; each must name a shard, a pattern or a folder")
                if len(expanded) == MAX_URLS:
                    raise _too_many(argument, written)
                expanded.append(url)
    return expanded


def _too_many(argument: str, written: str) -> ValueError:
    what = f"{argument} stands for more than {MAX_URLS:,} urls: {_shown(written)}"
    return ValueError(f"{what}; check the ranges in its braces")


def as_strings(urls: Urls) -> tuple[str, ...]:
    """Return urls as strings. Raises as `expand_urls` for other types."""
    return tuple(written for _, written in _strings(urls))


def _strings(urls: object) -> list[tuple[str, str]]:
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


def _expand_braces(argument: str, part: str) -> Iterable[str]:
    if "{" not in part and "}" not in part:
        return [part]
    lengths = [
        abs(int(last) - int(first)) // max(1, int(step or 1)) + 1 for first, last, step in _INT_RANGE.findall(part)
    ]
    # Ranges that are not among alternatives multiply; braceexpand would make all of their urls first.
    if (max(lengths, default=1) if "," in part else math.prod(lengths)) > MAX_URLS:
        raise _too_many(argument, part)
    try:
        return braceexpand(part, escape="\\" in part)
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


def _shown(value: object) -> str:
    text = repr(without_secrets(value)) if isinstance(value, str) else without_secrets(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."
