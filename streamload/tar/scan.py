"""A shard to its table of samples: whole, from memory or from a file, or piece by piece while it arrives.

Headers precede payloads, so a sample is known to be complete only when the next header has been read. `scan_prefix`
leaves what is incomplete to the next call, which begins at the sample's first header. The calls share nothing, so each
may run in another process; `GrowingTable` puts their results together.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardChangedError, ShardFormatError
from streamload.memory.gathered import gather, read_fully
from streamload.memory.mapped import Bytes
from streamload.tar.header import BLOCK_BYTES, padded
from streamload.tar.header_chain import RECORD_BYTES, ArchivePart, TarMembers, read_chain, read_chain_part
from streamload.tar.table import MISSING, ShardTable

_META = re.compile(rb"__[^/]*__($|/)")
# Fields that loaders add to a sample, `__key__` for example, and that no member may replace.
_RESERVED = re.compile(rb"__[^/]*__")

_MOST_FIELDS = 1 << 16
MOST_KEY_BYTES = 256 << 20
"""Of all samples of a shard together, which are held in memory."""
_NO_FIELD = -1
_NO_STEM = b"\0"  # names have no NUL in them


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Which members make up which samples.

    Attributes:
        member: int64[M], the numbers of the members that belong to a sample, ascending.
        member_field: uint16[M], the field of each, as a number in `fields`.
        sample_start: int64[S + 1], sample i is `member[sample_start[i]:sample_start[i + 1]]`.
        keys: the S keys, as stored.
        fields: the distinct fields, in the order of their first appearance.
        skipped: the numbers of the members that belong to no sample, each with the reason.
    """

    member: NDArray[np.int64]
    member_field: NDArray[np.uint16]
    sample_start: NDArray[np.int64]
    keys: list[bytes]
    fields: tuple[str, ...]
    skipped: dict[int, str]


def group_members(names: list[bytes], header_offset: NDArray[np.int64], url: str) -> Samples:
    """Group the regular files of one shard into samples.

    Args:
        names: the name of each member, in the order of the shard.
        header_offset: int64[n], where each member's header starts, for errors.
        url: the shard, for errors.

    Raises:
        ShardFormatError: a field is repeated in a sample, a key is repeated after another key, there are more
            than 65,536 different fields, or the keys have more than 256 MiB together.
    """
    samples = _group(names, url)
    key_start = np.cumsum([0, *map(len, samples.keys)], dtype=np.int64)
    refuse_many_key_bytes(key_start, header_offset[samples.member[samples.sample_start[:-1]]], url)
    _refuse_repeated_keys(samples, header_offset, url)
    _refuse_repeated_fields(samples, header_offset, url)
    return samples


def group_part(names: list[bytes], header_offset: NDArray[np.int64], url: str) -> Samples:
    """As `group_members`, for members that follow one another in a shard, the first of which begins a sample.

    Checks across all keys are left to the caller, which knows those of the other parts.
    """
    samples = _group(names, url)
    _refuse_repeated_fields(samples, header_offset, url)
    return samples


def refuse_many_fields(count: int, url: str) -> None:
    """Raise a ShardFormatError if a shard has more different fields than a table can number."""
    if count > _MOST_FIELDS:
        raise ShardFormatError(
            f"{count} different fields (at most {_MOST_FIELDS}); what follows the first dot of a file's "
            "name is its field, so numbers belong before that dot",
            url=url,
        )


def refuse_many_key_bytes(key_start: NDArray[np.int64], header_offset: NDArray[np.int64], url: str) -> None:
    """Raise a ShardFormatError at the sample with which a shard's keys become more than a process should hold.

    Args:
        key_start: int64[S + 1], where the key of each sample begins among all of the shard, and where the last ends.
        header_offset: int64[S], where each sample's first header starts.
        url: the shard, for errors.
    """
    if key_start[-1] > MOST_KEY_BYTES:
        sample = int(np.searchsorted(key_start[1:], MOST_KEY_BYTES, side="right"))
        raise ShardFormatError(
            f"up to here the samples' keys have more than {MOST_KEY_BYTES} bytes together, and a shard's keys are "
            "held in memory; give the samples shorter names, or pack them into several shards",
            url=url,
            offset=int(header_offset[sample]),
        )


def repeated_key(key: bytes, first_offset: int, offset: int, url: str) -> ShardFormatError:
    """The error for a key whose members do not stand together; the offsets are those of the samples' headers."""
    return ShardFormatError(
        f"the members of this sample do not stand together: they begin at offset {first_offset} and come again "
        "behind another sample; pack the shard again, sorted: `tar --sort=name -cf ...`",
        url=url,
        key=key.decode("utf-8", "surrogateescape"),
        offset=offset,
    )


def _group(names: list[bytes], url: str) -> Samples:
    fields = _FieldNumbers()
    keys: list[bytes] = []
    sample_start: list[int] = []
    member_field: list[int] = []
    reasons: dict[int, str] = {}
    stem, stem_bytes = _NO_STEM, len(_NO_STEM)
    for member, name in enumerate(names):
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
    refuse_many_fields(len(fields.names), url)
    return Samples(
        np.delete(np.arange(len(names)), list(reasons)),
        np.array(member_field, np.int64).astype(np.uint16),
        np.array(sample_start, np.int64),
        keys,
        tuple(fields.names),
        reasons,
    )


class _FieldNumbers(dict[bytes, int]):
    """Numbers for extensions, assigned on first use; spellings that differ in case share one.

    What has a slash in it is no extension, and what is reserved is no field; they have the number -1.
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


def _reason_to_skip(name: bytes, component: int, dot: int) -> str | None:
    """Why a member belongs to no sample, or None if it does; `component` and `dot` are positions in the name."""
    if _META.match(name):
        return "meta"
    if dot > component:
        return "reserved field" if _RESERVED.fullmatch(name, dot + 1) else None
    if component == len(name) and name:
        return "directory"  # V7 marks one by the slash alone
    return "hidden" if dot == component else "no extension"


def _refuse_repeated_keys(samples: Samples, header_offset: NDArray[np.int64], url: str) -> None:
    if len(set(samples.keys)) == len(samples.keys):
        return
    first_of: dict[bytes, int] = {}
    for sample, key in enumerate(samples.keys):
        first = first_of.setdefault(key, sample)
        if first != sample:
            offsets = header_offset[samples.member[samples.sample_start[[first, sample]]]].tolist()
            raise repeated_key(key, offsets[0], offsets[1], url)


def _refuse_repeated_fields(samples: Samples, header_offset: NDArray[np.int64], url: str) -> None:
    sample_of_member = np.repeat(np.arange(len(samples.keys)), np.diff(samples.sample_start))
    pairs = sample_of_member * _MOST_FIELDS + samples.member_field
    order = np.argsort(pairs, kind="stable")
    repeats = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
    if len(repeats):
        repeat = int(repeats.min())
        raise ShardFormatError(
            f"the sample has the field {samples.fields[int(samples.member_field[repeat])]!r} twice; "
            "re-pack the shard with each name once",
            url=url,
            key=samples.keys[int(sample_of_member[repeat])].decode("utf-8", "surrogateescape"),
            offset=int(header_offset[samples.member[repeat]]),
        )


LABEL_FIELD = "cls"
"""The field whose decimal integer is a sample's label."""

_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_MOST_LABEL_BYTES = 64

# From this mean distance on, headers are read one by one and payloads are not read.
_FAR_APART_BYTES = 256 << 10

Gather = Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[Bytes, NDArray[np.int64]]]
"""Gives the bytes at some (offsets, sizes) of a shard, and where each of them begins in the result."""


def scan_shard(
    data: memoryview | NDArray[np.uint8],
    url: str,
    *,
    record_bytes: int = RECORD_BYTES,
    crc32: bool = False,
    labels: bool = False,
) -> ShardTable:
    """Find the samples of an uncompressed tar archive, trusting nothing.

    Every header and the end of the archive are verified; the table has everything that the archive holds.
    Nothing in the table refers to `data`, and payloads are read only for `crc32` and `labels`.

    Args:
        data: uint8[n], the whole shard, contiguous; a mapped file only in a process that may die of a truncated one.
        url: the shard, for errors.
        record_bytes: the size of the archive's records; its end may be filled with zeros to the end of one.
        crc32: compute the crc32 of every payload, which reads the whole shard.
        labels: read the labels; they are None if some sample has no `cls`, or one that is not a decimal integer.

    Raises:
        ShardFormatError: the archive is damaged or cut or not tar; it holds what cannot be read in place (sparse or
            multi-volume members); a sample's members are not together, or a field comes twice. `url` and `offset`
            are set.
    """
    octets = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    table = _whole_table(read_chain(octets, url, record_bytes), len(octets), url)
    if crc32:
        table = replace(table, member_crc32=crc32_of(octets, table.member_offset, table.member_size))
    if labels:
        table = replace(table, labels=labels_of(table, lambda offset, _: (octets, offset)))
    return table


def scan_file(
    descriptor: int,
    shard_bytes: int,
    url: str,
    *,
    record_bytes: int = RECORD_BYTES,
    crc32: bool = False,
    labels: bool = False,
    window_bytes: int = 1 << 20,
) -> ShardTable:
    """`scan_shard` of an open file, without mapping it, so that it may be truncated meanwhile.

    Payloads are not read where headers are far apart.

    Args:
        descriptor: the file.
        shard_bytes: its size.
        url: as for `scan_shard`, like all that follows.
        record_bytes: see there.
        crc32: see there.
        labels: see there.
        window_bytes: how much is read at once.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ShardChangedError: the file has become shorter.
        OSError: it cannot be read.
    """

    def places(offset: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[Bytes, NDArray[np.int64]]:
        found = gather(descriptor, offset, size)
        if found is None:
            raise _shorter(url, shard_bytes)
        return found

    table = _whole_table(_chain_of(descriptor, shard_bytes, url, record_bytes, window_bytes), shard_bytes, url)
    if crc32:
        edges = zip(table.member_offset.tolist(), table.member_size.tolist(), strict=True)
        checksums = (
            _crc32_at(descriptor, offset, size, url, shard_bytes=shard_bytes, window_bytes=window_bytes)
            for offset, size in edges
        )
        table = replace(table, member_crc32=np.fromiter(checksums, np.uint32, len(table.member_offset)))
    if labels:
        table = replace(table, labels=labels_of(table, places))
    return table


def _chain_of(descriptor: int, shard_bytes: int, url: str, record_bytes: int, most_bytes: int) -> TarMembers:
    """The members of an open file, window by window."""
    found: list[TarMembers] = []
    start, window_bytes = 0, most_bytes
    needs: int | None = BLOCK_BYTES
    while needs is not None:
        available = min(shard_bytes, max(needs, start + window_bytes))
        data = np.empty(available - start, np.uint8)
        if read_fully(descriptor, memoryview(data.data), start) < len(data):
            raise _shorter(url, shard_bytes)
        part = read_chain_part(ArchivePart(data, start, available, shard_bytes, first=start), url, record_bytes)
        found.append(part)
        far_apart = part.reached - start > _FAR_APART_BYTES * max(1, len(part.names))
        window_bytes = BLOCK_BYTES if far_apart else most_bytes
        start, needs = part.reached, part.needs
    if len(found) == 1:
        return found[0]
    return replace(
        found[-1],
        names=list(chain.from_iterable(part.names for part in found)),
        offset=np.concatenate([part.offset for part in found]),
        size=np.concatenate([part.size for part in found]),
        skipped=list(chain.from_iterable(part.skipped for part in found)),
    )


def _crc32_at(descriptor: int, offset: int, size: int, url: str, *, shard_bytes: int, window_bytes: int) -> int:
    """The crc32 of one payload, read window by window."""
    checksum, end = 0, offset + size
    while offset < end:
        data = os.pread(descriptor, min(end - offset, window_bytes), offset)
        if not data:
            raise _shorter(url, shard_bytes)
        checksum = zlib.crc32(data, checksum)
        offset += len(data)
    return checksum


def _shorter(url: str, shard_bytes: int) -> ShardChangedError:
    return ShardChangedError(
        f"the shard had {shard_bytes} bytes and became shorter while it was read; let nothing write to shards that are "
        "in use, and fetch or pack it again",
        url=url,
    )


def _whole_table(members: TarMembers, shard_bytes: int, url: str) -> ShardTable:
    """The samples of a whole archive's members."""
    samples = group_members(members.names, members.offset - BLOCK_BYTES, url)
    skipped = Counter(reason for _, reason in members.skipped)
    skipped.update(samples.skipped.values())
    return ShardTable(
        shard_bytes=shard_bytes,
        fields=samples.fields,
        member_offset=members.offset[samples.member],
        member_size=members.size[samples.member],
        member_field=samples.member_field,
        sample_start=samples.sample_start,
        key_bytes=np.frombuffer(b"".join(samples.keys), np.uint8),
        key_start=np.cumsum([0, *map(len, samples.keys)], dtype=np.int64),
        skipped=dict(skipped),
    )


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


UNKNOWN_BYTES = -1
"""The `shard_bytes` of a table whose shard's size is not known yet."""


@dataclass(frozen=True, slots=True, eq=False)
class ScannedPiece:
    """What one call of `scan_prefix` has found.

    Attributes:
        start: where the call began.
        table: the samples that are whole, from `start` on. Offsets are those of the shard; members, samples and
            fields are numbered from 0 in this piece. There are no checksums and no labels. Every byte of these
            samples lies before `resume`.
        resume: where the next call must begin; where the shard's size is known it may lie behind what was available.
            No scan needs what lies before.
        needs: the end of the bytes that the next call needs to make progress, always beyond `available`; None if there
            is nothing left to scan.
    """

    start: int
    table: ShardTable
    resume: int
    needs: int | None

    @property
    def ended(self) -> bool:
        """Whether the shard has been scanned and checked to its end."""
        return self.needs is None


def scan_prefix(
    data: memoryview | NDArray[np.uint8],
    url: str,
    *,
    start: int,
    available: int,
    total: int | None,
    record_bytes: int = RECORD_BYTES,
) -> ScannedPiece:
    """Find the samples that are whole in bytes `start` to `available` of an uncompressed tar archive.

    Nothing outside of these bytes is looked at. All checks of `scan_shard` are made, each as soon as its bytes have
    arrived; `GrowingTable` refuses a key that is repeated in another piece. Of several faults the one whose bytes
    arrive first is raised, which need not be the one that `scan_shard` names.

    Args:
        data: maps the shard from its first byte to `available` at least.
        url: the shard, for errors.
        start: 0, or where the last piece says to `resume`.
        available: the end of the bytes that have arrived without a gap from `start` on.
        total: the size of the shard, or None where that is not known yet; then it cannot come to its end, and must be
            scanned once more with the size when all bytes have arrived.
        record_bytes: as for `scan_shard`.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ValueError: the numbers contradict each other; see `ArchivePart`.
    """
    octets = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    members = read_chain_part(ArchivePart(octets, start, available, total), url, record_bytes)
    samples = group_part(members.names, members.offset - BLOCK_BYTES, url)
    if members.needs is None or not samples.keys:
        whole, member_end = len(samples.keys), len(members.names)
        resume = members.reached if members.needs is not None or total is None else total
    else:
        whole, member_end = len(samples.keys) - 1, int(samples.member[samples.sample_start[-2]])
        resume = start if member_end == 0 else _end_of(members, member_end - 1)
    skipped = Counter(reason for position, reason in members.skipped if position < resume or members.needs is None)
    skipped.update(reason for member, reason in samples.skipped.items() if member < member_end)
    shard_bytes = UNKNOWN_BYTES if total is None else total
    table = _table_of_piece(members, samples, whole, shard_bytes, dict(skipped))
    return ScannedPiece(start, table, resume, members.needs)


def _end_of(members: TarMembers, member: int) -> int:
    """Where the next header, of any kind, starts after a member."""
    return int(members.offset[member]) + padded(int(members.size[member]))


def _table_of_piece(
    members: TarMembers, samples: Samples, whole: int, shard_bytes: int, skipped: dict[str, int]
) -> ShardTable:
    """The table of the first `whole` samples."""
    member_end = int(samples.sample_start[whole])
    chosen, member_field = samples.member[:member_end], samples.member_field[:member_end]
    # Fields are numbered in the order of their appearance, so those of the first members are the first ones.
    fields = samples.fields[: int(member_field.max()) + 1 if member_end else 0]
    keys = samples.keys[:whole]
    return ShardTable(
        shard_bytes=shard_bytes,
        fields=fields,
        member_offset=members.offset[chosen],
        member_size=members.size[chosen],
        member_field=member_field,
        sample_start=samples.sample_start[: whole + 1],
        key_bytes=np.frombuffer(b"".join(keys), np.uint8),
        key_start=np.cumsum([0, *map(len, keys)], dtype=np.int64),
        skipped=skipped,
    )


_FIRST_ROOM = 1_024


class GrowingTable:
    """Joins a shard's pieces in order. All calls together cost time proportional to the shard's members.

    Attributes:
        table: all samples so far. Adding a piece replaces it by a longer one, in which samples and members keep their
            numbers. Its `shard_bytes` is UNKNOWN_BYTES while the size is not known.
        resume: where the next scan must begin.
        needs: the end of the bytes that the next scan needs; None when there is none.
    """

    def __init__(self, url: str) -> None:
        """Start empty; `url` is the shard, for errors."""
        self.resume = 0
        self.needs: int | None = BLOCK_BYTES
        self._url = url
        self._keys: set[bytes] = set()
        self._fields: dict[str, int] = {}
        self._skipped: dict[str, int] = {}
        self._offset = _Column(np.int64)
        self._size = _Column(np.int64)
        self._field = _Column(np.uint16)
        self._key_bytes = _Column(np.uint8)
        self._sample_start = _Column(np.int64)
        self._key_start = _Column(np.int64)
        self._sample_start.extend(np.zeros(1, np.int64))
        self._key_start.extend(np.zeros(1, np.int64))
        self.table = self._view(UNKNOWN_BYTES)

    @property
    def ended(self) -> bool:
        """Whether `table` is that of the whole shard."""
        return self.needs is None

    def add(self, piece: ScannedPiece) -> ShardTable:
        """Append the next piece; returns all samples so far.

        Raises:
            ShardFormatError: a key is repeated, or there are too many fields or too long keys. Then no more pieces can
                be added.
            ValueError: the piece does not begin where the last one ended.
        """
        if piece.start != self.resume:
            raise ValueError(f"a piece from {piece.start} on does not follow what ended at {self.resume}")
        table = piece.table
        refuse_many_key_bytes(table.key_start + self._key_bytes.count, _sample_offsets(table), self._url)
        self._note_keys(table)
        numbers = self._numbers_of(table.fields)
        self._sample_start.extend(table.sample_start[1:] + self._offset.count)
        self._key_start.extend(table.key_start[1:] + self._key_bytes.count)
        self._offset.extend(table.member_offset)
        self._size.extend(table.member_size)
        self._field.extend(numbers[table.member_field] if len(numbers) else table.member_field)
        self._key_bytes.extend(table.key_bytes)
        for reason, count in table.skipped.items():
            self._skipped[reason] = self._skipped.get(reason, 0) + count
        self.resume, self.needs = piece.resume, piece.needs
        self.table = self._view(table.shard_bytes)
        if self.ended:
            self._keys.clear()
            self.table = _without_room(self.table)
        return self.table

    def _note_keys(self, table: ShardTable) -> None:
        """Remember a piece's keys, and refuse one that was there before."""
        keys = _keys_of(table)
        before = len(self._keys)
        self._keys.update(keys)
        if len(self._keys) == before + len(keys):
            return
        starts = (*_sample_offsets(self.table).tolist(), *_sample_offsets(table).tolist())
        first_of: dict[bytes, int] = {}
        for key, start in zip([*_keys_of(self.table), *keys], starts, strict=True):
            first = first_of.setdefault(key, start)
            if first != start:
                raise repeated_key(key, first, start, self._url)

    def _numbers_of(self, fields: tuple[str, ...]) -> NDArray[np.uint16]:
        """The numbers, in the whole table, of a piece's fields."""
        numbers = [self._fields.setdefault(name, len(self._fields)) for name in fields]
        refuse_many_fields(len(self._fields), self._url)
        return np.array(numbers, np.uint16)

    def _view(self, shard_bytes: int) -> ShardTable:
        return ShardTable(
            shard_bytes=shard_bytes,
            fields=tuple(self._fields),
            member_offset=self._offset.filled,
            member_size=self._size.filled,
            member_field=self._field.filled,
            sample_start=self._sample_start.filled,
            key_bytes=self._key_bytes.filled,
            key_start=self._key_start.filled,
            skipped=dict(self._skipped),
        )


class _Column:
    """An array that grows by doubling; what is filled never changes."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.count = 0
        self._values: NDArray[Any] = np.empty(_FIRST_ROOM, dtype)

    @property
    def filled(self) -> NDArray[Any]:
        return self._values[: self.count]

    def extend(self, values: NDArray[Any]) -> None:
        end = self.count + len(values)
        if end > len(self._values):
            longer = np.empty(max(end, 2 * len(self._values)), self._values.dtype)
            longer[: self.count] = self.filled
            self._values = longer
        self._values[self.count : end] = values
        self.count = end


def _keys_of(table: ShardTable) -> list[bytes]:
    joined = table.key_bytes.tobytes()
    return [joined[start:end] for start, end in pairwise(table.key_start.tolist())]


def _sample_offsets(table: ShardTable) -> NDArray[np.int64]:
    """int64[S], where the header of each sample's first member stands."""
    return table.member_offset[table.sample_start[:-1]] - BLOCK_BYTES


def _without_room(table: ShardTable) -> ShardTable:
    """The same table without spare room."""
    return replace(
        table,
        member_offset=table.member_offset.copy(),
        member_size=table.member_size.copy(),
        member_field=table.member_field.copy(),
        sample_start=table.sample_start.copy(),
        key_bytes=table.key_bytes.copy(),
        key_start=table.key_start.copy(),
    )
