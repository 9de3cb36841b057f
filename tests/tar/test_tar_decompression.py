"""Compressed shards: what the real programs write is decompressed, in small pieces, however it arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from compressed_shards import URL, by_program, compressed, decompressed, mixed
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.errors import ShardFormatError
from streamload.tar import decompression
from streamload.tar.decompression import MOST_RATIO, RATIO_FREE_BYTES, Compression, Decompressor, compression_of

CONTENT = mixed(700_000)
ALL = list(Compression)


@pytest.mark.parametrize(
    ("url", "compression"),
    [
        ("a.tar.gz", Compression.GZIP),
        ("/x/a.tgz", Compression.GZIP),
        ("s3://b/a.TAR.GZ", Compression.GZIP),
        ("a.tar.zst", Compression.ZSTD),
        ("a.tzst", Compression.ZSTD),
        ("a.tar.xz", Compression.XZ),
        ("a.txz", Compression.XZ),
        ("a.tar.bz2", Compression.BZIP2),
        ("a.tbz2", Compression.BZIP2),
        ("https://host/a.tar.gz?signature=x.tar.xz#part", Compression.GZIP),
        ("https://host/a.tar?name=b.tar.gz", None),
        ("/x/what?.tar.gz", Compression.GZIP),
        ("a.tar", None),
        ("a.gz", None),
        ("tgz", None),
        ("a.tar.gz.part", None),
        ("a.tar.lz4", None),
    ],
)
def test_the_name_says_how_a_shard_is_compressed(url: str, compression: Compression | None) -> None:
    assert compression_of(url) == compression


@pytest.mark.parametrize(
    ("compression", "command"),
    [
        (Compression.GZIP, ["gzip", "-9", "-n"]),
        (Compression.GZIP, ["pigz", "-b", "128", "-p", "3"]),
        (Compression.GZIP, ["pigz", "-i", "-b", "128"]),
        (Compression.ZSTD, ["zstd", "-q"]),
        (Compression.ZSTD, ["zstd", "-q", "--fast=5", "--no-check"]),
        (Compression.ZSTD, ["zstd", "-q", "--long=27"]),
        (Compression.XZ, ["xz", "-0", "--check=crc32", "-T2", "--block-size=100000"]),
        (Compression.XZ, ["xz", "-0", "--check=sha256"]),
        (Compression.BZIP2, ["bzip2", "-1"]),
        (Compression.BZIP2, ["bzip2", "-9"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.name,
)
def test_what_the_programs_write_is_decompressed(compression: Compression, command: list[str]) -> None:
    one, other = by_program(command, CONTENT), by_program(command, CONTENT[:1000])
    assert decompressed(compression, one) == CONTENT
    assert decompressed(compression, one + other + one, chunk_bytes=9_999) == CONTENT + CONTENT[:1000] + CONTENT


def test_the_frames_of_parallel_zstd_and_its_skippable_ones(tmp_path_factory: pytest.TempPathFactory) -> None:
    source = tmp_path_factory.mktemp("pzstd") / "a.tar"
    source.write_bytes(CONTENT)
    data = by_program(["pzstd", "-q", "-p", "3", "-c", str(source)], b"")
    assert decompressed(Compression.ZSTD, data) == CONTENT
    assert b"\x50\x2a\x4d\x18" in data  # each frame has its length in a skippable frame before it


def _skippable(number: int, size: int) -> bytes:
    return (0x184D2A50 + number).to_bytes(4, "little") + size.to_bytes(4, "little") + bytes(size)


@pytest.mark.parametrize("chunk_bytes", [1, 7, None])
def test_skippable_frames_are_skipped_wherever_they_are(chunk_bytes: int | None) -> None:
    one = compressed(Compression.ZSTD, CONTENT[:5_000])
    data = _skippable(0, 0) + one + _skippable(15, 300) + one + _skippable(3, 1)
    assert decompressed(Compression.ZSTD, data, chunk_bytes) == CONTENT[:5_000] * 2


@pytest.mark.parametrize("compression", ALL)
def test_an_empty_stream_is_no_end(compression: Compression) -> None:
    empty, one = compressed(compression, b""), compressed(compression, CONTENT)
    assert decompressed(compression, empty) == b""
    assert decompressed(compression, empty + one + empty + one) == CONTENT * 2


@pytest.mark.parametrize("padding_bytes", [1, 3, 4, 512, 100_000])
@pytest.mark.parametrize("chunk_bytes", [1_000, None])
def test_gzip_may_end_in_zeros(padding_bytes: int, chunk_bytes: int | None) -> None:
    data = compressed(Compression.GZIP, CONTENT) + bytes(padding_bytes)
    assert decompressed(Compression.GZIP, data, chunk_bytes) == CONTENT


def test_xz_streams_may_be_padded_to_multiples_of_four() -> None:
    one = compressed(Compression.XZ, CONTENT)
    assert decompressed(Compression.XZ, one + bytes(8) + one + bytes(4), chunk_bytes=3) == CONTENT * 2


@settings(max_examples=20, deadline=None)
@given(
    compression=st.sampled_from(ALL),
    sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=4),
    cuts=st.lists(st.floats(0, 1), max_size=12),
)
def test_the_result_does_not_depend_on_how_the_bytes_arrive(
    compression: Compression, sizes: list[int], cuts: list[float]
) -> None:
    contents = [mixed(size, seed) for seed, size in enumerate(sizes)]
    data = b"".join(compressed(compression, content) for content in contents)
    edges = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    decompressor = Decompressor(compression, URL)
    pieces = [piece for a, b in pairwise(edges) for piece in decompressor.feed(memoryview(data)[a:b])]
    decompressor.finish()
    assert b"".join(pieces) == b"".join(contents)


# -- bounded memory ------------------------------------------------------------------------------------------------


def _zstd_runs(blocks: int) -> bytes:
    """A frame of blocks that are 128 KiB of zeros each, in four bytes: the densest that zstd has."""
    block = (1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"\0"
    last = (1 | 1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + b"\x00\x58" + block * (blocks - 1) + last


DENSE_BYTES = 8 << 20


def _dense(compression: Compression) -> bytes:
    if compression is Compression.ZSTD:
        return _zstd_runs(DENSE_BYTES // (128 << 10))
    return compressed(compression, bytes(DENSE_BYTES))


@pytest.mark.parametrize("compression", ALL)
def test_no_piece_is_large_however_dense_the_input(compression: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    piece_bytes = 4 << 10
    monkeypatch.setattr(decompression, "PIECE_BYTES", piece_bytes)
    decompressor = Decompressor(compression, URL)
    sizes = [len(piece) for piece in decompressor.feed(_dense(compression))]
    decompressor.finish()
    assert min(sizes) > 0
    assert max(sizes) <= piece_bytes
    assert sum(sizes) == DENSE_BYTES


@pytest.mark.parametrize("compression", [Compression.ZSTD, Compression.XZ])
def test_a_bomb_is_refused_before_it_has_gone_off(compression: Compression) -> None:
    one = _dense(compression)
    assert DENSE_BYTES / len(one) > MOST_RATIO
    decompressor = Decompressor(compression, URL)
    with pytest.raises(ShardFormatError, match=r"over 1000 times as much.*bomb.*store it uncompressed") as caught:
        for _ in decompressor.feed(one * 10):
            pass
    assert caught.value.url == URL
    assert RATIO_FREE_BYTES < decompressor.decompressed_bytes <= RATIO_FREE_BYTES + (1 << 20)
