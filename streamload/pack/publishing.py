"""Gives the shards in a local staging folder their final names, and writes the index and `classes.json`.

Every step is idempotent, so the next run completes what a killed run began.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard
from streamload.index.index_writer import IndexFolder, remove_entries, write_index
from streamload.index.shard_names import ShardNaming
from streamload.index.unfinished import SHARDIFY, UnfinishedSet, mark_finished, mark_path, mark_unfinished
from streamload.pack.finished_options import options_content, options_path
from streamload.pack.records import Finished
from streamload.storage.local_files import replace_file
from streamload.storage.local_storage import LocalStorage
from streamload.write.shard_file import sync_folder

NAMES = ShardNaming("shard-", 6, ".tar")
"""Of shards that are numbered in their order."""
ANY_NAMES = ShardNaming("", None, ".tar")
"""Of shards that keep the names that they have in the staging folder; all shards of a folder are of the set."""
CLASSES = "classes.json"
_LOCAL = LocalStorage()
_HALF_WRITTEN = re.compile(
    r"\.(classes\.json|index\.json|shardify\.json|\.streamload-unfinished\.json|tables-[0-9a-f]{16}\.bin)\.[0-9a-f]{16}\.tmp"
)


@dataclass(frozen=True, slots=True)
class Part:
    """One split: its name, or "" if the dataset is not split, and its shards in order, none of them empty.

    A split without shards has no folder.
    """

    name: str
    shards: Sequence[Finished]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(len(shard.table) for shard in self.shards if shard.table is not None)

    @property
    def bytes(self) -> int:
        """Total size of its shards in bytes."""
        return sum(shard.table.shard_bytes for shard in self.shards if shard.table is not None)


def final_name(naming: ShardNaming, path: str, number: int) -> str:
    """The name of a finished shard in the destination: by its number in its part, or as in the staging folder."""
    return os.path.basename(path) if naming.digits is None else naming.name(number)


def publish(
    parts: Sequence[Part],
    destination: str,
    classes: Sequence[str] | None,
    options: Mapping[str, Any],
    *,
    naming: ShardNaming = NAMES,
    sync: bool = False,
    again: bool = False,
) -> None:
    """Move the shards of each part to their folder, replacing the shards there. Idempotent.

    For a part without shards, those there are only removed.

    Args:
        parts: the parts.
        destination: their folder, or the parent of one folder per part.
        classes: the names of the classes, or None.
        options: which these shards were packed with.
        naming: what the shards are called.
        sync: flush shards, names and index to disk.
        again: an earlier run was stopped within this; remove its temporary files.

    Raises:
        OSError, StreamloadError: something cannot be written.
    """
    places = [(part, os.path.join(destination, part.name) if part.name else destination) for part in parts]
    changed = [(part, folder) for part, folder in places if part.shards or _holds_shards(folder, naming)]
    # Each step for all parts before the next step, so that whoever reads several parts at once sees all or none.
    for _, folder in changed:
        os.makedirs(folder, exist_ok=True)
        mark_unfinished(_LOCAL, folder, UnfinishedSet(naming, SHARDIFY))
        if again:
            _remove_half_written(folder)
            _remove_half_written(os.path.join(folder, INDEX_FOLDER))
    for _, folder in changed:
        remove_entries(IndexFolder(_LOCAL, os.path.join(folder, INDEX_FOLDER)), naming.matches)
    for part, folder in changed:
        _move_shards(folder, part.shards, naming, sync)
    for part, folder in changed:
        _write_classes(os.path.join(folder, CLASSES), classes if part.shards else None, sync)
    for part, folder in changed:
        _write_index(folder, part.shards, naming)
        _write_options(folder, options if part.shards else None, sync)
    for part, folder in changed:
        mark_finished(_LOCAL, folder, naming)
        if not part.shards:
            _remove_empty(folder)
        if sync and os.path.isdir(folder):
            sync_folder(folder)
    if sync:
        _sync_parents(destination)


def _holds_shards(folder: str, naming: ShardNaming) -> bool:
    """Whether there are shards of an earlier run, or a run was stopped while it replaced them."""
    return bool(naming.existing(folder)) or os.path.exists(mark_path(folder))


def _move_shards(folder: str, shards: Sequence[Finished], naming: ShardNaming, sync: bool) -> None:
    """Move the shards, replacing those of the same names, and remove all others."""
    names = [final_name(naming, shard.path, number) for number, shard in enumerate(shards)]
    places = [os.path.join(folder, name) for name in names]
    if sync:
        _sync_shards(shards, places)
    for place, shard in zip(places, shards, strict=True):
        if os.path.exists(shard.path):  # else it was moved before
            os.replace(shard.path, place)
    for name in set(naming.existing(folder)) - set(names):
        os.unlink(os.path.join(folder, name))
    if sync:
        sync_folder(folder)  # before the index, which refers to them


def _write_index(folder: str, shards: Sequence[Finished], naming: ShardNaming) -> None:
    entries = [
        (IndexedShard.of(final_name(naming, shard.path, number), shard.table), shard.table)
        for number, shard in enumerate(shards)
        if shard.table is not None
    ]
    if entries:
        write_index(os.path.join(folder, INDEX_FOLDER), entries)


def _write_options(folder: str, options: Mapping[str, Any] | None, sync: bool) -> None:
    path = options_path(folder)
    if options is not None:
        replace_file(path, lambda file: file.write(options_content(options)), durable=sync)
    elif os.path.exists(path):
        os.unlink(path)


def _remove_empty(folder: str) -> None:
    """Remove the folder of a part without shards, unless it contains something else."""
    for empty in (os.path.join(folder, INDEX_FOLDER), folder):
        with suppress(OSError):
            os.rmdir(empty)


def _sync_shards(shards: Sequence[Finished], places: Sequence[str]) -> None:
    """Flush shards to disk, which the run that packed them may not have done."""
    for shard, place in zip(shards, places, strict=True):
        descriptor = os.open(shard.path if os.path.exists(shard.path) else place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _sync_parents(destination: str) -> None:
    """Flush the names of all parent folders, since some may be new."""
    folder = os.path.abspath(destination)
    sync_folder(folder)
    while (above := os.path.dirname(folder)) != folder:
        folder = above
        with suppress(OSError):  # one that we may not read is not new
            sync_folder(folder)


def _remove_half_written(folder: str) -> None:
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if _HALF_WRITTEN.fullmatch(name):
            os.unlink(os.path.join(folder, name))


def _write_classes(path: str, classes: Sequence[str] | None, sync: bool) -> None:
    content = classes_content(classes)
    if content is not None:
        replace_file(path, lambda file: file.write(content), durable=sync)
    elif os.path.exists(path):
        os.unlink(path)


def classes_content(classes: Sequence[str] | None) -> bytes | None:
    """The content of `classes.json`, or None if classes have no names."""
    if classes is None:
        return None
    numbers = {name: number for number, name in enumerate(classes)}
    text = json.dumps({"classes": list(classes), "class_to_idx": numbers}, ensure_ascii=True, indent=1)
    return f"{text}\n".encode("ascii")
