"""Damage to archives: each is an error that says where, and none is a shorter table."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from crafted_tar import (
    GNU,
    USTAR,
    V7,
    Archive,
    dialects,
    header,
    long_name,
    pax_mtime,
    pax_record,
    payload_of,
    plain_archive,
)
from matrix import EVERY

from streamload.errors import ShardFormatError
from streamload.tar import header_chain
from streamload.tar.scan import ShardTable, scan_shard

DIALECTS = dialects()
URL = "memory/shard.tar"


@pytest.fixture(scope="module", autouse=True, params=[0, 1 << 30], ids=["by NumPy", "one by one"])
def few_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read headers by NumPy, and one by one: each finds the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_chain, "FEW_BYTES", request.param)
        yield


def scan(content: bytes) -> ShardTable:
    return scan_shard(memoryview(content), URL)


def damage_in(content: np.ndarray | memoryview, **options: bool) -> ShardFormatError | None:
    """The error that a scan raises, if it raises one; anything but a ShardFormatError comes through."""
    try:
        scan_shard(content, URL, **options)
    except ShardFormatError as error:
        return error
    return None


def error_of(content: bytes) -> ShardFormatError:
    with pytest.raises(ShardFormatError) as caught:
        scan(content)
    assert caught.value.url == URL
    assert caught.value.offset is not None
    return caught.value


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_whole_archive_has_every_member(dialect: str) -> None:
    archive = DIALECTS[dialect]
    table = scan(archive.whole())
    payloads = [payload_of(number) for number in range(len(table))]
    whole = archive.whole()
    found = zip(table.member_offset.tolist(), table.member_size.tolist(), strict=True)
    assert [whole[start : start + size] for start, size in found] == payloads
    assert len(payloads) == (10 if dialect == "gnu" else 3)
    assert table.skipped == {}


def member_ends(archive: Archive) -> set[int]:
    """Where members end, so where the next one's first header starts, or the end-of-archive marker."""
    table = scan(archive.whole())
    return {end + -end % 512 for end in (table.member_offset + table.member_size).tolist()}


@EVERY
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_cut_at_any_byte_is_an_error(dialect: str, every: int) -> None:
    archive = DIALECTS[dialect]
    whole = np.frombuffer(archive.whole(), np.uint8)
    ends = member_ends(archive)
    beside_edges = {edge + by for edge in range(0, len(whole), 512) for by in (-1, 0, 1)} - {-1}
    for length in sorted({*range(0, len(whole), every), *beside_edges}):
        if length in ends:  # it may have been written without an end-of-archive marker, which is counted
            assert "missing end-of-archive marker" in scan_shard(whole[:length], URL).skipped
            continue
        error = damage_in(whole[:length])
        assert error is not None, f"cut to {length} of {len(whole)} bytes, and read as if whole"
        assert error.url == URL
        assert error.offset is not None
        assert 0 <= error.offset <= length


@pytest.mark.parametrize("content", [b"hello, this is a short note\n", DIALECTS["gnu"].whole()[:511]])
def test_what_is_shorter_than_a_block_is_no_archive_or_was_cut(content: bytes) -> None:
    assert "is not a tar archive, or was cut in its first block" in error_of(content).message


def test_a_cut_in_the_zeros_behind_the_end_mark_must_be_between_blocks() -> None:
    content = DIALECTS["gnu"].whole(bytes(5 * 512))
    mark_end = len(content) - 3 * 512
    for length in (*range(mark_end, len(content), 5), *range(mark_end, len(content) + 1, 512)):
        if length % 512:
            error = error_of(content[:length])
            assert "in the middle of a block" in error.message
            assert error.offset == length // 512 * 512
        else:
            assert len(scan(content[:length])) == 10


@pytest.mark.parametrize("members", range(1, 45))
def test_zeros_up_to_the_end_of_the_default_record_end_an_archive(members: int) -> None:
    """The marker may begin in the last block of a record, and then takes a whole one more."""
    archive = plain_archive(members)
    start = len(archive.content)
    end = max(start + 10_240, start + 1024 + -(start + 1024) % 10_240)
    for length in (1024, 1536, end - start - 512, end - start):
        assert len(scan(archive.whole(bytes(length)))) == members
    for length in (end - start + 512, 100 * 10_240, 1 << 20):
        error = error_of(archive.whole(bytes(length)))
        assert error.offset == start
        assert f"{length:,} bytes follow" in error.message
        assert "not copied to its end" in error.message
        assert "without `tar -b`," in error.message


@pytest.mark.parametrize("length", [10_752, 16_384, 65_536, 1 << 20, 3_000_000 // 512 * 512])
def test_a_file_of_zeros_is_no_archive_unless_it_is_one_record(length: int) -> None:
    error = error_of(bytes(length))
    assert (error.offset, f"{length:,} bytes" in error.message) == (0, True)


@EVERY
@pytest.mark.parametrize("dialect", DIALECTS)
def test_any_changed_byte_in_any_header_is_an_error_at_that_header(dialect: str, every: int) -> None:
    archive = DIALECTS[dialect]
    content = np.frombuffer(archive.whole(), np.uint8).copy()
    for number, start in enumerate(archive.headers):
        values = [lambda old: old ^ 0x01, lambda old: old ^ 0xFF, lambda _: 0x20, lambda _: 0, lambda _: 0x30]
        # All of them in one header, in the others one of them at each byte; and that is what `every` is taken of.
        for position in range(start, start + 512) if number == 1 else range(start + number % every, start + 512, every):
            chosen = values if number == 1 and every == 1 else [values[(position + number) % len(values)]]
            for new_value in chosen:
                old = int(content[position])
                new = new_value(old)
                if new == old or (_ends_checksum(position - start, dialect) and new in (0, 0x20)):
                    continue
                content[position] = new
                error = damage_in(content)
                content[position] = old
                what = f"byte {position - start} of header {number} changed from {old} to {new}"
                assert error is not None, what
                assert (error.url, error.offset) == (URL, start), what


def _ends_checksum(byte: int, dialect: str) -> bool:
    return byte == 155 or (byte == 154 and dialect != "seven digits")


@pytest.mark.parametrize("dialect", ["gnu", "v7", "v7, space-padded", "seven digits"])
def test_no_other_spelling_of_the_checksum_passes(dialect: str) -> None:
    """Its own bytes are not part of the sum, so only the strict reading of the field protects them."""
    archive = DIALECTS[dialect]
    content = np.frombuffer(archive.whole(), np.uint8).copy()
    start = archive.headers[1]
    for byte in range(148, 156):
        old = int(content[start + byte])
        for new in {0, 9, 10, 0x20, *range(0x28, 0x40), 0x5F, 0x80, 0xB0, 0xFF} - {old}:
            if _ends_checksum(byte, dialect) and new in (0, 0x20):
                continue
            content[start + byte] = new
            with pytest.raises(ShardFormatError) as caught:
                scan_shard(content, URL)
            assert caught.value.offset == start
        content[start + byte] = old


def test_the_end_mark_has_no_byte_that_may_change() -> None:
    content = bytearray(DIALECTS["gnu"].whole(bytes(3 * 512)))
    mark = len(content) - 3 * 512
    for position in range(mark, len(content), 7):
        content[position] = 1
        offset = error_of(bytes(content)).offset
        content[position] = 0
        # A single block of zeros may have been a header once, so it is the bad place.
        assert offset == (mark if position < mark + 1024 else position // 512 * 512)


def test_a_header_overwritten_with_zeros_is_found_there() -> None:
    archive = DIALECTS["gnu"]
    for start in archive.headers:
        content = bytearray(archive.whole())
        content[start : start + 512] = bytes(512)
        assert error_of(bytes(content)).offset == start


def test_a_damaged_header_is_reported_and_not_where_walking_went_astray() -> None:
    """In a long shard, so that the bad header stands inside a block of headers that is verified at once."""
    archive = plain_archive(700, magic=GNU)
    for number in (1, 2, 498, 499, 500, 501, 699):
        start = archive.headers[number]
        for size in (b"00000000000\0", b"77777777777\0", b"-0000001000\0", b"0o000000010\0", b"0_000000010\0"):
            content = bytearray(archive.whole())
            content[start + 124 : start + 136] = size
            assert error_of(bytes(content)).offset == start


def test_only_the_first_of_two_damages_is_reported() -> None:
    archive = plain_archive(600)
    content = bytearray(archive.whole())
    for number in (500, 40, 300):
        content[archive.headers[number]] ^= 1
    assert error_of(bytes(content)).offset == archive.headers[40]


def test_two_archives_in_one_file() -> None:
    first, second = DIALECTS["gnu"].whole(), DIALECTS["ustar"].whole()
    for gap in (0, 8 * 512):
        error = error_of(first + bytes(gap) + second)
        assert error.offset == len(first) + gap
        assert "a second archive follows" in error.message
        assert "cat" in error.message
    error = error_of(first + b"\n" + bytes(511))
    assert "other bytes follow" in error.message
    assert error.offset == len(first)


def test_a_missing_end_of_archive_marker_is_counted() -> None:
    for archive in DIALECTS.values():
        table = scan(archive.whole(b""))
        assert table.skipped == {"missing end-of-archive marker": 1}
        assert len(table) == len(scan(archive.whole()))


def test_half_an_end_of_archive_marker_is_an_error() -> None:
    for archive in DIALECTS.values():
        error = error_of(archive.whole(bytes(512)))
        assert "cut in its end-of-archive marker" in error.message
        assert error.offset == len(archive.content)


def test_an_empty_file_is_an_error_and_an_empty_archive_is_not() -> None:
    assert "empty" in error_of(b"").message
    assert len(scan(bytes(1024))) == 0
    assert len(scan(bytes(10240))) == 0
    error_of(bytes(512))


def test_a_file_that_is_no_archive_is_named_so() -> None:
    assert "not a tar archive" in error_of(b"words " * 1000).message


@pytest.mark.parametrize("extension", [pax_mtime(0), long_name(0), (header(b"k", 2, typeflag=b"K"), b"l\0")])
def test_an_extension_header_without_a_member_is_an_error(extension: tuple[bytes, bytes]) -> None:
    archive = plain_archive(2).add(*extension)
    start = archive.headers[2]
    for end in (bytes(1024), b""):
        assert error_of(archive.whole(end)).offset == start
    archive = plain_archive(2).add(*extension).add(header(b"g", 0, typeflag=b"g")).add(header(b"z.bin", 0))
    assert error_of(archive.whole()).offset == start


def test_extension_headers_that_contradict_each_other_are_refused() -> None:
    """Python's tarfile, Go, bsdtar and GNU tar take different ones of them."""
    path = pax_record(b"path", b"p.bin")
    pax = header(b"x", len(path), typeflag=b"x"), path
    for pair in ([long_name(0), long_name(1)], [long_name(0), pax], [pax, long_name(0)], [pax, pax_mtime(0)]):
        archive = plain_archive(2).add(*pair[0]).add(*pair[1]).add(header(b"z.bin", 0))
        error = error_of(archive.whole())
        assert "readers" in error.message
        assert error.offset == archive.headers[2]


@pytest.mark.parametrize("name_bytes", [(64 << 10) + 1, 1 << 19])
def test_names_that_no_file_has_are_refused(name_bytes: int) -> None:
    name = b"n" * (name_bytes - 4) + b".bin"
    path = pax_record(b"path", name)
    for extension in (header(b"L", len(name), typeflag=b"L"), name), (header(b"x", len(path), typeflag=b"x"), path):
        archive = plain_archive(2).add(*extension).add(header(b"z.bin", 0))
        error = error_of(archive.whole())
        assert f"a name of {name_bytes} bytes" in error.message
        assert error.offset == archive.headers[2]
    assert len(scan(Archive().add(header(b"L", 65536, typeflag=b"L"), name[-65536:]).add(header(b"z", 0)).whole())) == 1


def test_keys_that_have_too_many_bytes_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamload.tar.scan.MOST_KEY_BYTES", 200)
    archive = plain_archive(3, before=long_name)
    error = error_of(archive.whole())
    assert error.offset == archive.headers[3]
    assert "shorter names" in error.message


MALFORMED_RECORDS = [
    b"garbage",
    b"99 path=short\n",
    b"12 path=a.bin",
    b"13 path=a.binX",
    b"5 pat\n",
    b"6 =abc\n",
    b"0 path=a\n",
    b"-9 path=a\n",
    b"11 path=a\0b\n",
    b"11 size=-12\n",
    b"10 size=+3\n",
    b"9 size=x\n",
    b"28 size=99999999999999999999\n",
    b"10 path=a\n\0\0\0",
]
NO_NUMBERS = b"\xff" * 12, b"\x80" + b"\xff" * 11, b"            ", bytes(12), b"0000000008x\0", b"00000 00001\0"
UNREADABLE = [
    *((b"x", record, "pax") for record in MALFORMED_RECORDS),
    (b"x", b"22 GNU.sparse.major=1\n", "GNU.sparse.major"),
    *((b"g", record, "some readers") for record in (b"9 path=a\n", b"9 size=1\n")),
    *((b"L", name, "empty GNU long name") for name in (b"", b"\0\0", b"\0name.bin")),
    *((typeflag, bytes(2 << 20), "2097152") for typeflag in (b"x", b"g", b"L")),
    (b"S", b"", "'S'.*--sparse"),
    (b"M", b"", "'M'.*another volume"),
    (b"N", b"", "'N'.*long names"),
    *((typeflag, b"", f"'{typeflag.decode()}'.*unknown") for typeflag in (b"Z", b"X")),
]


@pytest.mark.parametrize(
    ("block", "payload", "words"),
    [
        *((header(b"odd.bin", len(payload), typeflag=kind), payload, words) for kind, payload, words in UNREADABLE),
        *((header(b"z.bin", size, magic=GNU), b"", "size") for size in NO_NUMBERS),
        (header(b"z.bin", 5000), b"z" * 100, "5000 bytes"),
        (header(b"z.bin", 0, magic=b"ustarXYZ"), b"", "magic"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)
def test_what_cannot_be_read_in_place_is_refused_at_its_header(block: bytes, payload: bytes, words: str) -> None:
    archive = plain_archive(2).add(block, payload)
    if block[156:157] in b"xgL":
        archive.add(header(b"z.bin", 0))
    error = error_of(archive.whole())
    assert re.search(words, error.message)
    assert error.offset == archive.headers[2]


def test_signed_checksums_are_for_v7_only() -> None:
    name = "é.bin".encode()
    assert len(scan(Archive().add(header(name, 0, magic=V7, signed=True)).whole())) == 1
    for magic in (USTAR, GNU):
        assert error_of(Archive().add(header(name, 0, magic=magic, signed=True)).whole()).offset == 0


def test_one_space_padded_number_makes_the_checksum_space_padded() -> None:
    """Else a leading space of the checksum could become a zero and pass."""
    archive = Archive().add(header(b"z" * 60 + b".bin", b"00000000001\0", space_padded=True), b"a")
    content = bytearray(archive.whole())
    assert len(scan(bytes(content))) == 1
    assert content[148:150] == b" 2"
    content[148] = ord("0")
    assert error_of(bytes(content)).offset == 0
