"""Scan a shard to its table of samples: whole, from memory or from a file, or piece by piece while it arrives.

A sample is known to be complete only when the next header has been read. A piece leaves an incomplete sample to the
next piece, which begins at the sample's first header. Pieces share nothing, so each may be scanned in another process;
`Scanner` joins them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardChangedError, ShardFormatError
from streamload.memory.mapped import Bytes, gather, read_fully
from streamload.tar.header import BLOCK_BYTES, padded
from streamload.tar.header_chain import RECORD_BYTES, HeaderChain, TarMembers
from streamload.tar.table import MISSING, ShardTable

if TYPE_CHECKING:
    from typing_extensions import Buffer

LABEL_FIELD = "cls"
"""The field whose decimal integer is a sample's label."""

UNKNOWN_BYTES = -1
"""The `shard_bytes` of a table while the size of its shard is unknown."""

MOST_KEY_BYTES = 256 << 20
"""Maximum bytes of all keys of a shard, which are held in memory."""

_META = re.compile(rb"__[^/]*__($|/)")
# Fields that loaders add to a sample, such as `__key__`; no member may replace them.
_RESERVED = re.compile(rb"__[^/]*__")
_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_MOST_LABEL_BYTES = 64
_MOST_FIELDS = 1 << 16
_NO_FIELD = -1
_NO_STEM = b"\0"  # names have no NUL in them
_FIRST_ROOM = 1_024
# From this mean distance between headers on, payloads are not read.
_FAR_APART_BYTES = 256 << 10
_WINDOW_BYTES = 1 << 20

Gather = Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[Bytes, NDArray[np.int64]]]
"""Returns the bytes at some (offsets, sizes) of a shard, and the start of each in the result."""


@dataclass(frozen=True, slots=True, eq=False)
class ScannedPiece:
    """The whole samples in a piece of a shard.

    Attributes:
        start: the first byte of the piece.
        table: the samples, without checksums and labels. Offsets are those of the shard; members, samples and fields
            are numbered from 0 in this piece.
        resume: the start of the next piece, possibly after the available bytes; all samples lie before it.
        needs: the end of the bytes that the next piece needs; None at the end of the shard.
    """

    start: int
    table: ShardTable
    resume: int
    needs: int | None

    @property
    def ended(self) -> bool:
        """Whether the shard has been checked to its end."""
        return self.needs is None


def scan_shard(
    data: memoryview | NDArray[np.uint8], url: str, *, record_bytes: int = RECORD_BYTES, every_byte: bool = False
) -> ShardTable:
    """Scan an uncompressed tar archive, and verify every header and the end of the archive.

    Args:
        data: uint8[n], the whole shard, contiguous; a mapped file only in a process that may die of a truncated one.
        url: the shard, for errors.
        record_bytes: the size of the archive's records; its end may be filled with zeros to the end of one.
        every_byte: compute the crc32 of every payload and read the labels; they are None if some sample has no `cls`,
            or one that is not a decimal integer.

    Raises:
        ShardFormatError: the archive is damaged, cut or not tar; a member cannot be read in place (sparse or
            multi-volume); a sample's members are not together, or a field is repeated. `url` and `offset` are set.
    """
    scanner = Scanner(url, record_bytes=record_bytes, every_byte=every_byte)
    scanner.scan(_octets(data), len(data))
    return scanner.finish()


def scan_file(
    descriptor: int,
    shard_bytes: int,
    url: str,
    *,
    record_bytes: int = RECORD_BYTES,
    crc32: bool = False,
    labels: bool = False,
) -> ShardTable:
    """Scan an open file as `scan_shard`, without mapping it, so that it may be truncated meanwhile.

    Payloads are not read if headers are far apart.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ShardChangedError: the file has become shorter.
        OSError: it cannot be read.
    """
    shorter = ShardChangedError(
        f"the shard had {shard_bytes} bytes and became shorter while it was read; let nothing write to shards that are "
        "in use, and fetch or pack it again",
        url=url,
    )

    def read(start: int, end: int) -> NDArray[np.uint8]:
        data = np.empty(max(0, min(shard_bytes, end) - start), np.uint8)
        if read_fully(descriptor, memoryview(data.data), start) < len(data):
            raise shorter
        return data

    def places(offset: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[Bytes, NDArray[np.int64]]:
        gathered = gather(descriptor, offset, size)
        if gathered is None:
            raise shorter
        return gathered

    def checksum(start: int, end: int) -> int:
        value = 0
        for position in range(start, end, _WINDOW_BYTES):
            wanted = min(end - position, _WINDOW_BYTES)
            payload = os.pread(descriptor, wanted, position)  # for small members, faster than `read`
            if len(payload) < wanted:
                raise shorter
            value = zlib.crc32(payload, value)
        return value

    chain = HeaderChain(url, start=0, total=shard_bytes, record_bytes=record_bytes)
    ahead_bytes, read_before = _WINDOW_BYTES, 0
    while chain.needs is not None:
        start = chain.reached
        chain.read(read(start, max(chain.needs, start + ahead_bytes)))
        far_apart = chain.reached - start > _FAR_APART_BYTES * max(1, chain.count - read_before)
        ahead_bytes, read_before = BLOCK_BYTES if far_apart else _WINDOW_BYTES, chain.count
    table = Scanner(url).add(_grouped(chain.members(), 0, shard_bytes, url))
    if crc32:
        edges = zip(table.member_offset.tolist(), (table.member_offset + table.member_size).tolist(), strict=True)
        table = replace(table, member_crc32=np.array([checksum(*each) for each in edges], np.uint32))
    return replace(table, labels=labels_of(table, places)) if labels else table


def scan_piece(
    data: memoryview | NDArray[np.uint8], url: str, *, start: int, total: int | None, record_bytes: int = RECORD_BYTES
) -> ScannedPiece:
    """Scan the whole samples in the bytes of an uncompressed tar archive that have arrived.

    All checks of `scan_shard` are made, each as soon as its bytes have arrived; `Scanner` refuses a key that is
    repeated in another piece. Of several faults the one whose bytes arrive first is raised.

    Args:
        data: the bytes from `start` on.
        url: the shard, for errors.
        start: 0, or the last piece's `resume`.
        total: the size of the shard; None if it is unknown: then another scan must end the shard.
        record_bytes: the size of the archive's records.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ValueError: the numbers contradict each other.
    """
    chain = HeaderChain(url, start=start, total=total, record_bytes=record_bytes)
    chain.read(_octets(data))
    return _grouped(chain.members(), start, total, url)


class Scanner:
    """Joins the pieces of a shard in order, or takes its bytes as they arrive (`feed`).

    All calls together cost time proportional to the shard's members.

    Attributes:
        table: all samples so far, with their final numbers. A longer table replaces it with each piece.
        resume: the start of the next piece.
        needs: the end of the bytes that the next piece needs; None at the end.
    """

    def __init__(
        self, url: str, *, record_bytes: int = RECORD_BYTES, every_byte: bool = False, step_bytes: int = 8 << 20
    ) -> None:
        """Start empty; `step_bytes` are fed between two scans, with `every_byte` for crc32 and labels."""
        self.resume = 0
        self.needs: int | None = BLOCK_BYTES
        self._url = url
        self._record_bytes = record_bytes
        self._held = bytearray()  # the bytes that were fed, from `resume` on
        self._next_scan = self._step_bytes = step_bytes
        self._crc32 = _Column(np.uint32) if every_byte else None
        self._labels = _Column(np.int64) if every_byte else None
        self._keys: set[bytes] = set()
        self._fields: dict[str, int] = {}
        self._skipped: Counter[str] = Counter()
        self._columns = {name: _Column(dtype) for name, dtype in _COLUMNS.items()}
        for name in ("sample_start", "key_start"):
            self._columns[name].extend(np.zeros(1, np.int64))
        self.table = self._table_so_far(UNKNOWN_BYTES)

    @property
    def ended(self) -> bool:
        """Whether `table` is that of the whole shard."""
        return self.needs is None

    def feed(self, data: Buffer) -> None:
        """Take the next bytes of the shard. At most `step_bytes` and the largest sample are held.

        Raises:
            ShardFormatError: the shard is damaged.
        """
        self._held += data
        if self.resume + len(self._held) >= self._next_scan:
            self._scan_held(None)

    def finish(self) -> ShardTable:
        """Return the table after the last byte was fed, as `scan_shard` makes it.

        Raises:
            ShardFormatError: the shard is damaged.
        """
        total = self.resume + len(self._held)
        while not self.ended:
            self._scan_held(total)
        labels = None if self._labels is None or not len(self.table) else self._labels.filled
        return replace(self.table, member_crc32=None if self._crc32 is None else self._crc32.filled, labels=labels)

    def _scan_held(self, total: int | None) -> None:
        start = self.resume
        # Until the end only whole blocks: `resume` may lie after a payload whose padding has not arrived.
        count = len(self._held) if total is not None else len(self._held) // BLOCK_BYTES * BLOCK_BYTES
        self.scan(_octets(self._held)[:count], total)
        del self._held[: self.resume - start]
        self._next_scan = max(self.needs or 0, self.resume + len(self._held) + self._step_bytes)

    def scan(self, octets: NDArray[np.uint8], total: int | None) -> None:
        """Add the whole samples in the bytes from `resume` on; `total` as for `scan_piece`."""
        start = self.resume
        piece = scan_piece(octets, self._url, start=start, total=total, record_bytes=self._record_bytes)
        table = piece.table
        if self._crc32 is not None:
            self._crc32.extend(crc32_of(octets, table.member_offset - start, table.member_size))
        if self._labels is not None and len(table):
            labels = labels_of(table, lambda offset, _: (octets, offset - start))
            self._labels = None if labels is None else self._labels.extend(labels)
        self.add(piece)

    def add(self, piece: ScannedPiece) -> ShardTable:
        """Append the next piece; return all samples so far.

        Raises:
            ShardFormatError: a key is repeated, or there are too many fields or too long keys. Then no more pieces can
                be added.
            ValueError: the piece does not begin where the last one ended.
        """
        if piece.start != self.resume:
            raise ValueError(f"a piece from {piece.start} on does not follow what ended at {self.resume}")
        table, columns = piece.table, self._columns
        key_bytes = columns["key_bytes"].count
        if key_bytes + len(table.key_bytes) > MOST_KEY_BYTES:
            sample = int(np.searchsorted(table.key_start[1:] + key_bytes, MOST_KEY_BYTES, side="right"))
            raise ShardFormatError(
                f"up to here the samples' keys have more than {MOST_KEY_BYTES} bytes together, and a shard's keys are "
                "held in memory; give the samples shorter names, or pack them into several shards",
                url=self._url,
                offset=int(_sample_offsets(table)[sample]),
            )
        self._add_keys(table)
        numbers = np.array([self._fields.setdefault(name, len(self._fields)) for name in table.fields], np.uint32)
        if len(self._fields) > _MOST_FIELDS:
            raise _many_fields(len(self._fields), self._url)
        columns["sample_start"].extend(table.sample_start[1:] + columns["member_offset"].count)
        columns["key_start"].extend(table.key_start[1:] + key_bytes)
        columns["member_field"].extend(numbers[table.member_field] if len(numbers) else table.member_field)
        for name in ("member_offset", "member_size", "key_bytes"):
            columns[name].extend(getattr(table, name))
        self._skipped.update(table.skipped)
        self.resume, self.needs = piece.resume, piece.needs
        self.table = self._table_so_far(table.shard_bytes)
        if self.ended:
            self._keys.clear()
            without_room: dict[str, Any] = {name: column.filled.copy() for name, column in columns.items()}
            self.table = replace(self.table, **without_room)
        return self.table

    def _add_keys(self, table: ShardTable) -> None:
        """Remember a piece's keys; raise ShardFormatError if one is repeated."""
        keys, before = _keys_of(table), len(self._keys)
        self._keys.update(keys)
        if len(self._keys) == before + len(keys):
            return
        starts = (*_sample_offsets(self.table).tolist(), *_sample_offsets(table).tolist())
        first_of: dict[bytes, int] = {}
        for key, start in zip([*_keys_of(self.table), *keys], starts, strict=True):
            first = first_of.setdefault(key, start)
            if first != start:
                raise ShardFormatError(
                    f"the members of this sample do not stand together: they begin at offset {first} and come again "
                    "behind another sample; pack the shard again, sorted: `tar --sort=name -cf ...`",
                    url=self._url,
                    key=key.decode("utf-8", "surrogateescape"),
                    offset=start,
                )

    def _table_so_far(self, shard_bytes: int) -> ShardTable:
        columns = {name: column.filled for name, column in self._columns.items()}
        return ShardTable(shard_bytes=shard_bytes, fields=tuple(self._fields), skipped=dict(self._skipped), **columns)


_COLUMNS: dict[str, type[np.generic]] = {
    "member_offset": np.int64,
    "member_size": np.int64,
    "member_field": np.uint16,
    "sample_start": np.int64,
    "key_bytes": np.uint8,
    "key_start": np.int64,
}


class _Column:
    """An array that grows by doubling; what is filled never changes."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.count = 0
        self._values: NDArray[Any] = np.empty(_FIRST_ROOM, dtype)

    @property
    def filled(self) -> NDArray[Any]:
        return self._values[: self.count]

    def extend(self, values: NDArray[Any]) -> _Column:
        end = self.count + len(values)
        if end > len(self._values):
            longer = np.empty(max(end, 2 * len(self._values)), self._values.dtype)
            longer[: self.count] = self.filled
            self._values = longer
        self._values[self.count : end] = values
        self.count = end
        return self


def _octets(data: memoryview | bytearray | NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def _keys_of(table: ShardTable) -> list[bytes]:
    joined = table.key_bytes.tobytes()
    return [joined[start:end] for start, end in pairwise(table.key_start.tolist())]


def _sample_offsets(table: ShardTable) -> NDArray[np.int64]:
    """int64[S], where the header of each sample's first member stands."""
    return table.member_offset[table.sample_start[:-1]] - BLOCK_BYTES


def crc32_of(octets: NDArray[np.uint8], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.uint32]:
    """uint32[M], the crc32 of each payload; `octets` maps the shard from its start, as far as payloads reach."""
    view = octets.data
    edges = zip(offset.tolist(), (offset + size).tolist(), strict=True)
    return np.fromiter((zlib.crc32(view[start:end]) for start, end in edges), np.uint32, len(offset))


def labels_of(table: ShardTable, places: Gather) -> NDArray[np.int64] | None:
    """int64[S], the labels of a table's samples, or None unless every sample has one; raises what `places` raises."""
    chosen = table.column((LABEL_FIELD,))
    if not len(chosen) or (chosen == MISSING).any():
        return None
    offset, size = table.member_offset[chosen], table.member_size[chosen]
    if (size > _MOST_LABEL_BYTES).any():
        return None
    octets, offset = places(offset, size)
    view = octets.data
    labels: list[int] = []
    for start, end in zip(offset.tolist(), (offset + size).tolist(), strict=True):
        match = _INTEGER.fullmatch(view, start, end)
        if match is None or not -(1 << 63) <= int(match[1]) < 1 << 63:
            return None
        labels.append(int(match[1]))
    return np.array(labels, np.int64)


# -- members to samples


class _FieldNumbers(dict[bytes, int]):
    """Numbers for extensions, assigned on first use; spellings that differ in case share one.

    Text with a slash is not an extension, and reserved names are not fields; they have the number -1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __missing__(self, extension: bytes) -> int:
        if b"/" in extension or _RESERVED.fullmatch(extension):
            return _NO_FIELD
        name = extension.decode("utf-8", "surrogateescape").lower()
        number = self[extension] = self.names.setdefault(name, len(self.names))
        return number


def _grouped(members: TarMembers, start: int, total: int | None, url: str) -> ScannedPiece:
    """Group members into samples; leave the last sample to the next piece unless the archive has ended."""
    fields = _FieldNumbers()
    keys: list[bytes] = []
    sample_start: list[int] = []
    member_field: list[int] = []
    reasons: dict[int, str] = {}
    stem, stem_bytes = _NO_STEM, len(_NO_STEM)
    for member, name in enumerate(members.names):
        if name.startswith(stem):  # another member of the same sample, unless the dot was a folder's
            number = fields[name[stem_bytes:]]
            if number != _NO_FIELD:
                member_field.append(number)
                continue
        component = name.rfind(b"/") + 1
        dot = name.find(b".", component)
        if dot <= component or name.startswith(b"__") or name.endswith(b"__"):
            reason = _reason_to_skip(name, component, dot)
            if reason is not None:
                reasons[member] = reason
                continue
        key = name[:dot]
        if not keys or key != keys[-1]:
            keys.append(key)
            sample_start.append(len(member_field))
            stem = _NO_STEM if name.startswith(b"__") else name[: dot + 1]
            stem_bytes = len(stem)
        member_field.append(fields[name[dot + 1 :]])
    sample_start.append(len(member_field))
    if len(fields.names) > _MOST_FIELDS:
        raise _many_fields(len(fields.names), url)
    chosen = np.delete(np.arange(len(members.names)), list(reasons))
    offset, starts = members.offset[chosen], np.array(sample_start, np.int64)
    numbers, names = np.array(member_field, np.int64), tuple(fields.names)
    whole, resume = len(keys), members.reached
    member_end = len(members.names)
    if members.needs is None:
        resume = resume if total is None else total
    elif keys:
        whole, member_end = len(keys) - 1, int(chosen[starts[-2]])
        last = member_end - 1
        resume = start if member_end == 0 else int(members.offset[last]) + padded(int(members.size[last]))
    skipped = Counter(reason for place, reason in members.skipped if place < resume or members.needs is None)
    skipped.update(reason for member, reason in reasons.items() if member < member_end)
    end = int(starts[whole])
    table = ShardTable(
        shard_bytes=UNKNOWN_BYTES if total is None else total,
        # Fields are numbered in the order of their appearance, so those of the first members are the first ones.
        fields=names[: int(numbers[:end].max()) + 1 if end else 0],
        member_offset=offset[:end],
        member_size=members.size[chosen[:end]],
        member_field=numbers[:end].astype(np.uint16),
        sample_start=starts[: whole + 1],
        key_bytes=np.frombuffer(b"".join(keys[:whole]), np.uint8),
        key_start=np.cumsum([0, *map(len, keys[:whole])], dtype=np.int64),
        skipped=dict(skipped),
    )
    _refuse_repeated_fields(table, url)
    return ScannedPiece(start, table, resume, members.needs)


def _reason_to_skip(name: bytes, component: int, dot: int) -> str | None:
    """Return why a member belongs to no sample, or None; `component` and `dot` are positions in the name."""
    if _META.match(name):
        return "meta"
    if dot > component:
        return "reserved field" if _RESERVED.fullmatch(name, dot + 1) else None
    if component == len(name) and name:
        return "directory"  # V7 marks one by the slash alone
    return "hidden" if dot == component else "no extension"


def _refuse_repeated_fields(table: ShardTable, url: str) -> None:
    sample_of_member = np.repeat(np.arange(len(table)), np.diff(table.sample_start))
    pairs = sample_of_member * _MOST_FIELDS + table.member_field
    order = np.argsort(pairs, kind="stable")
    repeats = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
    if len(repeats):
        repeat = int(repeats.min())
        raise ShardFormatError(
            f"the sample has the field {table.fields[table.member_field[repeat]]!r} twice; re-pack the shard with each "
            "name once",
            url=url,
            key=table.key(int(sample_of_member[repeat])),
            offset=int(table.member_offset[repeat]) - BLOCK_BYTES,
        )


def _many_fields(count: int, url: str) -> ShardFormatError:
    return ShardFormatError(
        f"{count} different fields (at most {_MOST_FIELDS}); the text after the first dot of a file's name is its "
        "field, so numbers belong before that dot",
        url=url,
    )
