"""Many tar headers at once: walked by their size fields, then verified together by NumPy.

What is understood here is only the plain regular file of a ustar, pax or GNU archive; anything else, sound or not, is
left to `tar.parse_header`. So these functions raise nothing and decide nothing but "plain".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.tar.header import BLOCK_BYTES, padded, parse_size

__all__ = ["HeaderReader", "HeaderRun"]

_HEADERS_AT_ONCE = 500  # of 512 bytes: they stay in a cache of 1 MiB while they are looked at
_REGULAR = b"0\x007"
_SPACE, _ZERO = ord(" "), ord("0")
_SIZE_OFFSET = 124
_PADDED_FIELDS = np.array([100, 108, 116, 124, 136])
_EIGHTS_6 = 8.0 ** np.arange(5, -1, -1)
_EIGHTS_11 = 8.0 ** np.arange(10, -1, -1)
_LOW_BYTES = np.uint64(0x00FF00FF00FF00FF)
_BYTE_BITS = np.uint64(8)

_unpack_octal = struct.Struct("11s").unpack_from


@dataclass(frozen=True, slots=True, eq=False)
class HeaderRun:
    """Some headers that follow one another if their size fields are right.

    Attributes:
        starts: int64[n + 1], where each header starts, and where the next one would.
        plain: bool[n], True where the header is in order and says only that a regular file follows, which lies
            within what is there of the archive; False means "look closer".
        extension: bool[n], True where the header is in order and says that a pax header or a GNU long name follows.
        sizes: int64[n], payload bytes; meaningless where neither.
        blocks: uint8[n, 512], the headers.
    """

    starts: NDArray[np.int64]
    plain: NDArray[np.bool_]
    extension: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    blocks: NDArray[np.uint8]

    def names(self, rows: NDArray[np.int64]) -> list[bytes]:
        """The names of some plain members by their own headers."""
        names = _texts(self.blocks[rows, :100])
        posix_prefix = (self.blocks[rows, 345] != 0) & (self.blocks[rows, 262] == 0)
        prefixed = np.flatnonzero(posix_prefix)
        prefixes = _texts(self.blocks[rows[prefixed], 345:500])
        for number, prefix in zip(prefixed.tolist(), prefixes, strict=True):
            names[number] = prefix + b"/" + names[number]
        return names

    def not_plain(self) -> Iterator[tuple[int, bool]]:
        """The rows that are not plain, and whether each is an extension header right before a plain row."""
        rows = np.flatnonzero(~self.plain)
        before_plain = self.extension & np.append(self.plain[1:], False)
        return zip(rows.tolist(), before_plain[rows].tolist(), strict=True)


class HeaderReader:
    """Reads runs of headers from one archive, or from the part of it that has arrived.

    The headers are gathered into reused memory: fresh arrays of this size would cost more in page faults than all the
    work on them.
    """

    def __init__(self, data: NDArray[np.uint8], start: int = 0) -> None:
        """Prepare to read.

        Args:
            data: uint8[N], the bytes of the archive from `start` on, as far as they are there.
            start: where in the archive they begin, a multiple of 512.
        """
        self._data = data
        self._start = start
        self._blocks = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
        self._headers = np.empty((_HEADERS_AT_ONCE, BLOCK_BYTES), np.uint8)
        self._scratch = np.empty((2, _HEADERS_AT_ONCE, BLOCK_BYTES // 8), np.uint64)

    def read(self, position: int) -> HeaderRun:
        """Walk some headers from `position` on, a multiple of 512, and verify them. Only their pages are touched.

        Returns:
            A run that ends before the first block whose size field holds no number (a block of zeros, for example)
            and before the end of the data; it may be empty. It is good until the next call.
        """
        starts = _walk(self._data, position - self._start)
        count = len(starts) - 1
        # "clip" only because NumPy copies once more otherwise: the walk stays within the data.
        headers = np.take(self._blocks, starts[:-1] // BLOCK_BYTES, axis=0, out=self._headers[:count], mode="clip")
        digits = headers[:, _SIZE_OFFSET : _SIZE_OFFSET + 11] - np.uint8(_ZERO)
        sizes = (digits @ _EIGHTS_11).astype(np.int64)
        payload_ends = starts[:-1] + BLOCK_BYTES + sizes
        magic = headers[:, 257:263].copy().view("S6")[:, 0]
        typeflag = headers[:, 156]
        sound = (
            _sums_match(headers, self._scratch[:, :count])
            & (digits < 8).all(axis=1)
            & _is_terminator(headers[:, _SIZE_OFFSET + 11])
            & ((magic == b"ustar") | (magic == b"ustar "))
            & (headers[:, _PADDED_FIELDS] != _SPACE).all(axis=1)
            & (payload_ends <= len(self._data))
            & (starts[1:] == -(-payload_ends // BLOCK_BYTES) * BLOCK_BYTES)
        )
        plain = sound & ((typeflag == _REGULAR[0]) | (typeflag == _REGULAR[1]) | (typeflag == _REGULAR[2]))
        extension = sound & ((typeflag == ord("x")) | (typeflag == ord("L")))
        return HeaderRun(starts + self._start, plain, extension, sizes, headers)


def _walk(data: NDArray[np.uint8], position: int) -> NDArray[np.int64]:
    """Where headers start, if every size field is right: the only thing done in Python for every member."""
    ends = [position]
    view = data.data
    while len(ends) <= _HEADERS_AT_ONCE:
        try:
            for _ in range(_HEADERS_AT_ONCE + 1 - len(ends)):
                position += BLOCK_BYTES + ((int(_unpack_octal(view, position + _SIZE_OFFSET)[0], 8) + 511) & -512)
                ends.append(position)
        except struct.error:  # behind the end of the data
            break
        except ValueError:
            size = parse_size(data[position + _SIZE_OFFSET : position + _SIZE_OFFSET + 12].tobytes())
            if size is None or size > len(data):
                break
            position += BLOCK_BYTES + padded(size)
            ends.append(position)
    starts = np.array(ends, np.int64)
    # `int` takes a sign, and the data may end within a block.
    wrong = (starts[1:] <= starts[:-1]) | (starts[:-1] + BLOCK_BYTES > len(data))
    return starts[: int(wrong.argmax()) + 1] if wrong.any() else starts


def _sums_match(blocks: NDArray[np.uint8], scratch: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each header's checksum, zero-padded to 6 or 7 digits, is the unsigned sum of its bytes.

    Args:
        blocks: uint8[n, 512].
        scratch: uint64[2, n, 64], overwritten.
    """
    words = blocks.view(np.uint64)
    pairs, low = scratch
    np.right_shift(words, _BYTE_BITS, out=pairs)
    np.bitwise_and(pairs, _LOW_BYTES, out=pairs)
    np.bitwise_and(words, _LOW_BYTES, out=low)
    np.add(pairs, low, out=pairs)  # four sums of two bytes each in a word, and room for 64 such words
    total = pairs.sum(axis=1).view(np.uint16).reshape(-1, 4).sum(axis=1, dtype=np.int64)
    field = blocks[:, 148:156]
    total += 8 * _SPACE - field.sum(axis=1, dtype=np.int64)
    digits = field - np.uint8(_ZERO)
    six = (digits[:, :6] @ _EIGHTS_6).astype(np.int64)
    has_seven = digits[:, 6] < 8
    stored = np.where(has_seven, six * 8 + digits[:, 6], six)
    well_formed = (digits[:, :6] < 8).all(axis=1) & _is_terminator(field[:, 7])
    well_formed &= has_seven | _is_terminator(field[:, 6])
    matches: NDArray[np.bool_] = well_formed & (stored == total)
    return matches


def _texts(fields: NDArray[np.uint8]) -> list[bytes]:
    """What stands before the first NUL in each row of a contiguous uint8[n, width]."""
    texts: list[bytes] = fields.view(f"S{fields.shape[1]}")[:, 0].tolist()
    if b"\0" in b"".join(texts):  # NumPy drops only the NULs at the end
        return [text.partition(b"\0")[0] for text in texts]
    return texts


def _is_terminator(column: NDArray[np.uint8]) -> NDArray[np.bool_]:
    ends: NDArray[np.bool_] = (column == 0) | (column == _SPACE)
    return ends
