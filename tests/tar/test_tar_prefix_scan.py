"""Shards that are scanned piece by piece: the same table and the same errors as from the whole."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from crafted_tar import GNU, Archive, dialects, header, long_name, pax_mtime, pax_record, plain_archive
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import EVERY
from written_shards import assert_same_tables

from streamload.errors import ShardFormatError
from streamload.tar.scan import ScannedPiece, Scanner, ShardTable, scan_piece, scan_shard

URL = "memory/shard.tar"
NOISE = random.Random(3).randbytes(2 << 20)


def every_kind_of_member() -> Archive:
    """Samples of several members, with all that may stand between and within them."""
    archive = Archive()
    for number in range(5):
        name = b"s%d" % number
        archive.add(header(b"folder", 0, typeflag=b"5"))
        archive.add(*pax_mtime(number)).add(header(name + b".JPG", 700), b"j" * 700)
        archive.add(header(b".hidden", 600), b"h" * 600)
        archive.add(header(b"link", 0, typeflag=b"2"))
        archive.add(header(b"__meta__/x", 1), b"x")
        archive.add(header(b"g", 14, typeflag=b"g"), pax_record(b"comment", b"me"))
        archive.add(header(b"%s.f%d" % (name, number % 3), 3), b"abc").add(header(name + b".cls", 0))
        archive.add(*long_name(number)).add(header(b"x", number), b"y" * number)
        archive.add(header(b"volume", 0, typeflag=b"V", magic=GNU))
    return archive


def small_members(count: int) -> Archive:
    archive = Archive()
    for number in range(count):
        archive.add(header(b"s%d.bin" % number, number % 9), b"small pay"[: number % 9])
    return archive


SOUND = {name: archive.whole() for name, archive in dialects().items()} | {
    "every kind": every_kind_of_member().whole(),
    "record": plain_archive(4).whole(bytes(10_240)),
    "only hidden": Archive().add(header(b".a", 5), b"12345").add(header(b".b", 0)).whole(),
    "empty": bytes(1024),
    "many zeros": plain_archive(4).whole(bytes(20_480)),
    "too many zeros": Archive().add(header(b"a.bin", 700), b"a" * 10 + bytes(690)).whole(bytes(51_200)),
    "zeros and nothing": Archive().add(header(b".a", 700), b"a" * 700).whole(bytes(51_200)),
    "volume label": Archive().add(header(b"label", bytes(12), typeflag=b"V", magic=GNU)).whole(),
    "one name twice": Archive().add(*long_name(1)).add(*long_name(1)).add(header(b"a.bin", 3), b"abc").whole(),
    "two names": plain_archive(1).add(*long_name(1)).add(*long_name(2)).add(header(b"a.bin", 3), b"abc").whole(),
    "two pax headers": plain_archive(1).add(*pax_mtime(1)).add(*pax_mtime(2)).add(header(b"a.bin", 3), b"abc").whole(),
    "a long pax header": plain_archive(1).add(header(b"x", 1 << 30, typeflag=b"x"), bytes(2048)).whole(),
    "long": small_members(700).whole(),
}


def pieces_of(content: bytes, cuts: list[int], *, known: bool = True) -> list[ScannedPiece]:
    """Scan by pieces that end at the cuts; outside of each piece there is garbage where its bytes should be."""
    start, pieces = 0, []
    noise = NOISE[: len(content)]
    last = len(content)
    for cut in [*sorted(cuts), last]:
        first = min(start, cut)
        seen = noise[:first] + content[first:cut] + noise[cut:]
        total = len(content) if known or cut == last else None
        piece = scan_piece(memoryview(seen)[start : max(start, cut)], URL, start=start, total=total)
        check_piece(piece, start, cut)
        pieces.append(piece)
        start = piece.resume
        if piece.needs is None:
            break
    return pieces


def join(pieces: Iterable[ScannedPiece]) -> ShardTable:
    scanner = Scanner(URL)
    for piece in pieces:
        scanner.add(piece)
    assert scanner.needs is None
    return scanner.table()


def check_piece(piece: ScannedPiece, start: int, available: int) -> None:
    table = piece.table
    assert piece.start == start
    assert piece.resume >= start
    assert piece.needs is None or piece.needs > available
    assert sorted(set(table.member_field.tolist())) == list(range(len(table.fields)))
    if len(table.member_offset):
        assert start < table.member_offset[0]
        assert (table.member_offset + table.member_size).max() <= piece.resume
        if piece.needs is not None:
            assert (table.member_offset + table.member_size).max() <= available


def outcome(scan: Callable[[], ShardTable]) -> ShardTable | tuple[object, ...]:
    """The table, or what an error says."""
    try:
        return scan()
    except ShardFormatError as error:
        # Before the size of the shard is known, no error can name the length of its rest.
        message = re.sub("(at least )?[0-9,]+ bytes follow", "bytes follow", error.message)
        return type(error), message, error.url, error.key, error.offset


def check_same_outcome(content: bytes, cuts: list[int], *, known: bool = True) -> None:
    check_same(lambda: scan_shard(memoryview(content), URL), lambda: join(pieces_of(content, cuts, known=known)))


def check_same(whole: Callable[[], ShardTable], scan: Callable[[], ShardTable]) -> None:
    expected, found = outcome(whole), outcome(scan)
    if isinstance(expected, ShardTable):
        assert isinstance(found, ShardTable), found
        assert_same_tables(found, expected)
    else:
        assert found == expected


def cuts_of(content: bytes) -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.integers(0, len(content)), st.integers(0, len(content) // 512).map((512).__mul__)))


@settings(deadline=None)
@given(st.sampled_from(sorted(SOUND)), st.booleans(), st.data())
def test_the_pieces_joined_are_the_whole(name: str, known: bool, data: st.DataObject) -> None:
    content = SOUND[name]
    check_same_outcome(content, data.draw(cuts_of(content)), known=known)


@EVERY
@pytest.mark.parametrize("name", [name for name in SOUND if name != "long"])
def test_a_piece_may_end_anywhere(name: str, every: int) -> None:
    content = SOUND[name]
    places = {*range(0, len(content), 173 * every), *range(0, len(content), 512), *range(1536, 2049, every), 2047}
    for cut in sorted(places & set(range(len(content)))):
        check_same_outcome(content, [cut], known=cut % 2 == 0)


@settings(deadline=None)
@given(st.sampled_from([name for name in SOUND if name != "long"]), st.booleans(), st.data())
def test_one_damage_is_the_same_error(name: str, known: bool, data: st.DataObject) -> None:
    content = bytearray(SOUND[name])
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["byte", "zeros", "cut", "out", "second"]))
    if kind == "byte":
        content[at] ^= data.draw(st.integers(1, 255))
    elif kind == "zeros":
        content[at // 512 * 512 : at // 512 * 512 + 512] = bytes(min(512, len(content) - at // 512 * 512))
    elif kind == "cut":
        del content[at:]
    elif kind == "out":
        del content[at : at + 512]
    else:
        content += SOUND["ustar"]
    whole = bytes(content)
    check_same_outcome(whole, data.draw(cuts_of(whole)), known=known)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([name for name in SOUND if name != "long"]), st.integers(1, 5000), st.data())
def test_bytes_that_are_fed_give_the_same_table_and_the_same_error(name: str, step: int, data: st.DataObject) -> None:
    content = SOUND[name]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content) - 1))
        content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    places = [0, *sorted(data.draw(cuts_of(content))), len(content)]

    def fed() -> ShardTable:
        scanner = Scanner(URL, every_byte=True, step_bytes=step)
        for start, end in pairwise(places):
            scanner.feed(content[start:end])
        return scanner.finish()

    check_same(lambda: scan_shard(memoryview(content), URL, every_byte=True), fed)


def test_an_extension_header_that_is_too_long_is_refused_early() -> None:
    content = Archive().add(header(b"x", 1 << 30, typeflag=b"x")).whole(b"")
    for total in (None, 2 << 30):
        with pytest.raises(ShardFormatError, match="an extension header of 1073741824 bytes") as caught:
            scan_piece(memoryview(content), URL, start=0, total=total)
        assert caught.value.offset == 0


@pytest.mark.parametrize(
    "names",
    [
        [b"a.jpg", b"a.jpg"],
        [b"a.jpg", b"b.jpg", b"b.cls", b"b.JPG"],
        [b"z.jpg", b"a.jpg", b"b.jpg", b"a.cls", b"b.cls"],
        [b"a.jpg", b"b.jpg", b"c.jpg", b"b.cls", b"a.cls"],
        [b"a.jpg", b"b.jpg", b"a.jpg"],
        ["é.jpg".encode("latin-1"), b"b.jpg", "é.jpg".encode("latin-1"), b"c.jpg"],
    ],
)
def test_a_key_or_a_field_that_comes_again_is_the_same_error(names: list[bytes]) -> None:
    archive = Archive()
    for name in names:
        archive.add(header(name, 30), b"p" * 30)
    content = archive.whole()
    with pytest.raises(ShardFormatError):
        scan_shard(memoryview(content), URL)
    for cut in range(0, len(content), 256):
        check_same_outcome(content, [cut])
        check_same_outcome(content, [cut, min(cut + 1024, len(content))])
    check_same_outcome(content, list(range(0, len(content), 512)))
