"""Bytes compressed by the real programs and by Python's own libraries, and a way to decompress them at once."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import shutil
import subprocess
from collections.abc import Sequence

import pytest
from backports import zstd

from streamload.tar.decompression import Compression, Decompressor

URL = "s3://bucket/a.tar.gz"


def mixed(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that compress about as shards do: noise, text and runs of zeros."""
    random_bytes = random.Random(seed)
    parts = []
    while sum(map(len, parts)) < size_bytes:
        parts += [random_bytes.randbytes(5_000), b"a line of text\n" * 500, bytes(10_000)]
    return b"".join(parts)[:size_bytes]


def compressed(compression: Compression, content: bytes) -> bytes:
    """One stream, with every checksum that the format has."""
    match compression:
        case Compression.GZIP:
            return gzip.compress(content, mtime=0)
        case Compression.ZSTD:
            return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})
        case Compression.XZ:
            return lzma.compress(content, preset=0)
        case Compression.BZIP2:
            return bz2.compress(content)


def by_program(command: Sequence[str], content: bytes) -> bytes:
    """What a program writes; skips the test where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, input=content, capture_output=True, check=True).stdout


def decompressed(compression: Compression, data: bytes, chunk_bytes: int | None = None, **options: int) -> bytes:
    """All that a file decompresses to."""
    decompressor = Decompressor(compression, URL, **options)
    pieces: list[bytes] = []
    step = chunk_bytes or max(1, len(data))
    for start in range(0, len(data), step):
        pieces += decompressor.feed(data[start : start + step])
    decompressor.finish()
    assert all(pieces)
    assert decompressor.compressed_bytes == len(data)
    assert decompressor.decompressed_bytes == sum(map(len, pieces))
    return b"".join(pieces)
