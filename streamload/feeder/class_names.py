"""The names of the classes, as `classes.json` beside the shards has them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from streamload.errors import DatasetIndexError, ShardNotFoundError, without_secrets
from streamload.fetch.storage.storages import Storages

__all__ = ["read_class_names"]

_FILE = "classes.json"
_MOST_BYTES = 256 << 20


def read_class_names(folders: Sequence[str], storages: Storages) -> tuple[str, ...] | None:
    """The name of each class by its number, or None where no folder has a `classes.json`. Blocks.

    Raises:
        DatasetIndexError: a file holds no such names, or that of another folder has others.
        StorageError: a file cannot be read.
    """
    found: dict[str, tuple[str, ...]] = {}
    for folder in folders:
        url = f"{folder.rstrip('/')}/{_FILE}"
        try:
            found[url] = _names_in(storages.for_url(url).read_bytes(url, most_bytes=_MOST_BYTES), url)
        except ShardNotFoundError:
            continue
    if len(set(found.values())) > 1:
        first, names = next(iter(found.items()))
        other = next(url for url in found if found[url] != names)
        raise DatasetIndexError(
            f"the classes have other names or numbers than in {without_secrets(first)!r}; read each apart", url=other
        )
    return next(iter(found.values()), None)


def _names_in(content: bytes, url: str) -> tuple[str, ...]:
    try:
        names = json.loads(content)["classes"]
    except (ValueError, TypeError, KeyError) as exc:
        raise DatasetIndexError('it is not as shardify writes it: {"classes": ["name", ...]}', url=url) from exc
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatasetIndexError('it is not as shardify writes it: {"classes": ["name", ...]}', url=url)
    return tuple(names)
