"""Samples to write, and ways to look at what was written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from streamload import ShardWriter
from streamload.tar.scan import scan_shard
from streamload.tar.table import ShardTable

Sample = dict[str, Any]


def scanned(path: str) -> ShardTable:
    return scan_shard(memoryview(Path(path).read_bytes()), path, every_byte=True)


def read_back(paths: tuple[str, ...]) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """Each sample's key and its fields in stored order, by our own scanner."""
    found = []
    for path in paths:
        data, table = Path(path).read_bytes(), scanned(path)
        for sample in range(len(table)):
            members = range(int(table.sample_start[sample]), int(table.sample_start[sample + 1]))
            fields = [
                (
                    table.fields[int(table.member_field[m])],
                    data[int(table.member_offset[m]) : int(table.member_offset[m] + table.member_size[m])],
                )
                for m in members
            ]
            found.append((table.key(sample), fields))
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def same_tables(one: ShardTable, other: ShardTable) -> bool:
    arrays = ("member_offset", "member_size", "member_field", "sample_start", "key_bytes", "key_start", "member_crc32")
    return (
        one.shard_bytes == other.shard_bytes
        and one.fields == other.fields
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
        and (one.labels is None) == (other.labels is None)
        and (one.labels is None or np.array_equal(one.labels, other.labels))
    )


SAMPLES: list[Sample] = [
    {"__key__": "cat/0", "jpg": b"\xff\xd8cat", "cls": 0, "seg.png": b""},
    {"__key__": "d.o.g/1", "cls": 1, "jpg": b"x" * 512},
    {"__key__": "é/2", "txt": "ü", "cls": -7},
    {"__key__": "a" * 80 + "/" + "b" * 80, "txt": "ustar prefix", "cls": 3},
    {"__key__": "c" * 180, "txt": "pax path", "cls": 4},
    {"__key__": "d" * 160 + "/" + "e" * 30, "txt": "pax path, too", "cls": "5"},
]
STORED = [
    (
        s["__key__"],
        [(f, v if isinstance(v, bytes) else str(v).encode()) for f, v in s.items() if f != "__key__"],
    )
    for s in SAMPLES
]


def write(folder: Path | str, samples: list[Sample] = SAMPLES, **options: Any) -> ShardWriter:
    with ShardWriter(folder, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


def digest(folder: Path) -> dict[str, str]:
    return {
        os.path.relpath(os.path.join(top, name), folder): hashlib.sha256(Path(top, name).read_bytes()).hexdigest()
        for top, _, names in os.walk(folder)
        for name in names
    }
