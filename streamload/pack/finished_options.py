"""The options of a finished dataset, kept beside its index, so that `--resume` with others is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from streamload.errors import ShardNotFoundError
from streamload.index.dataset_index import INDEX_FOLDER
from streamload.storage.protocol import Storage

_MOST_BYTES = 1 << 20


def options_path(folder: str) -> str:
    """The file in a folder of shards, which may be remote."""
    return f"{folder}/{INDEX_FOLDER}/shardify.json"


def options_content(options: Mapping[str, Any]) -> bytes:
    """The content of the file. What is not an option of the command (source, versions) is left out."""
    return f"{json.dumps(_of_command(options), indent=1)}\n".encode("ascii")


def changed_options(folder: str, storage: Storage | None, options: Mapping[str, Any]) -> str | None:
    """How options differ from those of the shards in a folder; None if they don't, or it is not known.

    Args:
        folder: of the shards.
        storage: its storage, if it is remote.
        options: of this run.

    Raises:
        OSError, StorageError: the file cannot be read.
    """
    path = options_path(folder)
    try:
        if storage is not None:
            content = storage.read_bytes(path, most_bytes=_MOST_BYTES)
        else:
            with open(path, "rb") as file:
                content = file.read(_MOST_BYTES)
        before = json.loads(content)
    except (FileNotFoundError, ShardNotFoundError, ValueError):
        return None
    if not isinstance(before, dict):
        return None
    now = json.loads(options_content(options))
    different = [
        f"{name} was {value!r} and is {now.get(name)!r}" for name, value in before.items() if value != now.get(name)
    ]
    return ", ".join(different) or None


def _of_command(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("--")}
