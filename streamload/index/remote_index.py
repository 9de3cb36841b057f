"""The index in a remote folder: read, written, and rid of what is gone. Objects are replaced whole, index.json last.

There are no locks: of two processes that change one folder's index at the same moment, one may undo what the other did.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Sequence

from streamload.errors import DatasetIndexError, ShardNotFoundError
from streamload.index.dataset_index import (
    INDEX_FILE,
    INDEX_FOLDER,
    DatasetIndex,
    IndexedShard,
    merged_index,
    table_path,
)
from streamload.index.index_lookup import MOST_INDEX_BYTES
from streamload.index.table_file import table_to_npz
from streamload.storage.protocol import Storage
from streamload.tar.table import ShardTable

__all__ = ["merge_remote_index", "remote_index_folder", "remove_remote_entries", "write_remote_table"]

_log = logging.getLogger("streamload")


def remote_index_folder(folder: str) -> str:
    """The index's own folder beside the shards of a folder."""
    return f"{folder}/{INDEX_FOLDER}"


def write_remote_table(storage: Storage, index_folder: str, name: str, table: ShardTable) -> None:
    """Write the table of one shard. Raises StorageError."""
    content = io.BytesIO()
    table_to_npz(table, content)
    storage.write(table_path(index_folder, name), content.getvalue())


def merge_remote_index(
    storage: Storage,
    index_folder: str,
    entries: Sequence[IndexedShard],
    fields: set[str],
    gone: Collection[str] = (),
) -> DatasetIndex:
    """Add shards, whose tables are there, to the list in an index, and drop those that are gone.

    A broken list is replaced. Raises StorageError.
    """
    try:
        old = _read(storage, index_folder)
    except DatasetIndexError as exc:
        _log.warning("making a new index, without the entries of the old one: %s", exc)
        old = None
    index = merged_index(index_folder, old, entries, fields, gone)
    storage.write(f"{index_folder}/{INDEX_FILE}", index.to_json())
    return index


def remove_remote_entries(storage: Storage, index_folder: str, matches: Callable[[str], bool]) -> None:
    """Remove what an index says of the shards whose names match; the index too, if it says nothing else.

    Raises:
        StorageError: it cannot be read or written.
        DatasetIndexError: it is broken.
    """
    index = _read(storage, index_folder)
    if index is None:
        return
    others = tuple(entry for entry in index.shards if not matches(entry.name))
    if len(others) == len(index.shards):
        return
    if others:
        storage.write(f"{index_folder}/{INDEX_FILE}", DatasetIndex(index_folder, index.fields, others).to_json())
    else:
        storage.delete(f"{index_folder}/{INDEX_FILE}")
    for entry in index.shards:
        if matches(entry.name):
            storage.delete(table_path(index_folder, entry.name))


def _read(storage: Storage, index_folder: str) -> DatasetIndex | None:
    try:
        return DatasetIndex.load(index_folder, lambda url: storage.read_bytes(url, most_bytes=MOST_INDEX_BYTES))
    except ShardNotFoundError:
        return None
