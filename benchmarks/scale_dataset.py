"""A dataset as large as is wanted, of which one shard and one file of tables are real: the others are these again.

The list of shards is real to the last byte; every shard in it can be read, and every table has its checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
from remote_bucket import FaultServer

from streamload import ShardWriter
from streamload.index.dataset_index import INDEX_FILE, INDEX_FOLDER, DatasetIndex
from streamload.index.index_writer import FILE_BYTES, FILE_TABLES
from streamload.index.table_file import pack_table

CLASSES = 200
FIELDS = ("cls", "npy")
_TABLE_FILES = tuple(f"tables-{number:016x}.bin" for number in range(2))
"""Two names of the one file, which take turns: in one file the tables of a list follow each other."""
_MTIME_NS = 1_700_000_000_123_456_789


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    Attributes:
        shards: of the dataset.
        samples: of each shard.
        ranks: of the run.
        batch_size: of each rank.
    """

    shards: int
    samples: int
    ranks: int
    batch_size: int

    @property
    def total(self) -> int:
        """Samples of the dataset."""
        return self.shards * self.samples


@dataclass(frozen=True)
class WrittenDataset:
    """The files of a dataset.

    Attributes:
        index: what `index.json` holds.
        shard: what every shard holds.
        tables: what every table file holds.
        table_bytes: of one shard's table.
        names: of the shards.
    """

    index: bytes
    shard: bytes
    tables: bytes
    table_bytes: int
    names: list[str]


def write_dataset(scale: Scale) -> WrittenDataset:
    """The files of a dataset of this size; each sample is a label and eight numbers."""
    with TemporaryDirectory(prefix="streamload-bench-") as folder:
        with ShardWriter(folder, max_count=scale.samples) as writer:
            for number in range(scale.samples):
                value = np.full(8, number, np.int32)
                writer.write({"__key__": f"{number:012d}", "npy": value, "cls": number % CLASSES})
        (path,) = Path(folder).glob("*.tar")
        shard = path.read_bytes()
        table = pack_table(DatasetIndex.load(Path(folder, INDEX_FOLDER)).table(path.name))
    tables_of_file = max(1, min(FILE_TABLES, FILE_BYTES // len(table), scale.shards))
    names = [f"train-{number:06d}.tar" for number in range(scale.shards)]
    index = _index_json(scale, names, shard, table, tables_of_file)
    return WrittenDataset(index, shard, table * tables_of_file, len(table), names)


@contextlib.contextmanager
def served(dataset: WrittenDataset) -> Iterator[FaultServer]:
    """A web server with the dataset at `/data`."""
    folder = f"data/{INDEX_FOLDER}"
    files = {f"{folder}/{INDEX_FILE}": dataset.index, "tables": dataset.tables, "shard": dataset.shard}
    aliases = {f"data/{name}": "shard" for name in dataset.names}
    aliases |= {f"{folder}/{name}": "tables" for name in _TABLE_FILES}
    with FaultServer(files, aliases=aliases) as server:
        yield server


def _index_json(scale: Scale, names: list[str], shard: bytes, table: bytes, tables_of_file: int) -> bytes:
    """The list of shards. The table file is named again and again, and each time its tables count from its start."""
    n = scale.shards
    etag = hashlib.md5(shard, usedforsecurity=False).hexdigest()
    files = [
        {"file": _TABLE_FILES[number % 2], "shards": min(tables_of_file, n - first)}
        for number, first in enumerate(range(0, n, tables_of_file))
    ]
    columns = {
        "name": names,
        "bytes": [len(shard)] * n,
        "samples": [scale.samples] * n,
        "mtime_ns": [_MTIME_NS] * n,
        "etag": [etag] * n,
        "table_bytes": [len(table)] * n,
        "table_crc32": [crc32(table)] * n,
    }
    document = {"format": 2, "kind": "streamload-index", "fields": FIELDS, "tables": files, "shards": columns}
    return (json.dumps(document, separators=(",", ":")) + os.linesep).encode("ascii")
