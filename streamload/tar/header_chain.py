"""Read the headers of a tar archive strictly, as they arrive, up to the end-of-archive marker.

Fields are laid out as in POSIX.1-1988 (ustar), POSIX.1-2001 (pax) and GNU tar's manual ("Basic Tar Format"). A header
that is not fully understood is an error with its offset; nothing is guessed.

NumPy verifies runs of headers. Any other header is read by `_parse_header`, in order, so the first damaged header is
reported. No payloads are touched except those of extension headers.
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardFormatError
from streamload.text import counted

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

MISSING_END = "missing end-of-archive marker"
"""The reason under which an archive without its end-of-archive marker is counted."""

LINK = "link"
"""The reason under which hard and symbolic links are counted; `tar` also writes a file's further names as links."""

FEW_BYTES = 8 << 10
"""Input of up to this size is read header by header: NumPy takes as long for one as for a hundred."""

_MARKER_BYTES = 2 * BLOCK_BYTES
_RECORD_BYTES = 20 * BLOCK_BYTES  # tar pads an archive with zeros to whole records
_UNBOUNDED_BYTES = 1 << 62
_HEADERS_AT_ONCE = 500  # 256 kB, so that they stay in a cache of 1 MiB
_ZERO = ord("0")
_SIZE_OFFSET = 124
_PADDED_FIELDS = np.array([100, 108, 116, 124, 136])  # mode, uid, gid, size and mtime
_EIGHTS_6 = 8.0 ** np.arange(5, -1, -1)
_EIGHTS_11 = 8.0 ** np.arange(10, -1, -1)

_REGULAR = b"0\x007"
_NO_PAYLOAD = {b"1": LINK, b"2": LINK, b"3": "special", b"4": "special", b"5": "directory", b"6": "special"}
_SKIPPED = {b"V": "volume label", b"D": "directory"}
_REFUSED = {
    b"S": "a sparse file, which cannot be read in place; re-pack it without `tar --sparse` (`bsdtar --no-read-sparse`)",
    b"M": "a file continued from another volume; put the volumes together and re-pack the shard",
    b"N": "an old GNU list of long names; re-pack the shard with a current tar",
}
_EXTENSIONS = {b"x": "pax header", b"L": "GNU long name", b"K": "GNU long link name"}
_REPEATABLE = b"LK"

_unpack_octal = struct.Struct("11s").unpack_from


# -- other files ------------------------------------------------------------------------------------------------------

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
_TEXTS = {
    b"version https://git-lfs": "a Git LFS pointer in place of the shard; run `git lfs pull`",
    b"<!doctype html": "a web page, perhaps a server's error; look at it, and fetch the shard again",
    b"<html": "a web page, perhaps a server's error; look at it, and fetch the shard again",
    b"<?xml": "an XML document, perhaps a bucket's error; look at it, and fetch the shard again",
    b"pk\x03\x04": "a zip archive, not a tar archive; decompress it, and pack the files as tar",
}


def what_else(head: bytes, compressed_as: str | None = None) -> str | None:
    """Return the kind of a file that is not a tar archive, with advice; None if its first bytes don't tell.

    Args:
        head: the first bytes, preferably a whole block.
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


# -- one header -------------------------------------------------------------------------------------------------------


class _DamagedError(Exception):
    """A header is damaged or not supported; `HeaderChain` adds url and offset."""


class TarHeader(NamedTuple):
    """The fields of one header block.

    Attributes:
        typeflag: the byte for the kind of the member.
        name: from this block alone, without extension headers.
        size: payload bytes, from the header's own field; None if that is not a number.
    """

    typeflag: bytes
    name: bytes
    size: int | None


def padded(size_bytes: int) -> int:
    """Round the size of a payload up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def parse_size(field: bytes) -> int | None:
    """Return the number in a numeric field: octal digits between spaces or NULs, or base-256 after a byte of 0x80.

    Returns None for anything else, and for a number of more than 63 bits.
    """
    if field[0] == 0x80:
        number = int.from_bytes(field[1:], "big")
        return number if number <= _INT64_MAX else None
    digits = field.strip(b" \0")
    return int(digits, 8) if _OCTAL.fullmatch(digits) else None


def _parse_header(block: bytes, *, is_first: bool) -> TarHeader:
    """Read a header block of 512 bytes that is not all zeros. Raises _DamagedError."""
    _check_sum(block, is_first=is_first)
    if block[257:262] == b"ustar" and block[262] not in b"\0 ":
        what = f"the tar header has the unknown magic {block[257:265]!r}"
        raise _DamagedError(f"{what}; re-pack the shard as ustar, pax or GNU tar")
    typeflag, size = block[156:157], parse_size(block[124:136])
    if typeflag == b"V" and not block[124:136].strip(b" \0"):
        size = 0  # GNU tar leaves the size of a volume label blank
    name = block[:100].partition(b"\0")[0]
    # Only headers with POSIX's magic have a prefix: GNU headers keep times and sparse maps in these bytes.
    if block[257:263] == b"ustar\0" and block[345]:
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return TarHeader(typeflag, name, size)


def _check_sum(block: bytes, *, is_first: bool) -> None:
    stored = _stored_sum(block)
    total = _header_sum(block)
    if stored == total:
        return
    # Tars older than ustar added the bytes up as signed numbers. In a ustar header this is not accepted, since it
    # would let one changed digit of the checksum itself pass.
    high_bytes = sum(byte >= 0x80 for byte in block[:148] + block[156:])
    if block[257:262] != b"ustar" and stored == total - 256 * high_bytes:
        return
    if is_first and (what := what_else(block)) is not None:
        raise _DamagedError(what)
    why = "its checksum field is malformed" if stored is None else f"checksum {stored}, but its bytes add up to {total}"
    start = "this is not a tar archive" if is_first else "this block is not a tar header"
    raise _DamagedError(f"{start} ({why}); fetch the shard again or re-pack it")


def _header_sum(block: bytes) -> int:
    """Return the sum of a header's bytes, with spaces in place of the checksum field.

    The low half of Adler-32 (RFC 1950) is 1 + the sum of the bytes, modulo 65521. The sum of 256 bytes is smaller.
    Adler-32 is many times faster than `sum`.
    """
    byte_sum = (zlib.adler32(block[:256]) & 0xFFFF) + (zlib.adler32(block[256:]) & 0xFFFF) - 2
    return byte_sum - sum(block[148:156]) + 8 * _SPACE


def _stored_sum(block: bytes) -> int | None:
    """Return the number in the checksum field; None if it contains anything but digits and valid padding."""
    pattern = _ZERO_PADDED_SUM
    if block[136] == _SPACE or _SPACE in block[100:125:8]:
        # Does the writer pad mode, uid, gid, size or mtime with spaces, as V7 tar did?
        fields = (block[100:108], block[108:116], block[116:124], block[124:136], block[136:148])
        if any(field.startswith(b" ") and field.strip(b" \0") for field in fields):
            pattern = _SPACE_PADDED_SUM
    match = pattern.fullmatch(block, 148, 156)
    return int(match[1], 8) if match else None


def _parse_long_name(payload: bytes) -> bytes:
    """Return the name in the payload of a GNU 'L' or 'K' member. Raises _DamagedError."""
    name = payload.partition(b"\0")[0]
    if not name:
        raise _DamagedError("an empty GNU long name; re-pack the shard")
    _check_name_bytes(name)
    return name


def _check_name_bytes(name: bytes) -> None:
    if len(name) <= MAX_NAME_BYTES:
        return
    most = f"{len(name)} bytes (at most {MAX_NAME_BYTES} are read)"
    raise _DamagedError(f"a name of {most}; re-pack the shard with shorter names")


def _parse_records(payload: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header, each written as `length keyword=value` and a line feed.

    Raises _DamagedError if one is malformed, has an impossible `path` or `size`, or concerns a sparse file.
    """
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(payload):
        match = _RECORD.match(payload, start)
        end = start + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(payload) or payload[end - 1] != ord("\n"):
            raise _DamagedError(f"malformed pax record {payload[start : start + 40]!r}; re-pack the shard")
        keyword, value = match[2], payload[match.end() : end - 1]
        if keyword in _CHECKED_RECORDS or keyword.startswith(b"GNU.sparse."):
            _check_record(keyword, value)
        records[keyword] = value
        start = end
    return records


def _check_record(keyword: bytes, value: bytes) -> None:
    if keyword.startswith(b"GNU.sparse."):
        what = f"a sparse file (pax record {keyword.decode('ascii', 'replace')}) cannot be read in place"
        raise _DamagedError(f"{what}; re-pack it without `tar --sparse` (`bsdtar --no-read-sparse`)")
    if keyword == b"path" and b"\0" in value:
        raise _DamagedError("the pax path contains a NUL; re-pack the shard")
    if keyword == b"path":
        _check_name_bytes(value)
    if keyword == b"size" and value and not (_DECIMAL.fullmatch(value) and int(value) <= _INT64_MAX):
        raise _DamagedError(f"pax size {value[:40]!r} is not a number of bytes in decimal digits; re-pack the shard")


# -- all headers ------------------------------------------------------------------------------------------------------


class _NotArrivedError(Exception):
    """Needed bytes have not arrived; the only argument is their end."""


@dataclass(slots=True)
class _Extensions:
    """The content of the extension headers before a member.

    Attributes:
        start_of: the start of the first header of each kind.
        names: the distinct names that the headers give the member, in order.
        pax_size: payload bytes, if a pax header states them.
    """

    start_of: dict[bytes, int] = field(default_factory=dict)
    names: dict[bytes, None] = field(default_factory=dict)
    pax_size: int | None = None


class _Run(NamedTuple):
    """Headers that follow one another if their size fields are right.

    Attributes:
        starts: int64[n + 1], the start of each header, and the end of the run.
        plain: bool[n], True for a sound header of a regular file that lies within the bytes.
        extension: bool[n], True for a sound pax header or GNU long name.
        sizes: int64[n], payload bytes of plain and extension headers; meaningless for others.
        blocks: uint8[n, 512], the headers.
    """

    starts: NDArray[np.int64]
    plain: NDArray[np.bool_]
    extension: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    blocks: NDArray[np.uint8]


class HeaderChain:
    """Read the headers of an uncompressed tar archive, from one place on, as its bytes arrive.

    If the archive's size (`total`) is known, files' payloads need not have arrived.

    Args:
        url: the shard, for errors.
        start: 0, or the first header of a member.
        total: the size of the archive, or None.

    Attributes:
        names: the full name of each regular file.
        places: arrays int64[2, m]: first byte and size of each file's payload, which follows the block of its header.
        skipped: the start of each other member's header, or missing end-of-archive marker, with the reason.
        reached: the first header of the first member that was not read, or the end-of-archive marker. The next `read`
            takes the bytes from there on.
        needs: the end of the bytes that the next `read` needs; None at the end of the archive.
    """

    def __init__(self, url: str, *, start: int, total: int | None) -> None:
        self.reached = start
        self.needs: int | None = start + BLOCK_BYTES
        self.url = url
        self.total = total
        self._limit = _UNBOUNDED_BYTES if total is None else total
        self.names: list[bytes] = []
        self.places: list[NDArray[np.int64]] = [np.empty((2, 0), np.int64)]
        self.skipped: list[tuple[int, str]] = []
        # Reused: fresh memory would cost more in page faults than all the work on it.
        self._headers = np.empty((_HEADERS_AT_ONCE, BLOCK_BYTES), np.uint8)

    def read(self, octets: NDArray[np.uint8]) -> None:
        """Read all members with headers in `octets`, the archive's bytes from `reached` on, uint8[n].

        Raises:
            ShardFormatError: the archive is damaged, cut, or cannot be read in place; `offset` is that of the first
                invalid block.
            ValueError: the bytes do not begin at a multiple of 512, or are more than the archive has.
        """
        start = self.reached
        if start % BLOCK_BYTES or start + len(octets) > max(start, self._limit):
            raise ValueError(f"{len(octets)} bytes from {start} on are not part of an archive of {self.total} bytes")
        if self.total == 0:
            raise self._error("the shard is empty (0 bytes); fetch or pack it again", 0)
        self._octets, self._start = octets, start
        self._blocks = octets[: len(octets) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
        read = self._read_run if len(octets) > FEW_BYTES else self._read_member
        position: int | None = start
        self.needs = None
        try:
            while position is not None:
                position = read(position)
        except _NotArrivedError as exc:
            (self.needs,) = exc.args
        except _DamagedError as exc:
            raise self._error(str(exc), self._position) from None

    # -- runs of headers, by NumPy

    def _read_run(self, position: int) -> int | None:
        run = self._verified_run(position)
        count = len(run.plain)
        if not count:
            return self._read_member(position)
        starts = run.starts.tolist()
        before_plain = run.extension & np.append(run.plain[1:], False)
        done = 0
        paths: dict[int, bytes] = {}
        for row in np.flatnonzero(~run.plain).tolist():
            if row < done:  # the row belongs to a member that was read
                continue
            if before_plain[row] and self._read_plain_extension(run, row, paths):
                continue
            self._add_plain(run, done, row, paths)
            after = self._read_member(starts[row])
            done = count + 1 if after is None else bisect_left(starts, after)
            if done > count or starts[done] != after:
                return after  # the walk trusted a size field that does not count
        self._add_plain(run, done, count, paths)
        return int(starts[count])

    def _verified_run(self, position: int) -> _Run:
        """Walk and verify up to `_HEADERS_AT_ONCE` headers, touching only their pages.

        The run is valid until the next call. It may be empty, and ends before the first block whose size is not a
        number, or at the end of the bytes.
        """
        starts = self._walk(position - self._start)
        count = len(starts) - 1
        # "clip" only avoids a copy in NumPy: the walk stays within the bytes.
        headers = np.take(self._blocks, starts[:-1] // BLOCK_BYTES, axis=0, out=self._headers[:count], mode="clip")
        digits = headers[:, _SIZE_OFFSET : _SIZE_OFFSET + 11] - np.uint8(_ZERO)
        sizes = (digits @ _EIGHTS_11).astype(np.int64)
        payload_ends = starts[:-1] + BLOCK_BYTES + sizes
        magic = headers[:, 257:263].copy().view("S6")[:, 0]
        typeflag = headers[:, 156]
        sound = (
            _sums_match(headers)
            & (digits < 8).all(axis=1)
            & _is_terminator(headers[:, _SIZE_OFFSET + 11])
            & ((magic == b"ustar") | (magic == b"ustar "))
            & (headers[:, _PADDED_FIELDS] != _SPACE).all(axis=1)
            & (payload_ends <= len(self._octets))
            & (starts[1:] == -(-payload_ends // BLOCK_BYTES) * BLOCK_BYTES)
        )
        plain = sound & ((typeflag == _REGULAR[0]) | (typeflag == _REGULAR[1]) | (typeflag == _REGULAR[2]))
        extension = sound & ((typeflag == ord("x")) | (typeflag == ord("L")))
        return _Run(starts + self._start, plain, extension, sizes, headers)

    def _walk(self, position: int) -> NDArray[np.int64]:
        """Return the starts of headers, and the end of the run, trusting every size field."""
        ends = [position]
        octets, view = self._octets, self._octets.data
        while len(ends) <= _HEADERS_AT_ONCE:
            try:
                for _ in range(_HEADERS_AT_ONCE + 1 - len(ends)):
                    position += BLOCK_BYTES + ((int(_unpack_octal(view, position + _SIZE_OFFSET)[0], 8) + 511) & -512)
                    ends.append(position)
            except struct.error:  # the walk has passed the end of the bytes
                break
            except ValueError:
                size = parse_size(octets[position + _SIZE_OFFSET : position + _SIZE_OFFSET + 12].tobytes())
                if size is None or size > len(octets):
                    break
                position += BLOCK_BYTES + padded(size)
                ends.append(position)
        starts = np.array(ends, np.int64)
        # `int` accepts a sign, and the bytes may end within a block.
        wrong = (starts[1:] <= starts[:-1]) | (starts[:-1] + BLOCK_BYTES > len(octets))
        return starts[: int(wrong.argmax()) + 1] if wrong.any() else starts

    def _read_plain_extension(self, run: _Run, row: int, paths: dict[int, bytes]) -> bool:
        """Read an extension before a plain member; return False if it is too large or sets a size."""
        self._position, size = int(run.starts[row]), int(run.sizes[row])
        if size > MAX_RECORDS_BYTES:
            return False
        payload = self._bytes(self._position + BLOCK_BYTES, size)
        if run.blocks[row, 156] == ord("L"):
            paths[row + 1] = _parse_long_name(payload)
            return True
        records = _parse_records(payload)
        if records.get(b"path"):
            paths[row + 1] = records[b"path"]
        return not records.get(b"size")

    def _add_plain(self, run: _Run, first: int, end: int, paths: dict[int, bytes]) -> None:
        """Record the plain members of rows `first` to `end`; `paths` overrides the names of some rows."""
        rows = first + np.flatnonzero(run.plain[first:end])
        if not len(rows):
            return
        names = _texts(run.blocks[rows, :100])
        prefixed = np.flatnonzero((run.blocks[rows, 345] != 0) & (run.blocks[rows, 262] == 0))  # POSIX's magic
        prefixes = _texts(run.blocks[rows[prefixed], 345:500])
        for number, prefix in zip(prefixed.tolist(), prefixes, strict=True):
            names[number] = prefix + b"/" + names[number]
        for row in paths.keys() & set(rows.tolist()) if paths else ():
            names[int(np.searchsorted(rows, row))] = paths[row]
        self.names += names
        self.places.append(np.stack([run.starts[rows] + BLOCK_BYTES, run.sizes[rows]]))

    # -- one header after the other

    def _read_member(self, position: int) -> int | None:
        """Read one member with the extension headers before it, or a global header, or the end.

        Returns the start of the next header, or None at the end. Raises _NotArrivedError before anything is recorded.
        """
        self.reached = position
        extensions = _Extensions()
        while True:
            whole = position + BLOCK_BYTES <= self._limit
            block = self._bytes(position, BLOCK_BYTES) if whole else ZERO_BLOCK
            self._position = position
            header = None if block == ZERO_BLOCK else _parse_header(block, is_first=position == 0)
            if header is None or header.typeflag == b"g":
                for kind, start in extensions.start_of.items():
                    raise self._error(
                        f"a {_EXTENSIONS[kind]} without a member after it; fetch or pack the shard again", start
                    )
            if header is None:
                self._check_end(position)
                return None
            if header.typeflag not in _EXTENSIONS and header.typeflag != b"g":
                return self._add_member(header, position, extensions)
            if header.size is not None and header.size > MAX_RECORDS_BYTES:  # refused before its payload arrives
                most = f"{header.size} bytes (at most {MAX_RECORDS_BYTES} are read)"
                raise self._error(f"an extension header of {most}; re-pack the shard", position)
            size = self._checked_size(header.size, position)
            payload = self._bytes(position + BLOCK_BYTES, size)
            if header.typeflag == b"g":
                self._check_global(payload, position)
                return position + BLOCK_BYTES + padded(size)
            self._add_extension(header.typeflag, payload, position, extensions)
            position += BLOCK_BYTES + padded(size)

    def _check_global(self, payload: bytes, position: int) -> None:
        refused = {b"path", b"size"} & _parse_records(payload).keys()
        if refused:
            raise self._error(
                f"a global pax header sets the {min(refused).decode()} of all members after it, which some readers "
                "obey (Python's tarfile) and others ignore (Go, bsdtar); re-pack the shard without it",
                position,
            )

    def _add_extension(self, kind: bytes, payload: bytes, position: int, extensions: _Extensions) -> None:
        if extensions.start_of.setdefault(kind, position) != position and kind not in _REPEATABLE:
            raise self._error(
                f"two {_EXTENSIONS[kind]}s before one member, and readers disagree on which counts; re-pack the shard",
                extensions.start_of[kind],
            )
        if kind == b"x":
            records = _parse_records(payload)
            # An empty value cancels a global record (POSIX), but global paths and sizes are refused.
            if records.get(b"path"):
                extensions.names[records[b"path"]] = None
            extensions.pax_size = int(records[b"size"]) if records.get(b"size") else None
        else:
            name = _parse_long_name(payload)
            if kind == b"L":
                extensions.names[name] = None

    def _add_member(self, header: TarHeader, position: int, extensions: _Extensions) -> int:
        kind, start = header.typeflag, position + BLOCK_BYTES
        if kind in _NO_PAYLOAD:
            self.skipped.append((position, _NO_PAYLOAD[kind]))
            return start
        if kind not in _SKIPPED and kind not in _REGULAR:
            what = _REFUSED.get(kind, "an unknown type; re-pack the shard as ustar, pax or GNU tar")
            raise self._error(f"a member of type {kind.decode('latin-1')!r}: {what}", position)
        size = self._checked_size(header.size if extensions.pax_size is None else extensions.pax_size, position)
        if kind in _SKIPPED:
            self.skipped.append((position, _SKIPPED[kind]))
            return start + padded(size)
        if len(extensions.names) > 1:
            one, other = (name[:100].decode("utf-8", "replace") for name in [*extensions.names][:2])
            raise self._error(
                f"the headers before this member give it two names, {one!r} and {other!r}, and readers disagree on "
                "which counts; re-pack the shard",
                min(extensions.start_of.values()),
            )
        self.names.append(next(iter(extensions.names), header.name))
        self.places.append(np.array([[start], [size]], np.int64))
        return start + padded(size)

    def _checked_size(self, size: int | None, position: int) -> int:
        """Return a payload's size if the payload lies within the archive."""
        if size is None:
            raise self._error("the size field of the tar header is not a number; re-pack the shard", position)
        end = position + BLOCK_BYTES + size
        if self.total is None and end > self._start + len(self._octets):
            raise _NotArrivedError(end)  # until then the payload may run past the archive
        if end > self._limit:
            past = f"{counted(end - self._limit, 'byte')} past the end of the shard"
            raise self._error(f"the member's {size} bytes run {past}, which was cut; fetch or pack it again", position)
        return size

    def _check_end(self, position: int) -> None:
        """Check the end-of-archive marker, and the zeros up to the end of tar's record.

        A preallocated file that was not written to its end also ends in zeros, and would pass for a shorter archive.
        """
        total, left = self._limit, self._limit - position
        if left == 0:
            self.skipped.append((position, MISSING_END))
            return
        if left < BLOCK_BYTES:
            if position == 0 and (what := what_else(self._bytes(0, total))) is not None:
                raise self._error(what, 0)
            raise self._cut_in_block(min(total, position))
        if left < _MARKER_BYTES:
            raise self._error(
                "the shard was cut in its end-of-archive marker (two blocks of zeros); fetch or pack it again", position
            )
        # The marker can begin in one record and end in the next.
        most_zeros = max(_RECORD_BYTES, _MARKER_BYTES + -(position + _MARKER_BYTES) % _RECORD_BYTES)
        rest = self._bytes(position, min(left, most_zeros + BLOCK_BYTES))
        zeros = (len(rest) - len(rest.lstrip(b"\0"))) // BLOCK_BYTES * BLOCK_BYTES
        if rest.strip(b"\0") and zeros < _MARKER_BYTES:
            raise self._error(
                "this block of zeros should be a tar header, since more data follows; fetch or pack the shard again",
                position,
            )
        if rest.strip(b"\0"):
            block = rest[zeros : zeros + BLOCK_BYTES]
            is_tar = len(block) == BLOCK_BYTES and _stored_sum(block) == _header_sum(block)
            raise self._error(
                f"{'a second archive follows' if is_tar else 'other bytes follow'} after the end-of-archive marker "
                "and would not be read; keep archives as separate shards, or join them with `tar --concatenate`",
                position + zeros,
            )
        if len(rest) > most_zeros:
            length = f"{left:,}" if self.total is not None else f"at least {len(rest):,}"
            raise self._error(
                f"the archive ends here, but {length} bytes follow: more zeros than tar writes. The shard was probably "
                "not copied to its end: fetch it again, or pack it again without `tar -b`, whose archives end so",
                position,
            )
        if total % BLOCK_BYTES:
            raise self._cut_in_block(total)

    def _cut_in_block(self, position: int) -> ShardFormatError:
        is_short = self._limit < BLOCK_BYTES
        what = "this is not a tar archive, or was cut in its first block" if is_short else "the shard was cut"
        size = f"{counted(self._limit, 'byte')}, not a multiple of 512"
        message = f"{what}: it ends in the middle of a block ({size}); fetch or pack it again"
        return self._error(message, position // BLOCK_BYTES * BLOCK_BYTES)

    def _bytes(self, position: int, size: int) -> bytes:
        """Return bytes of the archive; raise `_NotArrivedError` if some have not arrived."""
        first = position - self._start
        if first + size > len(self._octets):
            raise _NotArrivedError(position + size)
        return self._octets[first : first + size].tobytes()

    def _error(self, message: str, position: int) -> ShardFormatError:
        return ShardFormatError(message, url=self.url, offset=position)


def _sums_match(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of headers whose checksum, 6 or 7 zero-padded digits, is the sum of their bytes."""
    checksum = blocks[:, 148:156]
    total = blocks.sum(axis=1, dtype=np.uint32) - checksum.sum(axis=1, dtype=np.uint32) + 8 * _SPACE
    digits = checksum - np.uint8(_ZERO)
    six = digits[:, :6] @ _EIGHTS_6
    has_seven = digits[:, 6] < 8
    stored = np.where(has_seven, six * 8 + digits[:, 6], six)
    ends = has_seven | _is_terminator(checksum[:, 6])
    well_formed = ends & _is_terminator(checksum[:, 7]) & (digits[:, :6] < 8).all(axis=1)
    matches: NDArray[np.bool_] = well_formed & (stored == total)
    return matches


def _texts(fields: NDArray[np.uint8]) -> list[bytes]:
    """Return the bytes before the first NUL in each row of uint8[n, width]."""
    texts: list[bytes] = fields.view(f"S{fields.shape[1]}")[:, 0].tolist()
    if b"\0" in b"".join(texts):  # NumPy drops only the NULs at the end
        return [text.partition(b"\0")[0] for text in texts]
    return texts


def _is_terminator(column: NDArray[np.uint8]) -> NDArray[np.bool_]:
    ends: NDArray[np.bool_] = (column == 0) | (column == _SPACE)
    return ends
