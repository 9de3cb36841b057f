"""Expand the argument `urls`, and find the storage of each url."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from braceexpand import braceexpand

from streamload.errors import without_secrets
from streamload.storage.download import Retries
from streamload.storage.local_files import LocalStorage, local_path
from streamload.storage.protocol import FAMILY, Storage, layers, protocol_of, protocols_of

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

MAX_URLS = 10_000_000  # more are probably a mistake, and are refused

_RUNS_A_PROGRAM = re.compile(r"\s*(?:pipe|cmd|exec|shell|sh)\s*:(?!//)|\s*\||.*\|\s*\Z", re.IGNORECASE | re.DOTALL)
CACHING = frozenset(("simplecache", "filecache", "blockcache", "cached"))
"""Protocols of fsspec that are refused because they keep copies of files; `cache_dir` replaces them."""

# Protocols of fsspec that chain urls by `::`.
_CHAINING = frozenset(("dir", "zip", "tar", "libarchive", *CACHING))

_WORD = re.compile(r"[A-Za-z]\w*")

# Brackets hold an IPv6 address, as in `http://[::1]/a.tar`.
_SEPARATOR = re.compile(r"::(?![^\[\]/]*\])")

# Matches a url that needs no expansion and runs no program, the usual case in long lists.
_PLAIN = re.compile(r"(?:[a-z0-9]+://[\w.-]+(?::\d+)?/)?[\w./-]+")

_INT_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")

_IN_MEMORY = frozenset(("memory",))
# Protocols that accept any url: `abstract` does not state its urls, `generic` chooses a filesystem by the url.
_TAKES_ALL = frozenset(("abstract", "generic"))

_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")


def expand_urls(urls: Urls) -> list[str]:
    """Split a string, a path, or each item of a list at `::`, and expand braces, in order.

    A backslash before a brace keeps that brace; in strings without braces a backslash is an ordinary character.

    Raises:
        TypeError: `urls` or an item is neither a string nor a path.
        ValueError: there is no url, an empty one, or more than `MAX_URLS`; braces don't match; or a url is an
            fsspec chain or would run a program (`pipe:`).
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
                what = f"{argument} is an fsspec chain, {_shown(written)}, but `::` separates urls here"
                raise ValueError(f"{what}; give filesystem=fsspec.filesystem(...), or cache_dir= for copies")
            if "://" in following and _WORD.fullmatch(word):
                what = f"{argument} has the unknown prefix {word}:: in {_shown(written)}"
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
    """Return urls as strings. Raises TypeError as `expand_urls`."""
    return tuple(written for _, written in _strings(urls))


def _strings(urls: object) -> list[tuple[str, str]]:
    if isinstance(urls, str | os.PathLike):
        items: list[tuple[str, object]] = [("urls", urls)]
    elif isinstance(urls, Sequence) and not isinstance(urls, bytes | bytearray | memoryview):
        items = [(f"urls[{number}]", item) for number, item in enumerate(urls)]
    else:
        message = f"urls must be a string, a path, or a list of them, not {type(urls).__name__}: {_shown(urls)}"
        if any(kind.__name__ == "Dataset" for kind in type(urls).__mro__):
            message += "; pass a Dataset to torch's DataLoader, or pack it into shards with streamload.ShardWriter"
        raise TypeError(message)
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
    # Ranges multiply. With a comma they may be alternatives, so only the longest counts. Braceexpand would build all
    # urls before they could be counted.
    if (max(lengths, default=1) if "," in part else math.prod(lengths)) > MAX_URLS:
        raise _too_many(argument, part)
    try:
        return braceexpand(part, escape="\\" in part)
    except ValueError:
        raise ValueError(
            f"{argument} has a brace without its partner: {_shown(part)}; close it, "
            "or write \\{ for a brace that belongs to the name"
        ) from None  # braceexpand's error shows the whole url, which may hold secrets


def _refuse_programs(argument: str, url: str) -> None:
    # Testing for ":" and "|" first is faster for millions of paths.
    if (":" in url or "|" in url) and _RUNS_A_PROGRAM.match(url):
        raise ValueError(
            f"{argument} would run a program: {_shown(url)}; streamload never runs one. "
            "Name the file or the object itself, or fetch it first"
        )


def _shown(value: object) -> str:
    text = repr(without_secrets(value)) if isinstance(value, str) else without_secrets(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."


class Storages:
    """Find the storage of a url, importing obstore or fsspec when the first url needs it.

    Pickles and copies have no connections.

    Args:
        storage_options: options by name for all protocols, and dicts of options by protocol.
        filesystem: an fsspec filesystem that reads everything, by its own paths or urls of its own protocol.

    Raises:
        TypeError: `storage_options` is not a dict with strings as keys, or `filesystem` is not a filesystem.
        ValueError: `filesystem` is one of fsspec's caches, or wraps one.
    """

    def __init__(
        self, storage_options: Mapping[str, Any] | None = None, filesystem: Any = None, retries: Retries | None = None
    ) -> None:
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise TypeError(f"storage_options must be a dict, not {type(storage_options).__name__}")
        for name in storage_options or ():
            if not isinstance(name, str):
                raise TypeError(f"storage_options has the key {name!r}; keys are the names of options, as strings")
        if filesystem is not None and not hasattr(filesystem, "cat_file"):
            raise TypeError(f"filesystem must be one of fsspec's, not {type(filesystem).__name__}")
        for layer in layers(filesystem):
            if CACHING & protocols_of(layer):
                raise ValueError(
                    f"filesystem: {type(layer).__name__} keeps copies that concurrent readers corrupt; give the "
                    "filesystem that it wraps (`.fs`), and cache_dir to keep what was read"
                )
        self._options = dict(storage_options or {})
        self._filesystem = filesystem
        self.retries = retries or Retries()
        self._local = LocalStorage()
        self._by_protocol: dict[str, Storage] = {}

    def for_url(self, url: str) -> Storage:
        """Return the storage of a url.

        Raises:
            TypeError: an option's value has the wrong type.
            ValueError: the protocol is unknown, or not that of `filesystem`; an option is unknown; the url lacks
                a slash; or a `file://` url names another host.
        """
        if self._filesystem is not None:
            _refuse_other_protocol(self._filesystem, url)
        if not self.costs_requests(url):
            local_path(url)
            return self._local
        protocol = "fsspec" if self._filesystem is not None else protocol_of(url)
        if protocol not in self._by_protocol:
            # Another thread may have made the storage meanwhile.
            self._by_protocol.setdefault(protocol, self._make(protocol, url))
        return self._by_protocol[protocol]

    def check(self, urls: Iterable[str]) -> None:
        """Raise TypeError or ValueError for options that do not fit urls."""
        if self._filesystem is not None or not self._options:
            return
        for protocol in dict.fromkeys(map(protocol_of, urls)):
            if protocol in FAMILY and (options := self._options_of(protocol)):
                from streamload.storage.object_storage import object_options

                object_options(protocol, options)

    def costs_requests(self, url: str) -> bool:
        """Return True if reading a url costs requests; False if it is a local file, opened by its path.

        Always True with a `filesystem`. Raises ValueError for a url with one slash too few.
        """
        if self._filesystem is not None:
            return True
        explicit = url.startswith(("file:", "/"))
        if explicit or protocol_of(url) != "file":
            return not explicit
        _refuse_one_slash(url)
        return False

    def is_process_local(self, url: str) -> bool:
        """Return True if only this process can read a url: `memory://`, or a filesystem class in `__main__`."""
        if self._filesystem is not None:
            read_by = layers(self._filesystem)
            return any(_IN_MEMORY & protocols_of(layer) or type(layer).__module__ == "__main__" for layer in read_by)
        return protocol_of(url) in _IN_MEMORY

    def copy(self) -> Storages:
        """Return the same storages without their connections, for another event loop."""
        return Storages(self._options, self._filesystem, self.retries)

    async def aclose(self) -> None:
        """Close the connections that belong to the running loop."""
        for storage in self._by_protocol.values():
            await storage.aclose()

    def __reduce__(self) -> tuple[type[Storages], tuple[dict[str, Any], Any, Retries]]:
        # Leave out response times, which follow this machine's clock.
        return Storages, (self._options, self._filesystem, Retries(self.retries.policy))

    def _make(self, protocol: str, url: str) -> Storage:
        if protocol in FAMILY:
            from streamload.storage.object_storage import ObjectStorage, object_options

            return ObjectStorage(object_options(protocol, self._options_of(protocol)), self.retries)
        import fsspec

        from streamload.storage.filesystem_storage import FilesystemStorage

        if protocol == "fsspec":
            return FilesystemStorage(self._options, self._filesystem, self.retries)
        if protocol not in fsspec.available_protocols():
            raise ValueError(
                f"urls names {without_secrets(url)!r}, but no storage is called {protocol}://; check the spelling "
                "(s3://, gs://, az://, https://, hf://, or any protocol of fsspec)"
            )
        return FilesystemStorage(self._options_of(protocol), None, self.retries)

    def _options_of(self, protocol: str) -> dict[str, Any]:
        dicts = [name for name, value in self._options.items() if isinstance(value, Mapping)]
        if dicts:
            import fsspec

            dicts = [name for name in dicts if name in FAMILY or name in fsspec.available_protocols()]
        options = {name: value for name, value in self._options.items() if name not in dicts}
        family = FAMILY.get(protocol, protocol)
        for name in sorted((name for name in dicts if FAMILY.get(name, name) == family), key=protocol.__eq__):
            options |= self._options[name]
        return options


def _refuse_other_protocol(filesystem: Any, url: str) -> None:
    name, known = protocol_of(url), protocols_of(filesystem)
    if name == "file" and not url.startswith("file:"):
        return  # a path
    if known & _TAKES_ALL or FAMILY.get(name, name) in {FAMILY.get(each, each) for each in known}:
        return
    raise ValueError(
        f"{without_secrets(url)!r} cannot be read with filesystem={type(filesystem).__name__}: it would read all urls, "
        f"but it takes only its own paths and {', '.join(f'{each}://' for each in sorted(known))}; give "
        "such a path, or leave `filesystem` out"
    )


def _refuse_one_slash(url: str) -> None:
    match = _ONE_SLASH.match(url)
    if match is not None and match[1].lower() in {*FAMILY, *_IN_MEMORY, "hf"} and not os.path.exists(f"{match[1]}:"):
        rest = url[match.end() :]
        if rest.startswith(".streamload"):  # an index whose bucket has no name
            raise ValueError(f"{match[0]}/ does not name a bucket; give one, as in {match[0]}/bucket/train")
        meant = without_secrets(f"{match[0]}/{rest}")
        raise ValueError(
            f"{without_secrets(url)!r} has one slash after the colon; did you mean {meant!r}? A pathlib.Path leaves a "
            "slash out, so give urls as strings"
        )
