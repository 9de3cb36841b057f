"""Finished shards get their final names, with an index and the names of the classes beside them.

Every step can be done again, so a run that was killed in the middle of it is completed by the next.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from streamload_tools.records import Finished

from streamload.dataset.atomic import replace_file
from streamload.dataset.index import INDEX_FOLDER, IndexedShard, write_index
from streamload.dataset.numbered import NumberedName, remove_entries
from streamload.dataset.shard_file import sync_folder

__all__ = ["CLASSES", "NAMES", "Part", "publish"]

NAMES = NumberedName("shard-", 6, ".tar")
CLASSES = "classes.json"
_HALF_WRITTEN = re.compile(r"\.(classes\.json|index\.json|shard-\d{6,}\.tar\.npz)\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class Part:
    """One split: its name, empty where the dataset is not split, and its shards, none of them empty, in order."""

    name: str
    shards: Sequence[Finished]

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return sum(len(shard.table) for shard in self.shards if shard.table is not None)

    @property
    def bytes(self) -> int:
        """How many bytes its shards have together."""
        return sum(shard.table.shard_bytes for shard in self.shards if shard.table is not None)


def publish(
    parts: Sequence[Part],
    destination: str,
    classes: Sequence[str] | None,
    *,
    sync: bool = False,
    again: bool = False,
) -> None:
    """Move the shards of each part to their places, in the stead of all shards of this name that are there.

    Args:
        parts: what is published.
        destination: the folder for it, or for one folder for each part.
        classes: the names of the classes, or None.
        sync: wait until names and index are on the disk, as the shards are by then.
        again: an earlier run was stopped within this; what it has left half-written is removed.

    Raises:
        OSError, StreamloadError: something cannot be written; to be called again with the same arguments.
    """
    for part in parts:
        folder = os.path.join(destination, part.name) if part.name else destination
        os.makedirs(folder, exist_ok=True)
        if again:
            _remove_half_written(folder)
            _remove_half_written(os.path.join(folder, INDEX_FOLDER))
        remove_entries(folder, NAMES)
        names = [NAMES.name(number) for number in range(len(part.shards))]
        for name in set(NAMES.existing(folder)) - set(names):
            os.unlink(os.path.join(folder, name))
        for name, shard in zip(names, part.shards, strict=True):
            if os.path.exists(shard.path):  # else it was moved before
                os.replace(shard.path, os.path.join(folder, name))
        _write_classes(os.path.join(folder, CLASSES), classes, sync)
        if sync:
            sync_folder(folder)
        entries = [
            (IndexedShard(name, shard.table.shard_bytes, len(shard.table), None), shard.table)
            for name, shard in zip(names, part.shards, strict=True)
            if shard.table is not None
        ]
        if entries:
            write_index(os.path.join(folder, INDEX_FOLDER), entries, durable=sync)


def _remove_half_written(folder: str) -> None:
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if _HALF_WRITTEN.fullmatch(name):
            os.unlink(os.path.join(folder, name))


def _write_classes(path: str, classes: Sequence[str] | None, sync: bool) -> None:
    if classes is None:
        if os.path.exists(path):
            os.unlink(path)
        return
    numbers = {name: number for number, name in enumerate(classes)}
    text = json.dumps({"classes": list(classes), "class_to_idx": numbers}, ensure_ascii=True, indent=1)
    content = f"{text}\n".encode("ascii")
    replace_file(path, lambda file: file.write(content), durable=sync)
