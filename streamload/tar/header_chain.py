"""The chain of headers through a tar archive, from the first to the end-of-archive marker, as far as it has arrived.

Runs of plain headers are taken from `header_arrays`. Anything else is read again by `parse_header`, in order, so the
first damaged header is the one that is reported, wherever walking went after it. No payload pages are touched except
those of extension headers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardFormatError
from streamload.tar.header import (
    BLOCK_BYTES,
    MAX_RECORDS_BYTES,
    ZERO_BLOCK,
    TarHeader,
    looks_like_header,
    padded,
    parse_header,
    parse_long_name,
    parse_records,
    parse_size,
)
from streamload.tar.not_a_tar import what_else
from streamload.text import counted

_HEADERS_AT_ONCE = 500  # of 512 bytes: they stay in a cache of 1 MiB while they are looked at
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


_UNBOUNDED_BYTES = 1 << 62


class NotArrivedError(Exception):
    """Bytes that are needed have not arrived yet.

    Attributes:
        needs: the end of the bytes that must have arrived.
    """

    def __init__(self, needs: int) -> None:
        super().__init__(f"the bytes up to {needs} have not come yet")
        self.needs = needs


class ArchivePart:
    """Bytes `start` to `available` of an archive, addressed by their offsets in the archive.

    Nothing else is touched: it may not have arrived yet, or may have been freed already.

    Attributes:
        octets: uint8[available - start], the bytes.
        start: where they begin.
        available: where they end.
        total: the size of the whole archive, or None where that is not known yet.
    """

    def __init__(
        self, data: NDArray[np.uint8], start: int, available: int, total: int | None, *, first: int = 0
    ) -> None:
        """Take the bytes from `data`, which holds those of the archive from `first` to at least `available`.

        Raises:
            ValueError: `start` is not a multiple of 512, or `available` exceeds `data` or the archive.
        """
        end = first + len(data)
        most = end if total is None else min(total, end)
        if start < first or start % BLOCK_BYTES or available > most:
            raise ValueError(f"bytes {start} to {available} are no part of an archive of {most} bytes")
        self.octets = data[start - first : max(start, available) - first]
        self.start = start
        self.available = available
        self.total = total

    @property
    def limit(self) -> int:
        """Where the archive ends; where that is unknown, a number that no archive reaches."""
        return _UNBOUNDED_BYTES if self.total is None else self.total

    def read(self, position: int, size: int) -> bytes:
        """The `size` bytes at `position`, which lie within the archive and not before `start`.

        Raises:
            NotArrivedError: some of them have not arrived yet.
        """
        if position + size > self.available:
            raise NotArrivedError(position + size)
        first = position - self.start
        return self.octets[first : first + size].tobytes()


_MARKER_BYTES = 2 * BLOCK_BYTES

RECORD_BYTES = 20 * BLOCK_BYTES
"""The default record of tar, which fills the last record with zeros."""


def check_end(part: ArchivePart, position: int, url: str, record_bytes: int) -> None:
    """Check what follows the last member: the end-of-archive marker, and zeros up to the end of the record.

    A preallocated file that was not written to its end also ends in zeros, and would pass for a shorter archive.

    Args:
        part: the bytes that have arrived.
        position: where the marker should start, before the end of the archive.
        url: the shard, for errors.
        record_bytes: the size of the archive's records.

    Raises:
        ShardFormatError: the marker is broken, or something follows it, or more zeros than fill the record.
        NotArrivedError: more bytes are needed for an answer.
    """
    total = part.limit
    if total - position < BLOCK_BYTES:
        if position == 0 and (what := what_else(part.read(0, total))) is not None:
            raise ShardFormatError(what, url=url, offset=0)
        raise _cut_in_block(total, min(total, position), url)
    if total - position < _MARKER_BYTES:
        raise ShardFormatError(
            "the shard was cut in its end-of-archive marker (two blocks of zeros); fetch or pack it again",
            url=url,
            offset=position,
        )
    # The marker may begin in one record and end in the next.
    most_zeros = max(record_bytes, _MARKER_BYTES + -(position + _MARKER_BYTES) % record_bytes)
    rest = part.read(position, min(total - position, most_zeros + BLOCK_BYTES))
    if rest.strip(b"\0"):
        raise _not_only_zeros(rest, position, url)
    if len(rest) > most_zeros:
        length = f"{total - position:,}" if part.total is not None else f"at least {len(rest):,}"
        raise ShardFormatError(
            f"the archive ends here, and {length} bytes follow that begin with more zeros than tar writes; the shard "
            "was probably not downloaded or copied to its end: fetch or pack it again. If they are the rest of a "
            "record (`tar -b`), `streamload index --record-size` accepts them",
            url=url,
            offset=position,
        )
    if total % BLOCK_BYTES:
        raise _cut_in_block(total, total, url)


def _not_only_zeros(rest: bytes, position: int, url: str) -> ShardFormatError:
    """Return the error for an archive in which other bytes follow a block of zeros at `position`."""
    start = (len(rest) - len(rest.lstrip(b"\0"))) // BLOCK_BYTES * BLOCK_BYTES
    if start < _MARKER_BYTES:
        return ShardFormatError(
            "a block of zeros stands in place of a tar header, and more follows; fetch or pack the shard again",
            url=url,
            offset=position,
        )
    what = "a second archive follows" if looks_like_header(rest[start : start + BLOCK_BYTES]) else "other bytes follow"
    return ShardFormatError(
        f"{what} behind the end-of-archive marker and would not be read; if archives were put together "
        "with `cat`, keep them as separate shards or use `tar --concatenate`",
        url=url,
        offset=position + start,
    )


def _cut_in_block(total: int, position: int, url: str) -> ShardFormatError:
    what = "this is not a tar archive, or was cut in its first block" if total < BLOCK_BYTES else "the shard was cut"
    return ShardFormatError(
        f"{what}: it ends in the middle of a block ({counted(total, 'byte')}, not a multiple of 512); "
        "fetch or pack it again",
        url=url,
        offset=position // BLOCK_BYTES * BLOCK_BYTES,
    )


MISSING_END = "missing end-of-archive marker"
"""The reason under which an archive without its end-of-archive marker is counted."""

LINK = "link"
"""The reason under which hard and symbolic links are counted; `tar` writes files with several names so, too."""

_REGULAR = b"0\x007"
_NO_PAYLOAD = {b"1": LINK, b"2": LINK, b"3": "special", b"4": "special", b"5": "directory", b"6": "special"}
_SKIPPED = {b"V": "volume label", b"D": "directory"}
_REFUSED = {
    b"S": "a sparse file, which cannot be read in place; re-pack the shard without `tar --sparse`",
    b"M": "a file continued from another volume; put the volumes together and re-pack the shard",
    b"N": "an old GNU list of long names; re-pack the shard with a current tar",
}
_EXTENSIONS = {b"x": "pax header", b"L": "GNU long name", b"K": "GNU long link name"}
_REPEATABLE = b"LK"

FEW_BYTES = 8 << 10
"""In so few bytes headers are read one by one: NumPy takes as long for the first of them as for a hundred."""


@dataclass(frozen=True, slots=True, eq=False)
class TarMembers:
    """The regular files of an archive, or of a part of it, in their order.

    Attributes:
        names: the full name of each.
        offset: int64[M], first byte of each payload; its header is the 512 bytes before it.
        size: int64[M], payload bytes.
        skipped: where the headers of other members start, each with the reason for skipping it.
        reached: where reading continues: at the first header of a member whose headers have not all arrived, or at
            the end-of-archive marker.
        needs: the end of the bytes that must be there to get further, or None if everything has been read and checked.
    """

    names: list[bytes]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    skipped: list[tuple[int, str]]
    reached: int
    needs: int | None


@dataclass(slots=True)
class _Extensions:
    """What the extension headers before a member say about it.

    Attributes:
        start_of: where the first header of each kind stands.
        names: the different names that they give the member, in their order.
        pax_size: the size of its payload, if a pax header has one.
    """

    start_of: dict[bytes, int] = field(default_factory=dict)
    names: dict[bytes, None] = field(default_factory=dict)
    pax_size: int | None = None


def read_chain(data: NDArray[np.uint8], url: str, record_bytes: int = RECORD_BYTES) -> TarMembers:
    """Find every regular file of an uncompressed tar archive.

    Args:
        data: uint8[n], the whole archive; contiguous.
        url: the shard, for errors.
        record_bytes: the size of the archive's records.

    Raises:
        ShardFormatError: the archive is damaged, cut, or uses what cannot be read in place; `offset` is the
            start of the first invalid header (or block of the end-of-archive marker).
    """
    return read_chain_part(ArchivePart(data, 0, len(data), len(data)), url, record_bytes)


def read_chain_part(part: ArchivePart, url: str, record_bytes: int = RECORD_BYTES) -> TarMembers:
    """Find the regular files whose headers, with the extension headers before them, lie in a part of an archive.

    Their payloads may lie behind it, but within the archive; where its size is unknown, payloads must have arrived too.

    Args:
        part: begins where a header starts that is not preceded by extension headers of its own, or at a place that
            was `reached` before.
        url: the shard, for errors.
        record_bytes: as for `read_chain`.

    Raises:
        ShardFormatError: as for `read_chain`; what is wrong with the whole is found in one of its parts.
    """
    if part.total == 0:
        raise ShardFormatError("the shard is empty (0 bytes); fetch or pack it again", url=url, offset=0)
    return _Chain(part, url, record_bytes).read()


class _Chain:
    """One pass over one part of an archive."""

    def __init__(self, part: ArchivePart, url: str, record_bytes: int) -> None:
        self._part = part
        self._reader = None if len(part.octets) <= FEW_BYTES else HeaderReader(part.octets, part.start)
        self._url = url
        self._record_bytes = record_bytes
        self._names: list[bytes] = []
        self._places: list[NDArray[np.int64]] = [np.empty((2, 0), np.int64)]
        self._odd_places: list[tuple[int, int]] = []
        self._skipped: list[tuple[int, str]] = []
        self._reached = part.start

    def read(self) -> TarMembers:
        position: int | None = self._part.start
        needs: int | None = None
        try:
            while position is not None:
                position = self._read_run(position)
        except NotArrivedError as exc:
            needs = exc.needs
        self._flush_odd()
        offset, size = np.concatenate(self._places, axis=1)
        return TarMembers(self._names, offset, size, self._skipped, self._reached, needs)

    def _read_run(self, position: int) -> int | None:
        """Read a run of headers from `position` on; where the next one starts, or None at the end."""
        if self._reader is None:
            return self._read_one(position)
        run = self._reader.read(position)
        count = len(run.plain)
        if not count:
            return self._read_one(position)
        starts = run.starts.tolist()
        done = 0
        paths: dict[int, bytes] = {}
        for row, names_plain in run.not_plain():
            if row < done:  # it belongs to the odd member before it
                continue
            if names_plain and self._read_plain_extension(run, row, paths):
                continue
            self._add_plain(run, done, row, paths)
            after = self._read_one(starts[row])
            done = row + 1
            while after is not None and done <= count and starts[done] < after:
                done += 1
            if after is None or done > count or starts[done] != after:
                return after  # the walk had gone another way
        self._add_plain(run, done, count, paths)
        return int(starts[count])

    def _read_plain_extension(self, run: HeaderRun, row: int, paths: dict[int, bytes]) -> bool:
        """Read an extension header before a plain member; False if it sets more than the member's name."""
        position, size = int(run.starts[row]), int(run.sizes[row])
        if size > MAX_RECORDS_BYTES:
            return False
        payload = self._part.read(position + BLOCK_BYTES, size)
        if run.blocks[row, 156] == ord("L"):
            paths[row + 1] = parse_long_name(payload, self._url, position)
            return True
        records = parse_records(payload, self._url, position)
        if records.get(b"path"):
            paths[row + 1] = records[b"path"]
        return not records.get(b"size")

    def _add_plain(self, run: HeaderRun, first: int, end: int, paths: dict[int, bytes]) -> None:
        """Record the plain members from row `first` up to `end` of a run; `paths` has names for some rows."""
        rows = first + np.flatnonzero(run.plain[first:end])
        if not len(rows):
            return
        self._flush_odd()
        names = run.names(rows)
        for row in paths.keys() & set(rows.tolist()) if paths else ():
            names[int(np.searchsorted(rows, row))] = paths[row]
        self._names += names
        self._places.append(np.stack([run.starts[rows] + BLOCK_BYTES, run.sizes[rows]]))

    def _flush_odd(self) -> None:
        if self._odd_places:
            self._places.append(np.array(self._odd_places, np.int64).T)
            self._odd_places.clear()

    def _read_one(self, position: int) -> int | None:
        """Read one member with the extension headers before it, or a global header, or the end.

        Returns:
            Where the next header starts; None if the archive ends here.

        Raises:
            NotArrivedError: some of these bytes have not arrived; nothing of the member was recorded.
        """
        self._reached = position
        extensions = _Extensions()
        while True:
            block = self._block_at(position, extensions)
            if block is None:
                return None
            header = parse_header(block, self._url, position)
            if header.typeflag == b"g":
                return self._read_global(header, position, extensions)
            if header.typeflag not in _EXTENSIONS:
                return self._add_member(header, position, extensions)
            position = self._read_extension(header, position, extensions)

    def _block_at(self, position: int, extensions: _Extensions) -> bytes | None:
        """The header block at `position`, or None at the end of the archive."""
        whole = position + BLOCK_BYTES <= self._part.limit
        block = self._part.read(position, BLOCK_BYTES) if whole else ZERO_BLOCK
        if block != ZERO_BLOCK:
            return block
        self._refuse_orphans(extensions)
        if position == self._part.total:
            self._skipped.append((position, MISSING_END))
        else:
            check_end(self._part, position, self._url, self._record_bytes)
        return None

    def _read_extension(self, header: TarHeader, position: int, extensions: _Extensions) -> int:
        """Read a pax header or a GNU long name; returns where the next header starts."""
        if extensions.start_of.setdefault(header.typeflag, position) != position and header.typeflag not in _REPEATABLE:
            raise self._error(
                f"two {_EXTENSIONS[header.typeflag]}s before one member, of which readers make different things; "
                "re-pack the shard",
                extensions.start_of[header.typeflag],
            )
        payload, after = self._extension_payload(header, position)
        if header.typeflag == b"x":
            records = parse_records(payload, self._url, position)
            # An empty value takes back a global record (POSIX); there are none that we accept.
            if records.get(b"path"):
                extensions.names[records[b"path"]] = None
            extensions.pax_size = int(records[b"size"]) if records.get(b"size") else None
        else:
            name = parse_long_name(payload, self._url, position)
            if header.typeflag == b"L":
                extensions.names[name] = None
        return after

    def _read_global(self, header: TarHeader, position: int, extensions: _Extensions) -> int:
        """Read a pax header for all members that follow, which may set neither names nor sizes."""
        self._refuse_orphans(extensions)
        payload, after = self._extension_payload(header, position)
        refused = {b"path", b"size"} & parse_records(payload, self._url, position).keys()
        if refused:
            raise self._error(
                f"a global pax header sets the {min(refused).decode()} of all members that follow, which some readers "
                "follow (Python's tarfile) and others do not (Go, bsdtar); re-pack the shard without it",
                position,
            )
        return after

    def _extension_payload(self, header: TarHeader, position: int) -> tuple[bytes, int]:
        if header.size is not None and header.size > MAX_RECORDS_BYTES:  # whether or not all of it has arrived
            raise self._error(
                f"an extension header of {header.size} bytes (at most {MAX_RECORDS_BYTES} are read); re-pack the shard",
                position,
            )
        size = self._checked_size(header.size, position)
        start = position + BLOCK_BYTES
        return self._part.read(start, size), start + padded(size)

    def _add_member(self, header: TarHeader, position: int, extensions: _Extensions) -> int:
        """Record a member of any kind; returns where the next header starts."""
        kind, start = header.typeflag, position + BLOCK_BYTES
        if kind in _NO_PAYLOAD:
            self._skipped.append((position, _NO_PAYLOAD[kind]))
            return start
        if kind not in _SKIPPED and kind not in _REGULAR:
            what = _REFUSED.get(kind, "which is unknown; re-pack the shard as ustar, pax or GNU tar")
            raise self._error(f"a member of type {kind.decode('latin-1')!r}: {what}", position)
        size = self._checked_size(header.size if extensions.pax_size is None else extensions.pax_size, position)
        if kind in _SKIPPED:
            self._skipped.append((position, _SKIPPED[kind]))
        else:
            self._names.append(self._name(header, extensions))
            self._odd_places.append((start, size))
        return start + padded(size)

    def _name(self, header: TarHeader, extensions: _Extensions) -> bytes:
        if len(extensions.names) > 1:
            one, other = (name[:100].decode("utf-8", "replace") for name in [*extensions.names][:2])
            raise self._error(
                f"the headers before this member give it two names, {one!r} and {other!r}, of which readers take "
                "different ones; re-pack the shard",
                min(extensions.start_of.values()),
            )
        return next(iter(extensions.names), header.name)

    def _checked_size(self, size: int | None, position: int) -> int:
        if size is None:
            raise self._error("the size field of the tar header is not a number; re-pack the shard", position)
        end = position + BLOCK_BYTES + size
        if self._part.total is None and end > self._part.available:
            raise NotArrivedError(end)  # only then is it known to lie within the archive
        missing = end - self._part.limit
        if missing > 0:
            raise self._error(
                f"the member's {size} bytes run {counted(missing, 'byte')} past the end of the shard, which was cut; "
                "fetch or pack it again",
                position,
            )
        return size

    def _refuse_orphans(self, extensions: _Extensions) -> None:
        """Refuse extension headers that no member follows."""
        for kind, start in extensions.start_of.items():
            raise self._error(f"a {_EXTENSIONS[kind]} that no member follows; fetch or pack the shard again", start)

    def _error(self, message: str, position: int) -> ShardFormatError:
        return ShardFormatError(message, url=self._url, offset=position)
