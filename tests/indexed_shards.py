"""An index of local shards, as `streamload index` writes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from streamload.index.dataset_index import INDEX_FOLDER, DatasetIndex
from streamload.index.index_writer import write_index
from streamload.index.indexed_shards import IndexedShard
from streamload.tar.scan import scan_file


def index_shards(paths: Sequence[str | os.PathLike[str]], folder: str | None = None) -> DatasetIndex:
    entries = []
    for path in map(Path, paths):
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            table = scan_file(file.fileno(), status.st_size, str(path), crc32=True, labels=True)
        entries.append((IndexedShard.of(path.name, table, status.st_mtime_ns), table))
    return write_index(folder or str(Path(paths[0]).parent / INDEX_FOLDER), entries)
