"""Samples to write, and ways to look at what was written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from streamload import ShardWriter
from streamload.tar.scan import ShardTable, scan_shard

Sample = dict[str, Any]


def scanned(path: str) -> ShardTable:
    return scan_shard(memoryview(Path(path).read_bytes()), path, every_byte=True)


def samples_in(content: bytes, table: ShardTable) -> list[tuple[str, dict[str, bytes]]]:
    """What a table says is in a shard, as the loader would read it."""
    samples = []
    for sample, key in enumerate(table.keys()):
        members = range(int(table.sample_start[sample]), int(table.sample_start[sample + 1]))
        payloads = {}
        for member, field in zip(members, table.sample_fields(sample), strict=True):
            start = int(table.member_offset[member])
            payloads[field] = content[start : start + int(table.member_size[member])]
        samples.append((key, payloads))
    return samples


def read_back(paths: tuple[str, ...]) -> list[tuple[str, list[tuple[str, bytes]]]]:
    """Each sample's key and its fields in stored order, by our own scanner."""
    found = [sample for path in paths for sample in samples_in(Path(path).read_bytes(), scanned(path))]
    return [(key, list(fields.items())) for key, fields in found]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def assert_same_tables(one: ShardTable, other: ShardTable) -> None:
    for name in ShardTable.__slots__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name, strict=True)


SAMPLES: list[Sample] = [
    {"__key__": "cat/0", "jpg": b"\xff\xd8cat", "cls": 0, "seg.png": b""},
    {"__key__": "d.o.g/1", "cls": 1, "jpg": b"x" * 512},
    {"__key__": "é/2", "txt": "ü", "cls": -7},
    {"__key__": "a" * 80 + "/" + "b" * 80, "txt": "ustar prefix", "cls": 3},
    {"__key__": "c" * 180, "txt": "pax path", "cls": 4},
    {"__key__": "d" * 160 + "/" + "e" * 30, "txt": "pax path, too", "cls": "5"},
]
STORED = [
    (s["__key__"], [(f, v if isinstance(v, bytes) else str(v).encode()) for f, v in s.items() if f != "__key__"])
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
