"""Local shards with members that are larger than what a scan may read or hold."""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crafted_tar import header

from streamload.index.dataset import LABEL, read_columns, scan_local
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages

MIB = 1 << 20
LARGE_BYTES = 300 * MIB
MOST_BYTES = 8 * MIB


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Three samples with labels; the second has a member of zeros that take no room on the disk."""
    path = tmp_path / "large.tar"
    with open(path, "wb") as file:
        for name, label in ((b"a", b"1"), (b"b", b"-22"), (b"c", b"3")):
            if name == b"b":
                file.write(header(b"b.bin", LARGE_BYTES))
                file.seek(LARGE_BYTES, os.SEEK_CUR)
            file.write(header(name + b".cls", len(label)) + label.ljust(512, b"\0"))
        file.write(bytes(1024))
    return str(path)


@pytest.fixture
def count_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how many bytes were read at places of files so far."""
    counts: list[int] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            found = call(*arguments)
            counts.append(found if isinstance(found, int) else len(found))
            return found

        return count

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: sum(counts)


def test_labels_are_read_without_the_members_between(shard: str, count_read: Callable[[], int]) -> None:
    storages = Storages()
    listing = list_shards([shard], None, storages)
    columns, _ = read_columns(listing, storages, [LABEL])
    assert columns[LABEL].tolist() == [1, -22, 3]
    assert 0 < count_read() < MOST_BYTES


@pytest.mark.parametrize("options", [{}, {"labels": True}, {"every_byte": True}])
def test_no_member_is_held(shard: str, options: dict[str, bool]) -> None:
    tracemalloc.start()
    try:
        read = scan_local(Storages().for_url(shard), shard, **options)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < MOST_BYTES
    assert read is not None
    labels, crc32 = read.table.labels, read.table.member_crc32
    assert (labels is not None) == bool(options)
    assert (crc32 is not None) == ("every_byte" in options)
    if crc32 is not None:
        zeros = 0
        for _ in range(LARGE_BYTES // MIB):
            zeros = zlib.crc32(bytes(MIB), zeros)
        assert crc32.tolist() == [zlib.crc32(b"1"), zeros, zlib.crc32(b"-22"), zlib.crc32(b"3")]
