"""Write the header blocks of a tar member: ustar, with a pax record only if ustar cannot hold a value.

A header depends on name and size alone (no time, owner zero, mode 0644). Writing is over ten times as fast as
`tarfile.TarInfo.tobuf`.
"""

from __future__ import annotations

import zlib

from streamload.tar.header_chain import BLOCK_BYTES

END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
"""Two zero blocks close an archive; nothing follows them."""

_NAME_BYTES = 100
_PREFIX_BYTES = 155
_MAX_USTAR_SIZE = 8**11 - 1
_MODE_UID_GID = b"0000644\0" + b"0000000\0" + b"0000000\0"
_MTIME = b"00000000000\0"
_MAGIC_TO_DEVICES = b"ustar\x00" + b"00" + bytes(32) + bytes(32) + b"0000000\0" + b"0000000\0"
_BLANK_CHECKSUM = b" " * 8
_FIXED_SUM = sum(_MODE_UID_GID + _MTIME + _BLANK_CHECKSUM + _MAGIC_TO_DEVICES)
_LINK_NAME = bytes(100)
_REGULAR = b"0"
_PAX = b"x"
_PAX_NAME = b"././@PaxHeader"


def member_header(name: str, size: int) -> bytes:
    """Return the header blocks of a member.

    Args:
        name: the member's path, without NUL.
        size: payload bytes.

    Returns:
        One block if ustar can hold the values. Else three or more, beginning with a pax header: for a payload of 8 GiB
        or more, a name that is not ASCII, or a name over 100 bytes that no slash splits into at most 155 and 100
        bytes.
    """
    path = name.encode("utf-8")
    records = b""
    if size > _MAX_USTAR_SIZE:
        records = _pax_record(b"size", b"%d" % size)
        size = 0
    prefix = b""
    if len(path) > _NAME_BYTES or not path.isascii():
        cut = path.rfind(b"/", 1, _PREFIX_BYTES + 1) if path.isascii() else -1
        if cut > 0 and 0 < len(path) - cut - 1 <= _NAME_BYTES:
            prefix, path = path[:cut], path[cut + 1 :]
        else:
            records = _pax_record(b"path", path) + records
            path = name.encode("ascii", "replace")[:_NAME_BYTES]
    header = _block(path, prefix, size, _REGULAR)
    if not records:
        return header
    return _block(_PAX_NAME, b"", len(records), _PAX) + records + padding(len(records)) + header


def padding(size: int) -> bytes:
    """Return the zeros that fill a payload's last block."""
    return bytes(-size % BLOCK_BYTES)


def member_bytes(header: bytes, size: int) -> int:
    """Return the size of a member in the archive, with headers and padding."""
    return len(header) + size + -size % BLOCK_BYTES


def _block(name: bytes, prefix: bytes, size: int, kind: bytes) -> bytes:
    digits = b"%011o\0" % size
    checksum = _FIXED_SUM + _sum(name) + _sum(prefix) + _sum(digits) + kind[0]
    start = name.ljust(_NAME_BYTES, b"\0") + _MODE_UID_GID + digits + _MTIME + b"%06o\0 " % checksum + kind
    return start + _LINK_NAME + _MAGIC_TO_DEVICES + prefix.ljust(_PREFIX_BYTES + 12, b"\0")


def _sum(part: bytes) -> int:
    """Return the sum of at most 255 bytes by Adler-32 (RFC 1950), many times faster than `sum`."""
    return (zlib.adler32(part) & 0xFFFF) - 1


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    rest = b" " + keyword + b"=" + value + b"\n"
    length = len(rest)  # the length counts its own digits too
    while len(rest) + len(b"%d" % length) != length:
        length = len(rest) + len(b"%d" % length)
    return b"%d" % length + rest
