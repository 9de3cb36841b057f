"""Shards that are scanned piece by piece: the same table and the same errors as from the whole."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from crafted_tar import GNU, Archive, dialects, header, long_name, pax_mtime, pax_record, plain_archive
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import EVERY
from written_shards import SAMPLES, write

from streamload.errors import ShardFormatError
from streamload.tar.scan import UNKNOWN_BYTES, GrowingTable, ScannedPiece, scan_prefix, scan_shard
from streamload.tar.table import ShardTable

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
        piece = scan_prefix(memoryview(seen), URL, start=start, available=cut, total=total)
        check_piece(piece, start, cut)
        pieces.append(piece)
        start = piece.resume
        if piece.ended:
            break
    return pieces


def join(pieces: Iterable[ScannedPiece]) -> ShardTable:
    growing = GrowingTable(URL)
    for piece in pieces:
        growing.add(piece)
    assert growing.ended
    return growing.table


def check_piece(piece: ScannedPiece, start: int, available: int) -> None:
    table = piece.table
    assert piece.start == start
    assert piece.resume >= start
    assert piece.needs is None or piece.needs > available
    assert sorted(set(table.member_field.tolist())) == list(range(len(table.fields)))
    if len(table.member_offset):
        assert start < table.member_offset[0]
        assert (table.member_offset + table.member_size).max() <= piece.resume
        if not piece.ended:
            assert (table.member_offset + table.member_size).max() <= available


def assert_same(joined: ShardTable, whole: ShardTable) -> None:
    for name in ShardTable.__slots__:
        one, other = getattr(joined, name), getattr(whole, name)
        if isinstance(other, np.ndarray):
            assert one.dtype == other.dtype, name
            assert one.tolist() == other.tolist(), name
        else:
            assert one == other, name


def outcome(content: bytes, cuts: list[int] | None, **options: bool) -> ShardTable | tuple[object, ...]:
    """The table, or what an error says; of the whole shard where there are no cuts."""
    try:
        if cuts is None:
            return scan_shard(memoryview(content), URL)
        return join(pieces_of(content, cuts, **options))
    except ShardFormatError as error:
        # Before the size of the shard is known, no error can name the length of its rest.
        message = re.sub("(at least )?[0-9,]+ bytes follow", "bytes follow", error.message)
        return type(error), message, error.url, error.key, error.offset


def check_same_outcome(content: bytes, cuts: list[int], *, known: bool = True) -> None:
    expected = outcome(content, None)
    found = outcome(content, cuts, known=known)
    if isinstance(expected, ShardTable):
        assert isinstance(found, ShardTable), found
        assert_same(found, expected)
    else:
        assert found == expected


def cuts_of(content: bytes) -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.integers(0, len(content)), st.integers(0, len(content) // 512).map((512).__mul__)))


@settings(deadline=None, max_examples=80)
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


@pytest.mark.parametrize("name", SOUND)
def test_block_by_block(name: str) -> None:
    content = small_members(100).whole() if name == "long" else SOUND[name]
    check_same_outcome(content, list(range(0, len(content), 512)))


def test_shards_of_the_writer(tmp_path: Path) -> None:
    many = [{**sample, "__key__": f"{number}/{sample['__key__']}"} for number in range(20) for sample in SAMPLES]
    writer = write(tmp_path / "a-%06d.tar", many)
    content = Path(writer.shards[0]).read_bytes()
    for seed in range(20):
        chance = random.Random(seed)
        check_same_outcome(content, [chance.randrange(len(content)) for _ in range(seed)])


@settings(deadline=None, max_examples=120)
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


def test_an_extension_header_that_is_too_long_is_refused_before_it_has_come() -> None:
    content = Archive().add(header(b"x", 1 << 30, typeflag=b"x")).whole(b"")
    for total in (None, 2 << 30):
        with pytest.raises(ShardFormatError, match="an extension header of 1073741824 bytes") as caught:
            scan_prefix(memoryview(content), URL, start=0, available=512, total=total)
        assert caught.value.offset == 0


def test_keys_with_too_many_bytes_are_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamload.tar.scan.MOST_KEY_BYTES", 40)
    content = SOUND["long"][: 512 * 60] + bytes(1024)
    assert not isinstance(outcome(content, None), ShardTable)
    for cut in range(0, len(content), 4096):
        check_same_outcome(content, [cut])


def test_every_header_of_a_long_shard_is_checked() -> None:
    archive = small_members(300)
    for number in (0, 1, 150, 299):
        content = bytearray(archive.whole())
        content[archive.headers[number] + 7] ^= 1
        for cut in (archive.headers[100], archive.headers[number], archive.headers[number] + 512):
            check_same_outcome(bytes(content), [cut])


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
    assert not isinstance(outcome(content, None), ShardTable)
    for cut in range(0, len(content), 256):
        check_same_outcome(content, [cut])
        check_same_outcome(content, [cut, min(cut + 1024, len(content))])
    check_same_outcome(content, list(range(0, len(content), 512)))


def test_too_many_fields_in_all_pieces_together() -> None:
    growing = GrowingTable(URL)
    start = 0
    for piece in range(3):
        count = 30_000
        table = ShardTable(
            shard_bytes=1 << 40,
            fields=tuple(f"f{piece}-{number}" for number in range(count)),
            member_offset=np.arange(count) * 512 + start + 512,
            member_size=np.zeros(count, np.int64),
            member_field=np.arange(count).astype(np.uint16),
            sample_start=np.arange(count + 1),
            key_bytes=np.frombuffer(b"".join(b"%d-%05d" % (piece, number) for number in range(count)), np.uint8),
            key_start=np.arange(count + 1) * 7,
        )
        found = ScannedPiece(start, table, start + count * 512, start + count * 512 + 512)
        start = found.resume
        if piece < 2:
            assert growing.add(found) is growing.table
            assert growing.table.fields[int(growing.table.member_field[-1])] == f"f{piece}-29999"
        else:
            with pytest.raises(ShardFormatError, match="90000 different fields"):
                growing.add(found)


def test_a_sample_is_whole_when_the_header_behind_it_has_come() -> None:
    archive = Archive()
    for name in (b"a.jpg", b"a.cls", b"b.jpg", b"b.cls"):
        archive.add(header(name, 1000), b"p" * 1000)
    content = archive.whole()
    ends = [*archive.headers, len(archive.content), len(content) - 512]
    for available in range(0, len(content) + 1, 256):
        piece = scan_prefix(memoryview(content), URL, start=0, available=available, total=len(content))
        mark = available == len(content)
        expected = 2 if mark else int(available >= archive.headers[2] + 512)
        assert len(piece.table) == expected, available
        assert piece.resume == (len(content) if mark else archive.headers[2] if expected else 0)
        if not mark:
            assert piece.needs in [end + 512 for end in ends], available
            assert piece.needs is not None
            assert available < piece.needs <= available + 512 + 1536


def test_the_next_header_is_found_behind_a_payload_that_has_not_come() -> None:
    archive = Archive().add(header(b"a.bin", 1 << 20), bytes(1 << 20)).add(header(b"b.bin", 0))
    piece = scan_prefix(memoryview(archive.whole()), URL, start=0, available=512, total=len(archive.whole()))
    assert (len(piece.table), piece.resume, piece.needs) == (0, 0, archive.headers[1] + 512)


def test_a_hidden_member_that_has_not_come_is_skipped() -> None:
    archive = Archive().add(header(b".hidden", 1 << 20), bytes(1 << 20)).add(header(b"b.bin", 0))
    content = archive.whole()
    first = scan_prefix(memoryview(content), URL, start=0, available=512, total=len(content))
    assert (first.resume, first.needs) == (archive.headers[1], archive.headers[1] + 512)
    assert first.table.skipped == {"hidden": 1}
    assert_same(join(pieces_of(content, [512, 600, 1 << 19])), scan_shard(memoryview(content), URL))


def test_a_piece_begins_at_the_extension_headers_of_its_first_sample() -> None:
    archive = Archive().add(header(b"a.bin", 0)).add(*long_name(1)).add(header(b"b.bin", 0)).add(header(b"c.bin", 0))
    content = archive.whole()
    piece = scan_prefix(memoryview(content), URL, start=0, available=archive.headers[3], total=len(content))
    assert piece.resume == archive.headers[1]
    assert piece.table.keys() == ["a"]


def test_members_that_are_skipped_are_not_read_again_and_again() -> None:
    archive = Archive()
    for number in range(100):
        archive.add(header(b"folder%d" % number, 0, typeflag=b"5")).add(header(b".%d" % number, 0))
    content = archive.whole()
    piece = scan_prefix(memoryview(content), URL, start=0, available=archive.headers[150], total=len(content))
    assert piece.resume == archive.headers[150]
    assert piece.table.skipped == {"directory": 75, "hidden": 75}


@pytest.mark.parametrize("zeros", [20 * 512, 64 * 512])
@pytest.mark.parametrize("known", [True, False])
def test_zeros_after_the_end_are_checked_as_they_come(zeros: int, known: bool) -> None:
    content = plain_archive(2).whole(bytes(zeros))
    mark = len(content) - zeros
    check_same_outcome(content, list(range(mark, len(content), 1000)), known=known)
    broken = bytearray(content)
    broken[-1] = 1
    for cut in (mark + 512, mark + 1024, mark + 5000, len(content) - 600, len(content) - 100):
        check_same_outcome(bytes(broken), [cut], known=known)


def test_what_follows_the_end_mark_is_reported_when_its_block_has_come() -> None:
    first = plain_archive(2).whole()
    for behind in (plain_archive(1).whole(), b"\0x" + bytes(510)):
        for known in (True, False):
            for cut in range(len(first), len(first) + 520, 40):
                check_same_outcome(first + behind, [min(cut, len(first + behind))], known=known)


def test_without_the_size_a_shard_does_not_end() -> None:
    content = plain_archive(3).whole()
    piece = scan_prefix(memoryview(content), URL, start=0, available=len(content), total=None)
    assert not piece.ended
    assert piece.table.shard_bytes == UNKNOWN_BYTES
    assert len(piece.table) == 2
    last = scan_prefix(memoryview(content), URL, start=piece.resume, available=len(content), total=len(content))
    assert_same(join([piece, last]), scan_shard(memoryview(content), URL))


def test_sizes_beyond_everything_are_no_trouble_where_the_size_is_not_known() -> None:
    for size in (b"\x80\0\0\0" + b"\x7f" + b"\xff" * 7, b"\x80\0\0\0" + b"\x3f" + b"\xff" * 7, b"77777777777\0"):
        for name in (b"z.bin", b".z"):
            content = plain_archive(2).add(header(name, size, magic=GNU)).whole()
            check_same_outcome(content, list(range(0, len(content), 512)), known=False)


@pytest.mark.parametrize(
    ("start", "available", "total"), [(1, 512, 1024), (-512, 512, 1024), (0, 2048, 1024), (0, 1536, None)]
)
def test_numbers_that_make_no_sense(start: int, available: int, total: int | None) -> None:
    with pytest.raises(ValueError, match="no part of an archive"):
        scan_prefix(memoryview(bytes(1024)), URL, start=start, available=available, total=total)


def test_pieces_must_follow_one_another() -> None:
    content = plain_archive(3).whole()
    first, last = pieces_of(content, [1500])
    with pytest.raises(ValueError, match="does not follow"):
        join([first, first])
    with pytest.raises(ValueError, match="does not follow"):
        join([last])
    with pytest.raises(ValueError, match="does not follow"):
        join([first, last, last])


def test_a_table_that_was_handed_out_does_not_change() -> None:
    content = SOUND["long"]
    growing, before = GrowingTable(URL), []
    for piece in pieces_of(content, list(range(0, len(content), 6_000))):
        table = growing.add(piece)
        before.append((table, table.keys(), table.member_offset.tolist(), table.column(("bin",)).tolist()))
        assert (growing.resume, growing.needs) == (piece.resume, piece.needs)
    assert len(before) > 100
    for table, keys, offsets, column in before:
        assert (table.keys(), table.member_offset.tolist(), table.column(("bin",)).tolist()) == (keys, offsets, column)
    assert growing.ended
    assert growing.table.member_offset.base is None, "no room is kept behind a finished table"


def test_adding_copies_little() -> None:
    """Each column is moved when it doubles and not with every piece."""
    content = SOUND["long"]
    growing, places = GrowingTable(URL), set()
    for piece in pieces_of(content, list(range(0, len(content), 6_000)))[:-1]:
        places.add(growing.add(piece).key_bytes.ctypes.data)
    assert 2048 < len(growing.table.key_bytes) <= 4096
    assert len(places) <= 3


_GUARDED = """
import ctypes, mmap, sys
import numpy as np
from streamload.tar.scan import scan_prefix

content = open(sys.argv[1], "rb").read()
start, available = int(sys.argv[2]), int(sys.argv[3])
assert start % mmap.PAGESIZE == 0 and available % mmap.PAGESIZE == 0
memory = mmap.mmap(-1, len(content))
memory.write(content)
data = np.frombuffer(memory, np.uint8)
libc = ctypes.CDLL(None, use_errno=True)
end = -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
for first, size in ((0, start), (available, end - available)):
    assert libc.mprotect(ctypes.c_void_p(data.ctypes.data + first), ctypes.c_size_t(size), 0) == 0
piece = scan_prefix(data, "", start=start, available=available, total=len(content))
assert len(piece.table) > 3
print(piece.resume)
"""


def test_memory_outside_of_the_part_is_not_even_touched(tmp_path: Path) -> None:
    """It is mapped without any right: a single read of it would kill the process."""
    archive = Archive()
    for number in range(40):
        archive.add(header(b"s%d.bin" % number, 512), b"p" * 512)
    content = archive.whole()
    (tmp_path / "a.tar").write_bytes(content)
    page = os.sysconf("SC_PAGESIZE")
    arguments = [str(tmp_path / "a.tar"), str(page), str(3 * page)]
    ran = subprocess.run(
        [sys.executable, "-c", _GUARDED, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert page < int(ran.stdout) < 3 * page
