"""Decompress a shard as it arrives, in bounded memory; verify every checksum, and refuse bombs.

A shard can hold several gzip members, zstd frames, xz or bzip2 streams, as parallel compressors write them. Zeros
between and after gzip members and xz streams are skipped; other bytes after a stream are an error, and so is an early
end.

In a zstd frame without a checksum (Python's default), only damage to the structure is noticed.
"""

from __future__ import annotations

import asyncio
import bz2
import enum
import lzma
import re
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from streamload.errors import ShardFormatError
from streamload.tar.header_chain import what_else

if TYPE_CHECKING:
    from typing_extensions import Buffer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_SUFFIX = re.compile(
    r"\.(?:(?P<GZIP>tgz|tar\.gz)|(?P<ZSTD>tzst|tar\.zstd?)|(?P<XZ>txz|tar\.xz)|(?P<BZIP2>tbz2?|tar\.bz2))\Z",
    re.IGNORECASE,
)
_QUERY = re.compile(r"[?#].*", re.DOTALL)
_GZIP_WITH_HEADER = 31
_XZ_MOST_MEMORY_BYTES = 256 << 20
# `bz2` raises OSError.
_FAILURES = (zlib.error, lzma.LZMAError, zstd.ZstdError, OSError)


class Compression(enum.Enum):
    """How a shard is compressed; the value is the format's name."""

    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"


def compression_of(url: str) -> Compression | None:
    """Return the compression that a shard's suffix names, ignoring case; None if the suffix names none.

    In a url with a scheme, a query or fragment is not part of the name.
    """
    if url.endswith(".tar") and "?" not in url and "#" not in url:
        return None
    match = _SUFFIX.search(_QUERY.sub("", url) if "://" in url else url)
    return None if match is None else Compression[str(match.lastgroup)]


def without_compression(name: str) -> str:
    """Return the name of the archive in a shard: `a.tar` for `a.tar.gz`, `a.tgz` and `a.tar`."""
    return _SUFFIX.sub(".tar", name)


class _GzipMember:
    """Decompress a gzip member, with the interface of the other decompressors; zlib verifies crc32 and length."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(_GZIP_WITH_HEADER)
        self.eof, self.needs_input, self.unused_data = False, True, b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._object.decompress(self._object.unconsumed_tail + data, max_length)
        self.eof, self.unused_data = self._object.eof, self._object.unused_data
        self.needs_input = not self._object.unconsumed_tail
        return piece


# Memory is bounded by the format's window, the input given at once and `max_length`.
_Stream = _GzipMember | bz2.BZ2Decompressor | lzma.LZMADecompressor | zstd.ZstdDecompressor
_FORMATS: dict[Compression, tuple[str, Callable[[], _Stream]]] = {
    Compression.GZIP: ("gzip member", _GzipMember),
    Compression.ZSTD: ("zstd frame", zstd.ZstdDecompressor),  # libzstd refuses windows of more than 128 MiB
    Compression.XZ: ("xz stream", partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MOST_MEMORY_BYTES)),
    Compression.BZIP2: ("bzip2 stream", bz2.BZ2Decompressor),
}

MOST_RATIO = 1000
"""A shard that decompresses to more than `RATIO_FREE_BYTES` and this many times its size is refused."""

RATIO_FREE_BYTES = 64 << 20
"""Up to this size a shard may decompress at any ratio; small archives are mostly zeros."""

PIECE_BYTES = 1 << 20
"""Maximum size of a decompressed piece."""

_SLICE_BYTES = 64 << 10  # the input of one call of a decompressor; small, to bound copies and to locate damage
_STEP_PIECES = 8  # the maximum number of pieces that one call on the thread returns


class Decompressor:
    """Decompress a shard piece by piece, releasing the GIL. Not thread-safe.

    Attributes:
        compressed_bytes: input so far.
        decompressed_bytes: output so far.
    """

    def __init__(self, compression: Compression, url: str) -> None:
        self.compressed_bytes = 0
        self.decompressed_bytes = 0
        self._compression = compression
        self._name, self._new_stream = _FORMATS[compression]
        self._url = url
        self._stream: _Stream | None = None
        self._streams_ended = 0
        self._stream_start = 0

    def feed(self, chunk: Buffer) -> Iterator[bytes]:
        """Decompress the shard's next bytes, split anywhere. Exhaust the iterator before the next call.

        Yields:
            Pieces in order, none of them empty or longer than `PIECE_BYTES`.

        Raises:
            ShardFormatError: the shard is damaged, or may be a decompression bomb. `offset` is the place in the
                compressed file, not more than 64 KiB before the damage was noticed.
        """
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), _SLICE_BYTES):
            data = bytes(view[start : start + _SLICE_BYTES])
            self.compressed_bytes += len(data)
            while data or self._stream is not None:
                if self._stream is None:
                    if self._streams_ended and self._compression in (Compression.GZIP, Compression.XZ):
                        data = data.lstrip(b"\0")
                    if not data:
                        break
                    self._stream = self._new_stream()
                    self._stream_start = self.compressed_bytes - len(data)
                piece = self._decompress(self._stream, data)
                data = b""
                if piece:
                    yield piece
                if self._stream.eof:
                    data, self._stream = self._stream.unused_data, None
                    self._streams_ended += 1
                elif self._stream.needs_input:
                    break

    def finish(self) -> None:
        """Raise ShardFormatError if the shard is truncated."""
        if self._stream is None and self._streams_ended:
            return
        start = f"it ends within the {self._name} that starts at byte {self._stream_start}"
        raise self._error(f"the shard is truncated: {start}; fetch or pack it again", self.compressed_bytes)

    def _decompress(self, stream: _Stream, data: bytes) -> bytes:
        start = self.compressed_bytes - len(data)
        try:
            piece = stream.decompress(data, PIECE_BYTES)
        except _FAILURES as exc:
            if start == 0 and (what := what_else(data, self._compression.value)) is not None:
                raise self._error(what, 0) from exc
            doubt = f", or stray bytes follow stream {self._streams_ended}" if self._streams_ended else ""
            raise self._error(
                f"the shard is damaged: the {self._name} that starts at byte {self._stream_start} cannot be "
                f"decompressed after byte {start} ({exc}){doubt}; fetch or pack it again",
                start,
            ) from exc
        self.decompressed_bytes += len(piece)
        if self.decompressed_bytes > max(RATIO_FREE_BYTES, MOST_RATIO * self.compressed_bytes):
            raise self._error(
                f"the first {self.compressed_bytes} bytes of this shard make {self.decompressed_bytes} or more, "
                f"over {MOST_RATIO} times as much, which may be a decompression bomb; if not, store it uncompressed",
                self.compressed_bytes,
            )
        return piece

    def _error(self, message: str, offset: int) -> ShardFormatError:
        return ShardFormatError(message, url=self._url, offset=offset)


def decompressed(url: str, content: bytes) -> Iterator[bytes]:
    """Yield a whole shard in pieces, decompressed if its name says so. Raises as `Decompressor.feed`."""
    compression = compression_of(url)
    if compression is None:
        yield content
        return
    decompressor = Decompressor(compression, url)
    yield from decompressor.feed(content)
    decompressor.finish()


async def decompress(
    body: AsyncIterator[Buffer], decompressor: Decompressor, write: Callable[[int, bytes], Awaitable[None] | None]
) -> int:
    """Decompress a shard on another thread while it arrives, and return its decompressed size in bytes.

    Memory holds at most a chunk of the body and 8 MiB of output. The body is not closed. `write` is called, and awaited
    if need be, with each piece and its offset in the decompressed shard, in order.

    Raises:
        ShardFormatError: as `Decompressor.feed` and `finish`; bytes written before may be wrong.
    """
    loop = asyncio.get_running_loop()
    offset = 0
    async for chunk in body:
        pieces = decompressor.feed(chunk)
        while step := await loop.run_in_executor(None, list, islice(pieces, _STEP_PIECES)):
            for piece in step:
                written = write(offset, piece)
                if written is not None:
                    await written
                offset += len(piece)
    decompressor.finish()
    return offset
