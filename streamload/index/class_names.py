"""The names of the classes, as `classes.json` beside the shards has them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from streamload.errors import DatasetIndexError, ShardNotFoundError, without_secrets
from streamload.index.unfinished import is_page
from streamload.limits import SMALL_REQUESTS
from streamload.storage.storages import Storages

CLASSES_FILE = "classes.json"
MOST_CLASSES_BYTES = 256 << 20

_NEAR = 3
_SHOWN = 20


def read_class_names(folders: Sequence[str], storages: Storages) -> tuple[str, ...] | None:
    """The name of each class by its number, or None where no folder has a `classes.json`. Blocks.

    Raises:
        DatasetIndexError: a file holds no such names, or that of another folder has others.
        StorageError: a file cannot be read.
    """
    urls = [f"{folder.rstrip('/')}/{CLASSES_FILE}" for folder in folders]

    def names_at(url: str) -> tuple[str, ...] | None:
        try:
            content = storages.for_url(url).read_bytes(url, most_bytes=MOST_CLASSES_BYTES)
        except ShardNotFoundError:
            return None
        return None if is_page(content) else parse_class_names(content, url)

    with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-classes") as threads:
        contents = list(threads.map(names_at, urls))
    found = {url: names for url, names in zip(urls, contents, strict=True) if names is not None}
    if len(set(found.values())) > 1:
        first, names = next(iter(found.items()))
        other = next(url for url in found if found[url] != names)
        raise _unlike(first, names, other, found[other])
    return next(iter(found.values()), None)


def _unlike(first: str, names: Sequence[str], other: str, other_names: Sequence[str]) -> DatasetIndexError:
    label, name, other_name = next(
        (label, name, other_name)
        for label, (name, other_name) in enumerate(zip_longest(names, other_names))
        if name != other_name
    )
    here, there = (f"is {each!r}" if each is not None else "has no name" for each in (other_name, name))
    first = without_secrets(first)
    return DatasetIndexError(
        f"the same label stands for different classes: {label} {here} here, and {there} in {first!r}; pack them with "
        f"one numbering (`shardify --classes {first}`), read each apart, or leave cls out of fields. In a Mixture, a "
        "Portion with a transform of its own may give its labels another meaning",
        url=other,
    )


def parse_class_names(content: bytes, url: str) -> tuple[str, ...]:
    """The names of the classes by number, of the content of a `classes.json`; DatasetIndexError if it is none."""
    try:
        names = json.loads(content)["classes"]
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise DatasetIndexError('it is not as shardify writes it: {"classes": ["name", ...]}', url=url) from exc
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatasetIndexError('it is not as shardify writes it: {"classes": ["name", ...]}', url=url)
    return tuple(names)


def unknown_class(name: str, names: Sequence[str]) -> str:
    """The end of a message on a class that is not among the names: which are like it, or which there are."""
    missing = f"{name!r}, which classes.json does not have;"
    alike = difflib.get_close_matches(name, names, _NEAR)
    if not alike:
        lowered = {other.lower(): other for other in names}
        alike = [lowered[found] for found in difflib.get_close_matches(name.lower(), list(lowered), _NEAR)]
    if alike:
        return f"{missing} did you mean {' or '.join(map(repr, alike))}?"
    return f"{missing} the classes are {', '.join(map(repr, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''}"
