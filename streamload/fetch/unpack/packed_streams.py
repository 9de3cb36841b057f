"""One compressed stream (a gzip member, a zstd frame, an xz or a bzip2 stream), decompressed in bounded pieces.

Python's own decompressors for bzip2 and xz have the interface that is needed here, `PackedStream`; those for gzip and
zstd are fitted to it.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zstandard import ZstdDecompressor

__all__ = [
    "FAILURES",
    "ZSTD_BLOCK_BYTES",
    "DamagedStreamError",
    "PackedStream",
    "bzip2_stream",
    "gzip_stream",
    "xz_stream",
    "zstd_streams",
]

_GZIP_WITH_HEADER = 31
_XZ_MOST_MEMORY_BYTES = 256 << 20

ZSTD_BLOCK_BYTES = 128 << 10
"""No block of a zstd frame is longer than this when it is decompressed (RFC 8878, 3.1.1.2.4)."""

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_SKIPPABLE_MAGIC = 0x184D2A50
_ZSTD_RLE_BLOCK, _ZSTD_RESERVED_BLOCK = 1, 3


class DamagedStreamError(ValueError):
    """A compressed stream is not what its format says; the text says why."""


class PackedStream(Protocol):
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
        """Take in all of `data` and give at most `max_length` bytes. Raises what `failures` names."""
        ...


FAILURES = (DamagedStreamError, zlib.error, lzma.LZMAError, OSError)
"""What `PackedStream.decompress` raises for a damaged stream; bzip2's is a plain OSError."""


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


class _ZstdFrame:
    """A zstd frame or a skippable one; libzstd verifies the content's size and checksum where the frame has them.

    The library gives out all that it makes of its input, which for a few bytes can be gigabytes; so it is given no
    more than a few blocks at once, and for that the blocks' headers are read here.
    """

    def __init__(self, decompressor: ZstdDecompressor, failure: type[Exception]) -> None:
        self._object = decompressor.decompressobj()
        self._failure = failure
        self._blocks = _ZstdBlocks()
        self._held = b""
        self._start = 0
        self.eof = False
        self.needs_input = True

    @property
    def unused_data(self) -> bytes:
        return self._held[self._start :] if self.eof else b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if data:
            self._held = self._held[self._start :] + data
            self._start = 0
        most_blocks = max(1, max_length // ZSTD_BLOCK_BYTES)
        end = self._blocks.end_of(self._held, self._start, most_blocks)
        try:
            piece = self._object.decompress(self._held[self._start : end])
        except self._failure as exc:
            raise DamagedStreamError(str(exc)) from exc
        self._start = end
        self.eof = self._object.eof
        if self.eof != self._blocks.ended:
            raise DamagedStreamError("the frame does not end where its blocks do")
        self.needs_input = not self.eof and end == len(self._held)
        return piece


class _ZstdBlocks:
    """Where the blocks of one frame end (RFC 8878, 3.1.1 and 3.1.2), however its bytes arrive."""

    def __init__(self) -> None:
        self.ended = False
        self._blocks = 0
        self._payload_bytes = 0  # what is left of the part that is being passed over
        self._last = False
        self._checksum_bytes = 0
        self._header = b""
        self._header_bytes = 4
        self._after_header: Callable[[bytes], None] = self._magic

    def end_of(self, data: bytes, start: int, most_blocks: int) -> int:
        """Go on from `start`; the place behind at most so many blocks, or behind the frame, or the end of the data.

        Raises:
            DamagedStreamError: this is no zstd frame, or a block has a type that does not exist.
        """
        self._blocks = 0
        at = start
        while at < len(data) and not self.ended and self._blocks < most_blocks:
            if self._payload_bytes:
                step = min(self._payload_bytes, len(data) - at)
                self._payload_bytes -= step
                if not self._payload_bytes:
                    self._passed()
            else:
                step = min(self._header_bytes - len(self._header), len(data) - at)
                self._header += data[at : at + step]
                if len(self._header) == self._header_bytes:
                    header, self._header = self._header, b""
                    self._after_header(header)
            at += step
        return at

    def _expect(self, header_bytes: int, then: Callable[[bytes], None]) -> None:
        self._header_bytes, self._after_header = header_bytes, then

    def _pass_over(self, payload_bytes: int, *, last: bool) -> None:
        self._payload_bytes, self._last = payload_bytes, last
        if not payload_bytes:
            self._passed()

    def _passed(self) -> None:
        self._blocks += 1
        self.ended = self._last
        self._expect(3, self._block)

    def _magic(self, header: bytes) -> None:
        magic = int.from_bytes(header, "little")
        if magic == _ZSTD_MAGIC:
            self._expect(1, self._descriptor)
        elif magic & ~0xF == _ZSTD_SKIPPABLE_MAGIC:
            self._expect(4, lambda size: self._pass_over(int.from_bytes(size, "little"), last=True))
        else:
            raise DamagedStreamError("not a zstd frame")

    def _descriptor(self, header: bytes) -> None:
        descriptor = header[0]
        single_segment = bool(descriptor & 0x20)
        window_bytes = 0 if single_segment else 1
        dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
        size_bytes = (int(single_segment), 2, 4, 8)[descriptor >> 6]
        self._checksum_bytes = 4 if descriptor & 4 else 0
        rest = window_bytes + dictionary_bytes + size_bytes
        self._expect(rest, lambda _: self._expect(3, self._block))

    def _block(self, header: bytes) -> None:
        fields = int.from_bytes(header, "little")
        last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        if kind == _ZSTD_RESERVED_BLOCK:
            raise DamagedStreamError("a zstd block of a type that does not exist")
        payload_bytes = 1 if kind == _ZSTD_RLE_BLOCK else size
        self._pass_over(payload_bytes + (self._checksum_bytes if last else 0), last=last)


def gzip_stream() -> PackedStream:
    """A gzip member."""
    return _GzipMember()


def bzip2_stream() -> PackedStream:
    """A bzip2 stream; the crc of each block and of all is verified."""
    return bz2.BZ2Decompressor()


def xz_stream() -> PackedStream:
    """An xz stream; its check and its index are verified. At most 256 MiB are spent on its dictionary."""
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MOST_MEMORY_BYTES)


def zstd_streams() -> Callable[[], PackedStream]:
    """A maker of zstd frames, which share their window's memory. Windows of more than 128 MiB are refused."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor()
    return lambda: _ZstdFrame(decompressor, zstandard.ZstdError)
