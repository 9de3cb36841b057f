"""An index of local shards: as `streamload index` writes it, and as it is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from streamload.index.dataset import Dataset
from streamload.index.dataset_index import INDEX_FOLDER, DatasetIndex, IndexedShard, IndexFolder
from streamload.index.listing import Listing, Shard, ShardFinder
from streamload.storage.local_files import LocalStorage
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.tar.scan import ShardTable, scan_file


def index_shards(paths: Sequence[str | os.PathLike[str]], folder: str | None = None) -> DatasetIndex:
    entries = []
    for path in map(Path, paths):
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            table = scan_file(file.fileno(), status.st_size, str(path), crc32=True, labels=True)
        entries.append((IndexedShard(path.name, table.shard_bytes, len(table)), table))
    return write_index(folder or str(Path(paths[0]).parent / INDEX_FOLDER), entries)


def write_index(folder: str, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> DatasetIndex:
    """Add shards to the index in its own folder."""
    return IndexFolder(LocalStorage(), folder).update_with_tables(entries)


def read_index(folder: str | os.PathLike[str]) -> DatasetIndex:
    """The index in its own folder."""
    index = ShardFinder(folder).index_of("")
    assert index is not None
    return index


def table_in(index: DatasetIndex, name: str) -> ShardTable:
    """The table of one shard in an index, as a loader reads it."""
    shard = Shard(name, name, UNKNOWN_BYTES, 0, "", None, index.folder)
    table = Dataset(Listing((shard,), None, (), indexes={index.folder: index})).find(0)
    assert table is not None
    return table
