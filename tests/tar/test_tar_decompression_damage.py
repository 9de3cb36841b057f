"""Compressed shards that are cut, damaged or have something behind them: an error, or the very same bytes."""

from __future__ import annotations

import itertools
import lzma
import zlib

import pytest
from compressed_shards import URL, compressed, decompressed, mixed
from matrix import EVERY

from streamload.errors import ShardFormatError
from streamload.tar.decompression import Compression

ALL = list(Compression)
SMALL = mixed(6_000, seed=3)[4_900:5_900]
"""Some noise and some text, so that there are literals and matches."""


@EVERY
@pytest.mark.parametrize("compression", ALL)
def test_every_cut_is_an_error_that_says_where(compression: Compression, every: int) -> None:
    one = compressed(compression, SMALL)
    whole = {0, len(one), 2 * len(one)}
    data = one * 2
    beside_edges = {1, *range(len(one) - 20, len(one) + 20), *range(len(data) - 20, len(data))}
    for end in sorted({*range(0, len(data), every), *beside_edges}):
        if end in whole - {0}:
            assert decompressed(compression, data[:end]) == SMALL * (end // len(one))
            continue
        with pytest.raises(ShardFormatError, match="truncated: it ends within") as caught:
            decompressed(compression, data[:end])
        assert (caught.value.url, caught.value.offset) == (URL, end)
        assert f"starts at byte {end // len(one) * len(one)}" in caught.value.message


_FREE_BITS = {
    # the time, what the compressor did, on which system; and the flag that says that the content may be text
    Compression.GZIP: {(3, 0), *((at, bit) for at in range(4, 10) for bit in range(8))},
    # the one unused bit of the frame's descriptor
    Compression.ZSTD: {(4, 4)},
    # every header has a crc
    Compression.XZ: set(),
    # a larger block than is needed
    Compression.BZIP2: {(3, bit) for bit in range(4)},
}
"""Bits of the headers that say nothing about the content."""


@EVERY
@pytest.mark.parametrize("compression", ALL)
def test_every_turned_bit_is_an_error_or_changes_nothing(compression: Compression, every: int) -> None:
    unnoticed, data = set(), compressed(compression, SMALL)
    flips = [(number // 8, number % 8) for number in range(0, 8 * len(data), every)]
    for at, bit in flips:
        failure = _failure(compression, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        if failure is None:
            unnoticed.add((at, bit))
        else:
            assert (failure.url, failure.offset is None) == (URL, False)
    # Beside those, codes for symbols that do not occur, and bits that only fill up a byte.
    assert len(unnoticed - _FREE_BITS[compression]) <= len(flips) // 100
    if compression is Compression.XZ:
        assert unnoticed == set()


def _failure(compression: Compression, data: bytes) -> ShardFormatError | None:
    """The error that decompressing ends in; where there is none, the bytes are those of `SMALL`."""
    try:
        found = decompressed(compression, data)
    except ShardFormatError as exc:
        return exc
    assert found == SMALL
    return None


@pytest.mark.parametrize("compression", ALL)
def test_damage_in_a_large_shard_is_found_and_placed(compression: Compression) -> None:
    content = mixed(900_000)
    one = compressed(compression, content)
    data = bytearray(one * 2)
    for at in range(len(one) + 200, len(data) - 20, len(one) // 7):
        damaged = bytes(data[:at]) + bytes([data[at] ^ 0x55]) + bytes(data[at + 1 :])
        with pytest.raises(ShardFormatError, match=f"that starts at byte {len(one)} ") as caught:
            decompressed(compression, damaged)
        assert caught.value.offset is not None
        assert caught.value.offset >= min(at, len(data) - (64 << 10)) - (64 << 10)


GARBAGE = [b"garbage", b"\x01", b"PK\x03\x04 and so on", b"\0\0\0garbage", b"\0\0\0\0garbage"]


@pytest.mark.parametrize(
    ("compression", "garbage"),
    [*itertools.product(ALL, GARBAGE), (Compression.ZSTD, bytes(512)), (Compression.BZIP2, bytes(512))],
)
@pytest.mark.parametrize("chunk_bytes", [1, None])
def test_what_follows_the_last_stream_is_an_error(
    compression: Compression, garbage: bytes, chunk_bytes: int | None
) -> None:
    one = compressed(compression, SMALL)
    with pytest.raises(ShardFormatError, match=r"stray bytes follow stream 1|truncated") as caught:
        decompressed(compression, one + garbage, chunk_bytes)
    assert caught.value.offset is not None
    assert caught.value.offset >= len(one)


@pytest.mark.parametrize("compression", ALL)
@pytest.mark.parametrize("data", [b"x", b"not found, and no web page", bytes(1024), mixed(5_000)])
def test_what_is_not_compressed_at_all_is_an_error(compression: Compression, data: bytes) -> None:
    with pytest.raises(ShardFormatError, match=r"starts at byte 0") as caught:
        decompressed(compression, data)
    assert caught.value.offset is not None


def test_windows_that_take_too_much_memory_are_refused() -> None:
    zstd_header = b"\x28\xb5\x2f\xfd" + bytes([0x00, (31 - 10) << 3]) + b"\x01\x00\x00"
    with pytest.raises(ShardFormatError, match="memory"):
        decompressed(Compression.ZSTD, zstd_header)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    with pytest.raises(ShardFormatError, match=r"[Mm]emory"):
        decompressed(Compression.XZ, _xz_with_dictionary(filters))


def _xz_with_dictionary(filters: list[dict[str, int]]) -> bytes:
    """An xz stream whose header asks for a large dictionary; written with a small one, since this needs the memory."""
    small = lzma.compress(SMALL, lzma.FORMAT_XZ, filters=[filters[0] | {"dict_size": 4096}])
    header_bytes = (small[12] + 1) * 4
    header = bytearray(small[12 : 12 + header_bytes])
    place = header.index(b"\x21\x01") + 2
    header[place] = 36  # 2 to the power of 30 bytes
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    return small[:12] + bytes(header) + small[12 + header_bytes :]
