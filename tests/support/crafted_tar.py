"""Tar archives made byte by byte, so that tests know where each header starts and can write what no tar would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

END_OF_ARCHIVE = bytes(1024)
USTAR, GNU, V7 = b"ustar\x0000", b"ustar  \x00", bytes(8)


def header(
    name: bytes,
    size: int | bytes,
    *,
    typeflag: bytes = b"0",
    magic: bytes = USTAR,
    prefix: bytes = b"",
    space_padded: bool = False,
    checksum: Callable[[int], bytes] | None = None,
    signed: bool = False,
) -> bytes:
    """One header block; `size` as bytes is the field itself, `checksum` writes the checksum field."""
    digits = (lambda width, number: b"%*o " % (width, number)) if space_padded else _zero_padded
    size_field = size if isinstance(size, bytes) else digits(11, size)
    block = bytearray(
        name.ljust(100, b"\0")
        + digits(6 if space_padded else 7, 0o644).ljust(8, b"\0")
        + digits(6 if space_padded else 7, 0).ljust(8, b"\0") * 2
        + size_field
        + digits(11, 0o14000000000)
        + b" " * 8
        + typeflag
        + bytes(100)
        + magic
        + bytes(80)
        + prefix.ljust(155, b"\0")
        + bytes(12)
    )
    assert len(block) == 512
    total = sum(block) - 256 * signed * sum(byte > 127 for byte in block)
    if checksum is None:
        checksum = (lambda number: b"%6o\0 " % number) if space_padded else (lambda number: b"%06o\0 " % number)
    block[148:156] = checksum(total)
    return bytes(block)


def _zero_padded(width: int, number: int) -> bytes:
    return b"%0*o\0" % (width, number)


def pax_record(keyword: bytes, value: bytes) -> bytes:
    length = len(keyword) + len(value) + 3
    while len(str(length)) + len(keyword) + len(value) + 3 != length:
        length += 1
    return b"%d %s=%s\n" % (length, keyword, value)


@dataclass
class Archive:
    """Bytes, and where in them headers start."""

    content: bytearray = field(default_factory=bytearray)
    headers: list[int] = field(default_factory=list)

    def add(self, block: bytes, payload: bytes = b"") -> Archive:
        self.headers.append(len(self.content))
        self.content += block + payload + bytes(-len(payload) % 512)
        return self

    def whole(self, end: bytes = END_OF_ARCHIVE) -> bytes:
        return bytes(self.content) + end


def payload_of(number: int) -> bytes:
    return bytes([number % 255 + 1]) * (number * 37)


def plain_archive(
    members: int,
    *,
    before: Callable[[int], tuple[bytes, bytes]] | None = None,
    size: Callable[[int], int | bytes] = int,
    **options: Any,
) -> Archive:
    """Members `s0.bin`, `s1.bin`, ... of different sizes, the first of 0 bytes; `before` makes an extension header."""
    archive = Archive()
    for number in range(members):
        if before is not None:
            archive.add(*before(number))
        payload = payload_of(number)
        archive.add(header(b"s%d.bin" % number, size(len(payload)), **options), payload)
    return archive


def pax_mtime(number: int) -> tuple[bytes, bytes]:
    records = pax_record(b"mtime", b"1700000000.%d" % number)
    return header(b"PaxHeaders/s", len(records), typeflag=b"x"), records


def long_name(number: int) -> tuple[bytes, bytes]:
    name = b"long/" * 30 + b"s%d.bin\0" % number
    return header(b"././@LongLink", len(name), typeflag=b"L", magic=GNU), name


def base_256(number: int) -> bytes:
    return b"\x80" + number.to_bytes(11, "big")


def dialects(members: int = 3) -> dict[str, Archive]:
    """A sound archive of each dialect, without its end-of-archive marker; ten members in the most usual one."""
    return {
        "gnu": plain_archive(10, magic=GNU),
        "ustar": plain_archive(members),
        "ustar, prefix": plain_archive(members, prefix=b"some/folder"),
        "v7": plain_archive(members, magic=V7, typeflag=b"\0"),
        "v7, space-padded": plain_archive(members, magic=V7, typeflag=b"\0", space_padded=True),
        "seven digits": plain_archive(members, magic=GNU, checksum=lambda number: b"%07o\0" % number),
        "base-256": plain_archive(members, size=base_256, magic=GNU),
        "pax": plain_archive(members, before=pax_mtime),
        "gnu long names": plain_archive(members, before=long_name),
    }
