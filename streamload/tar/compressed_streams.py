"""One compressed stream (a gzip member, a zstd frame, an xz or a bzip2 stream), decompressed in bounded pieces.

The decompressors of bzip2, xz and zstd have the interface that is needed here, `CompressedStream`; that of gzip is
fitted to it.
"""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["FAILURES", "CompressedStream", "bzip2_stream", "gzip_stream", "xz_stream", "zstd_stream"]

_GZIP_WITH_HEADER = 31
_XZ_MOST_MEMORY_BYTES = 256 << 20


class CompressedStream(Protocol):
    """One stream. Memory is bounded by the format's window, the input given at once and `max_length`."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended and its checksum was right."""
        ...

    @property
    def needs_input(self) -> bool:
        """False while more can be had without more input."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What was given behind the end of the stream."""
        ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Take in all of `data` and give at most `max_length` bytes. Raises one of `FAILURES`."""
        ...


FAILURES = (zlib.error, lzma.LZMAError, zstd.ZstdError, OSError)
"""What `CompressedStream.decompress` raises for a damaged stream; bzip2's is a plain OSError."""


class _GzipMember:
    """A gzip member; zlib verifies its crc32 and its length."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(_GZIP_WITH_HEADER)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        tail = self._object.unconsumed_tail
        piece = self._object.decompress(tail + data if tail else data, max_length)
        self.needs_input = not self._object.unconsumed_tail
        return piece


def gzip_stream() -> CompressedStream:
    """A gzip member."""
    return _GzipMember()


def bzip2_stream() -> CompressedStream:
    """A bzip2 stream; the crc of each block and of all is verified."""
    return bz2.BZ2Decompressor()


def xz_stream() -> CompressedStream:
    """An xz stream; its check and its index are verified. At most 256 MiB are spent on its dictionary."""
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MOST_MEMORY_BYTES)


def zstd_stream() -> CompressedStream:
    """A zstd frame, or a skippable one; its checksum is verified. libzstd refuses windows of more than 128 MiB."""
    return zstd.ZstdDecompressor()
