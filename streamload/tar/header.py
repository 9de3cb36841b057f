"""One tar header at a time, read strictly: checksum, numbers, names and extension records.

The layout of the fields is that of POSIX.1-1988 (ustar) and POSIX.1-2001 (pax), the GNU additions are those of GNU
tar's manual ("Basic Tar Format"). A header is either fully understood or an error that names its offset; nothing is
guessed. `what_else` says what a file is instead of an archive.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

from streamload.errors import ShardFormatError

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
}
_TEXTS = {
    b"version https://git-lfs": "a Git LFS pointer in place of the shard; run `git lfs pull`",
    b"<!doctype html": "a web page, perhaps of a server's error; look at it, and fetch the shard again",
    b"<html": "a web page, perhaps of a server's error; look at it, and fetch the shard again",
    b"<?xml": "an XML document, perhaps a bucket's error; look at it, and fetch the shard again",
    b"pk\x03\x04": "a zip archive, not a tar archive; decompress it, and pack the files as tar",
}


def what_else(head: bytes, compressed_as: str | None = None) -> str | None:
    """Return the kind of a file that is no tar archive, and what to do; None if its first bytes don't tell.

    Args:
        head: the first bytes, a block of 512 at best.
        compressed_as: the expected compression ("gzip", "zstd", "xz", "bzip2"); None for a plain archive.
    """
    start = head[:64].lstrip().lower()
    for magic, kind in _TEXTS.items():
        if start.startswith(magic):
            return f"this is {kind}"
    if compressed_as and head[257:262] == b"ustar":
        return "this is a plain tar archive, not a compressed one; name it .tar"
    compression = next((kind for magic, kind in _COMPRESSED.items() if head.startswith(magic)), None)
    if compression in (None, compressed_as):
        return None
    if compressed_as:
        return f"this is {compression} data, which is not what its name says; name it by its compression"
    return f"this is {compression} data, not a plain tar archive; decompress it, or name it by its compression"


BLOCK_BYTES = 512
"""Headers start at multiples of this, and payloads are padded with zeros to a multiple of it."""

ZERO_BLOCK = bytes(BLOCK_BYTES)
"""Two of these are the end-of-archive marker."""

MAX_RECORDS_BYTES = 1 << 20
"""Maximum size of an extension payload (pax records, a GNU long name)."""

MAX_NAME_BYTES = 64 << 10
"""Maximum length of a member's name; Linux opens paths of up to 4 KiB."""

_SPACE = ord(" ")
_INT64_MAX = (1 << 63) - 1
_OCTAL = re.compile(rb"[0-7]+")
_DECIMAL = re.compile(rb"0*[0-9]{1,19}")
_RECORD = re.compile(rb"([0-9]{1,19}) ([^=]+)=")
_CHECKED_RECORDS = (b"path", b"size")
_ZERO_PADDED_SUM = re.compile(rb"([0-7]{6}[0-7]?)[\0 ]{1,2}")
_SPACE_PADDED_SUM = re.compile(rb" *([1-7][0-7]*)[\0 ]{1,2}")


class TarHeader(NamedTuple):
    """The fields of one header block.

    Attributes:
        typeflag: the byte for the kind of the member.
        name: the member's name, before any extension header is applied.
        size: payload bytes by the header's own field; None if the field holds no number.
    """

    typeflag: bytes
    name: bytes
    size: int | None


def padded(size_bytes: int) -> int:
    """Round the size of a payload up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def parse_size(field: bytes) -> int | None:
    """Return the number in a numeric field: octal digits between spaces or NULs, or base-256 after a byte of 0x80.

    None for anything else: no digits, other bytes, a negative number, or one of more than 63 bits.
    """
    if field[0] == 0x80:
        number = int.from_bytes(field[1:], "big")
        return number if number <= _INT64_MAX else None
    digits = field.strip(b" \0")
    return int(digits, 8) if _OCTAL.fullmatch(digits) else None


def parse_header(block: bytes, url: str, offset: int) -> TarHeader:
    """Read a header block of 512 bytes that is not all zeros; `url` and `offset` are for errors.

    Raises:
        ShardFormatError: the checksum field or the magic is malformed, or the checksum does not match the bytes.
    """
    _check_sum(block, url, offset)
    if block[257:262] == b"ustar" and block[262] not in b"\0 ":
        raise ShardFormatError(
            f"the tar header has the unknown magic {block[257:265]!r}; re-pack the shard as ustar, pax or GNU tar",
            url=url,
            offset=offset,
        )
    typeflag, size = block[156:157], parse_size(block[124:136])
    if typeflag == b"V" and not block[124:136].strip(b" \0"):
        size = 0  # GNU tar leaves all numbers of a volume label blank
    return TarHeader(typeflag, _name_in_block(block), size)


def _name_in_block(block: bytes) -> bytes:
    """Return a header's own name: `name`, after `prefix` and a slash if a ustar header has a prefix."""
    name = block[:100].partition(b"\0")[0]
    # Only POSIX's magic has a prefix: GNU headers keep times and sparse maps in these bytes.
    if block[257:263] == b"ustar\0" and block[345]:
        return block[345:500].partition(b"\0")[0] + b"/" + name
    return name


def looks_like_header(block: bytes) -> bool:
    """Return True if a block's checksum is right, which random bytes almost never achieve."""
    return len(block) == BLOCK_BYTES and _stored_sum(block) == _header_sum(block)


def _check_sum(block: bytes, url: str, offset: int) -> None:
    stored = _stored_sum(block)
    total = _header_sum(block)
    if stored == total:
        return
    # Tars older than ustar added the bytes up as signed numbers. In a ustar header this is not accepted, since it
    # would let one changed digit of the checksum itself pass.
    high_bytes = sum(byte >= 0x80 for byte in block[:148] + block[156:])
    if block[257:262] != b"ustar" and stored == total - 256 * high_bytes:
        return
    if offset == 0 and (what := what_else(block)) is not None:
        raise ShardFormatError(what, url=url, offset=offset)
    why = "its checksum field is malformed" if stored is None else f"checksum {stored}, but its bytes add up to {total}"
    start = "this is not a tar archive" if offset == 0 else "no tar header where one must be"
    raise ShardFormatError(f"{start} ({why}); fetch the shard again or re-pack it", url=url, offset=offset)


def _header_sum(block: bytes) -> int:
    """Return the sum of a header's bytes, with spaces in place of the checksum field.

    The low half of Adler-32 (RFC 1950) is 1 + the sum of the bytes modulo 65521, and 256 bytes cannot reach that
    modulus; this is many times faster than `sum`.
    """
    byte_sum = (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2
    return byte_sum - sum(block[148:156]) + 8 * _SPACE


def _stored_sum(block: bytes) -> int | None:
    """Return the number in the checksum field, so strictly that no other byte in place of a digit or pad passes."""
    pattern = _SPACE_PADDED_SUM if _is_space_padded(block) else _ZERO_PADDED_SUM
    match = pattern.fullmatch(block, 148, 156)
    return int(match[1], 8) if match else None


def _is_space_padded(block: bytes) -> bool:
    """Return True if the writer pads numbers with spaces, as V7 tar did: by mode, uid, gid, size and mtime."""
    if block[136] != _SPACE and _SPACE not in block[100:125:8]:
        return False
    fields = (block[100:108], block[108:116], block[116:124], block[124:136], block[136:148])
    return any(field.startswith(b" ") and field.strip(b" \0") for field in fields)


def parse_long_name(payload: bytes, url: str, offset: int) -> bytes:
    """Return the name in the payload of a GNU 'L' or 'K' member: the bytes before the first NUL.

    Raises:
        ShardFormatError: there is no name, or it is longer than `MAX_NAME_BYTES`.
    """
    name = payload.partition(b"\0")[0]
    if not name:
        raise ShardFormatError("an empty GNU long name; re-pack the shard", url=url, offset=offset)
    _check_name_bytes(name, url, offset)
    return name


def _check_name_bytes(name: bytes, url: str, offset: int) -> None:
    if len(name) > MAX_NAME_BYTES:
        raise ShardFormatError(
            f"a name of {len(name)} bytes (at most {MAX_NAME_BYTES} are read); re-pack the shard with shorter names",
            url=url,
            offset=offset,
        )


def parse_records(payload: bytes, url: str, offset: int) -> dict[bytes, bytes]:
    """Return the records of a pax header, each written as `length keyword=value` and a line feed.

    Raises:
        ShardFormatError: a record is malformed or concerns a sparse file, or `path` or `size` has an impossible value.
    """
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(payload):
        match = _RECORD.match(payload, start)
        end = start + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(payload) or payload[end - 1] != ord("\n"):
            raise ShardFormatError(
                f"malformed pax record {payload[start : start + 40]!r}; re-pack the shard", url=url, offset=offset
            )
        keyword, value = match[2], payload[match.end() : end - 1]
        if keyword in _CHECKED_RECORDS or keyword.startswith(b"GNU.sparse."):
            _check_record(keyword, value, url, offset)
        records[keyword] = value
        start = end
    return records


def _check_record(keyword: bytes, value: bytes, url: str, offset: int) -> None:
    if keyword.startswith(b"GNU.sparse."):
        raise ShardFormatError(
            f"a sparse file (pax record {keyword.decode('ascii', 'replace')}) cannot be read in place; "
            "re-pack it without `tar --sparse` (`bsdtar --no-read-sparse`)",
            url=url,
            offset=offset,
        )
    if keyword == b"path" and b"\0" in value:
        raise ShardFormatError("pax path with a NUL in it; re-pack the shard", url=url, offset=offset)
    if keyword == b"path":
        _check_name_bytes(value, url, offset)
    if keyword == b"size" and value and not (_DECIMAL.fullmatch(value) and int(value) <= _INT64_MAX):
        raise ShardFormatError(
            f"pax size {value[:40]!r} is not a number of bytes in decimal digits; re-pack the shard",
            url=url,
            offset=offset,
        )
