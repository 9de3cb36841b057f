"""Scan a shard into the table of its samples: whole, from memory or a file, or piece by piece while it arrives.

A sample is complete once the next sample's header has been read; an incomplete sample is left to the next piece, which
begins after the file before that sample. Pieces share nothing, so processes can scan them apart; `Scanner` joins them.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardChangedError, ShardFormatError
from streamload.memory.mapped import read_fully
from streamload.tar.header_chain import BLOCK_BYTES, HeaderChain, padded

if TYPE_CHECKING:
    from typing_extensions import Buffer

MISSING = -1  # in place of the number of a member that a sample lacks
UNKNOWN_BYTES = -1  # the `shard_bytes` of a table while the size of its shard is unknown
LABEL_FIELD = "cls"  # the field whose decimal integer is the sample's label
MOST_KEY_BYTES = 256 << 20  # limit for all keys of a shard together, which are held in memory

_META = re.compile(rb"__[^/]*__($|/)")
# Fields that loaders add to a sample, such as `__key__`; no member may replace them.
_RESERVED = re.compile(rb"__[^/]*__")
_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_MOST_LABEL_BYTES = 64
_MOST_FIELDS = 1 << 16
_NO_FIELD = -1
_NO_STEM = b"\0"  # names have no NUL in them
# If samples are on average farther apart than this, their keys are cut one by one, without the keys between them.
_FAR_APART = 16
# If headers are on average farther apart than this, payloads are not read.
_FAR_APART_BYTES = 256 << 10
_WINDOW_BYTES = 1 << 20


def scan_shard(data: memoryview | NDArray[np.uint8], url: str, *, every_byte: bool = False) -> ShardTable:
    """Scan an uncompressed tar archive, and verify every header and the archive's end.

    Args:
        data: uint8[n], the whole shard, contiguous.
        url: the shard, for errors.
        every_byte: also compute the crc32 of every payload, and the labels, which are None unless each sample has a
            decimal integer as its `cls`.

    Raises:
        ShardFormatError: the archive is damaged, cut or not tar; a member cannot be read in place (sparse or
            multi-volume); a sample's members are not together, or a field is repeated.
    """
    scanner = Scanner(url, every_byte=every_byte)
    scanner.scan(_octets(data), len(data))
    return scanner.finish()


def scan_file(
    descriptor: int,
    shard_bytes: int,
    url: str,
    *,
    crc32: bool = False,
    labels: bool = False,
) -> ShardTable:
    """Scan an open file as `scan_shard` does, without mapping it, since reading a truncated mapping would crash.

    At most about 1 MiB of the file is held. If headers are far apart, payloads are read only for `crc32` and labels.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ShardChangedError: the file has become shorter.
        OSError: the file cannot be read.
    """

    def read(start: int, end: int) -> memoryview:
        data = np.empty(end - start, np.uint8).data
        if read_fully(descriptor, data, start) < end - start:
            raise ShardChangedError(
                f"the shard had {shard_bytes} bytes and became shorter while it was read; let nothing write to "
                "shards that are in use, and fetch or pack it again",
                url=url,
            )
        return data

    chain = HeaderChain(url, start=0, total=shard_bytes)
    ahead_bytes, read_before = _WINDOW_BYTES, 0
    while chain.needs is not None:
        start = chain.reached
        chain.read(_octets(read(start, min(shard_bytes, max(chain.needs, start + ahead_bytes)))))
        far_apart = chain.reached - start > _FAR_APART_BYTES * max(1, len(chain.names) - read_before)
        ahead_bytes, read_before = BLOCK_BYTES if far_apart else _WINDOW_BYTES, len(chain.names)
    scanner = Scanner(url)
    scanner.add(_grouped(chain, 0))
    table = scanner.table()
    if crc32:
        crc32s = np.zeros(len(table.member_offset), np.uint32)
        for member, (start, end) in enumerate(_edges(table)):
            for position in range(start, end, _WINDOW_BYTES):
                piece = read(position, min(end, position + _WINDOW_BYTES))
                crc32s[member] = zlib.crc32(piece, int(crc32s[member]))
        table = replace(table, member_crc32=crc32s)
    return replace(table, labels=_labels_of(table, read)) if labels and len(table) else table


def scan_piece(data: memoryview | NDArray[np.uint8], url: str, *, start: int, total: int | None) -> ScannedPiece:
    """Scan the complete samples in the arrived bytes of an uncompressed tar archive.

    Checks what `scan_shard` checks, except keys repeated across pieces, which `Scanner` refuses.

    Args:
        data: the bytes from `start` on.
        url: the shard, for errors.
        start: 0, or the previous piece's `resume`.
        total: the size of the shard; None while it is unknown. The last piece needs it.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ValueError: `start`, `total` and the number of bytes contradict each other.
    """
    chain = HeaderChain(url, start=start, total=total)
    chain.read(_octets(data))
    return _grouped(chain, start)


@dataclass(frozen=True, slots=True, eq=False)
class ScannedPiece:
    """The whole samples in a piece of a shard.

    Attributes:
        start: the first byte of the piece.
        table: the samples. Offsets are those of the shard; members, samples and fields are numbered from 0.
        resume: the start of the next piece; can lie after the available bytes.
        needs: the end of the bytes that the next piece needs; None at the end of the shard.
    """

    start: int
    table: ShardTable
    resume: int
    needs: int | None


class Scanner:
    """Join the pieces of a shard in order, or scan its bytes as they arrive (`feed`).

    Attributes:
        resume, needs: as in `ScannedPiece`.
    """

    def __init__(self, url: str, *, every_byte: bool = False, step_bytes: int = 8 << 20) -> None:
        """Scan in `feed` after every `step_bytes`; with `every_byte`, add crc32 and labels."""
        self.resume = 0
        self.needs: int | None = BLOCK_BYTES
        self._url = url
        self._every_byte = every_byte
        self._step_bytes = step_bytes
        self._held = bytearray()  # the bytes that were fed, from `resume` on
        self._next_scan = step_bytes
        self._tables: list[ShardTable] = []
        self._keys: set[bytes] = set()
        self._key_bytes = 0
        self._fields: dict[str, int] = {}
        self._skipped: Counter[str] = Counter()

    def feed(self, data: Buffer) -> None:
        """Add the next bytes of the shard; at most `step_bytes` and the largest sample are held.

        Raises ShardFormatError if the shard is damaged.
        """
        self._held += data
        if self.resume + len(self._held) >= self._next_scan:
            self._scan_held(None)

    def finish(self) -> ShardTable:
        """Return the table after the last byte was fed. Raises ShardFormatError if the shard is damaged."""
        total = self.resume + len(self._held)
        while self.needs is not None:
            self._scan_held(total)
        return self.table()

    def table(self) -> ShardTable:
        """Return the table of all samples so far, once there is a piece."""
        self._tables = [joined_tables(self._tables)] if len(self._tables) > 1 else self._tables
        table = self._tables[0]
        labels = table.labels if len(table) else None
        return replace(table, fields=tuple(self._fields), skipped=dict(self._skipped), labels=labels)

    def _scan_held(self, total: int | None) -> None:
        start = self.resume
        # Before the end, scan only whole blocks: `resume` can lie after padding that has not arrived.
        count = len(self._held) if total is not None else len(self._held) // BLOCK_BYTES * BLOCK_BYTES
        self.scan(_octets(self._held)[:count], total)
        del self._held[: self.resume - start]
        self._next_scan = max(self.needs or 0, self.resume + len(self._held) + self._step_bytes)

    def scan(self, octets: NDArray[np.uint8], total: int | None) -> None:
        """Add the whole samples in the bytes from `resume` on; `total` as for `scan_piece`."""
        start = self.resume
        piece = scan_piece(octets, self._url, start=start, total=total)
        if self._every_byte:
            table, view = piece.table, octets.data
            crc32s = np.array([zlib.crc32(view[a - start : b - start]) for a, b in _edges(table)], np.uint32)
            labels = _labels_of(table, lambda first, end: view[first - start : end - start])
            piece = replace(piece, table=replace(table, member_crc32=crc32s, labels=labels))
        self.add(piece)

    def add(self, piece: ScannedPiece) -> None:
        """Append the next piece.

        Raises:
            ShardFormatError: a key is repeated, or there are too many fields or bytes of keys; the scanner is then
                unusable.
            ValueError: the piece does not begin at the end of the previous piece.
        """
        if piece.start != self.resume:
            raise ValueError(
                f"a piece from {piece.start} on does not follow the previous piece: it ended at {self.resume}"
            )
        table = piece.table
        if self._key_bytes + len(table.key_bytes) > MOST_KEY_BYTES:
            sample = int(np.searchsorted(table.key_start[1:] + self._key_bytes, MOST_KEY_BYTES, side="right"))
            raise ShardFormatError(
                f"up to here the samples' keys have more than {MOST_KEY_BYTES} bytes, too many to hold in memory; give "
                "the samples shorter names, or pack them into several shards",
                url=self._url,
                offset=int(table.member_offset[table.sample_start[sample]]) - BLOCK_BYTES,
            )
        self._key_bytes += len(table.key_bytes)
        keys, n_before = _keys_of(table), len(self._keys)
        self._keys.update(keys)
        if len(self._keys) < n_before + len(keys):
            raise self._repeated_key([*self._tables, table])
        numbers = [self._fields.setdefault(name, len(self._fields)) for name in table.fields]
        _check_fields(len(self._fields), self._url)
        self._tables.append(replace(table, member_field=np.array(numbers, np.uint16)[table.member_field]))
        self._skipped.update(table.skipped)
        self.resume, self.needs = piece.resume, piece.needs

    def _repeated_key(self, tables: list[ShardTable]) -> ShardFormatError:
        first_of: dict[bytes, int] = {}
        for table in tables:
            headers = table.member_offset[table.sample_start[:-1]] - BLOCK_BYTES
            for key, start in zip(_keys_of(table), headers.tolist(), strict=True):
                first = first_of.setdefault(key, start)
                if first != start:
                    return ShardFormatError(
                        f"the members of this sample are not together: they begin at offset {first} and continue "
                        "after another sample; pack the shard again, sorted: `tar --sort=name -cf ...`",
                        url=self._url,
                        key=key.decode("utf-8", "surrogateescape"),
                        offset=start,
                    )
        raise AssertionError("no key is repeated")


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """The members of one shard, grouped into samples.

    Attributes:
        shard_bytes: size of the (uncompressed) shard.
        fields: the distinct fields, in the order of their first appearance.
        member_offset: int64[M], first byte of each member's payload.
        member_size: int64[M], payload bytes.
        member_field: uint16[M], the field as a number in `fields`.
        sample_start: int64[S + 1], the members of sample i are `sample_start[i]:sample_start[i + 1]`.
        key_bytes: uint8[K], the bytes of all keys, one after the other.
        key_start: int64[S + 1], the start of each key in `key_bytes`.
        member_crc32: uint32[M], crc32 of each payload, or None.
        labels: int64[S], the integers in `cls`; None if unread, or if a sample has none.
        skipped: number of skipped members, by reason.
        member_shard: int64[M], the number of each member's shard; None if all members lie in one shard.
        columns: cached results of `column`.
    """

    shard_bytes: int
    fields: tuple[str, ...]
    member_offset: NDArray[np.int64]
    member_size: NDArray[np.int64]
    member_field: NDArray[np.uint16]
    sample_start: NDArray[np.int64]
    key_bytes: NDArray[np.uint8]
    key_start: NDArray[np.int64]
    member_crc32: NDArray[np.uint32] | None = None
    labels: NDArray[np.int64] | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    member_shard: NDArray[np.int64] | None = None
    columns: dict[tuple[str, ...], NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.sample_start) - 1

    def key(self, sample: int) -> str:
        """Return the key of a sample. A name that is not UTF-8 keeps its bytes as surrogates, as in `os.fsdecode`."""
        start, end = int(self.key_start[sample]), int(self.key_start[sample + 1])
        return self.key_bytes[start:end].tobytes().decode("utf-8", "surrogateescape")

    def keys(self, samples: NDArray[np.int64] | None = None) -> list[str]:
        """Return the keys of `samples`, int64[n], in the same order; by default of all samples."""
        chosen = np.arange(len(self)) if samples is None else samples
        if not len(chosen):
            return []
        first, last = int(chosen.min()), int(chosen.max()) + 1
        if last - first > _FAR_APART * len(chosen):
            return [self.key(sample) for sample in chosen.tolist()]
        offset = int(self.key_start[first])
        starts, ends = self.key_start[chosen] - offset, self.key_start[chosen + 1] - offset
        edges = zip(starts.tolist(), ends.tolist(), strict=True)
        joined = self.key_bytes[offset : int(self.key_start[last])].tobytes()
        if joined.isascii():
            text = joined.decode("ascii")
            return [text[start:end] for start, end in edges]
        return [joined[start:end].decode("utf-8", "surrogateescape") for start, end in edges]

    def column(self, alternatives: Sequence[str]) -> NDArray[np.int64]:
        """Return each sample's member for the first of `alternatives` that it has, or MISSING; int64[S], cached."""
        names = tuple(alternatives)
        if names in self.columns:
            return self.columns[names]
        members = np.full(len(self), MISSING, np.int64)
        sample_of_member = np.repeat(np.arange(len(self)), np.diff(self.sample_start))
        for name in reversed(names):
            if name in self.fields:
                holding = np.flatnonzero(self.member_field == self.fields.index(name))
                members[sample_of_member[holding]] = holding
        self.columns[names] = members  # only now: Ctrl-C must not leave it half filled
        return members

    def sample_fields(self, sample: int) -> tuple[str, ...]:
        """Return the fields of one sample, in the order in which they are stored."""
        start, end = int(self.sample_start[sample]), int(self.sample_start[sample + 1])
        return tuple(self.fields[number] for number in self.member_field[start:end].tolist())


def joined_tables(tables: Sequence[ShardTable]) -> ShardTable:
    """Concatenate tables of one shard whose fields have the same numbers.

    Offsets stay unchanged; checksums and labels are kept only if all tables have them.
    """
    joined: dict[str, Any] = {}
    for name in ("member_offset", "member_size", "member_field", "key_bytes", "member_crc32", "labels"):
        columns = [getattr(table, name) for table in tables]
        joined[name] = None if any(column is None for column in columns) else np.concatenate(columns)
    return ShardTable(
        shard_bytes=max(table.shard_bytes for table in tables),
        fields=tables[0].fields,
        sample_start=starts_of(np.concatenate([np.diff(table.sample_start) for table in tables])),
        key_start=starts_of(np.concatenate([np.diff(table.key_start) for table in tables])),
        **joined,
    )


def stretches(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the integers from each start up to its end, concatenated."""
    lengths = ends - starts
    return np.arange(lengths.sum()) + np.repeat(starts - starts_of(lengths)[:-1], lengths)


def starts_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each of n consecutive stretches, and the end of the last stretch, int64[n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _octets(data: bytes | memoryview | bytearray | NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def _keys_of(table: ShardTable) -> list[bytes]:
    joined = table.key_bytes.tobytes()
    return [joined[start:end] for start, end in pairwise(table.key_start.tolist())]


def _edges(table: ShardTable) -> list[tuple[int, int]]:
    ends = table.member_offset + table.member_size
    return list(zip(table.member_offset.tolist(), ends.tolist(), strict=True))


def _labels_of(table: ShardTable, payload: Callable[[int, int], bytes | memoryview]) -> NDArray[np.int64] | None:
    """Return the label of each sample, or None if a sample has none; `payload(start, end)` reads a label."""
    chosen = table.column((LABEL_FIELD,))
    offset, size = table.member_offset[chosen], table.member_size[chosen]
    if (chosen == MISSING).any() or (size > _MOST_LABEL_BYTES).any():
        return None
    labels: list[int] = []
    for start, end in zip(offset.tolist(), (offset + size).tolist(), strict=True):
        label = parse_label(payload(start, end))
        if label is None:
            return None
        labels.append(label)
    return np.array(labels, np.int64)


def parse_label(payload: bytes | memoryview) -> int | None:
    """Return the 64-bit decimal integer in a label field, or None."""
    match = _INTEGER.fullmatch(payload) if len(payload) <= _MOST_LABEL_BYTES else None
    label = int(match[1]) if match is not None else None
    return label if label is not None and -(1 << 63) <= label < 1 << 63 else None


def _grouped(chain: HeaderChain, start: int) -> ScannedPiece:
    """Group members into samples; leave the last sample to the next piece unless the archive has ended."""
    total, url, needs = chain.total, chain.url, chain.needs
    offsets, sizes = np.concatenate(chain.places, axis=1)
    fields = _FieldNumbers()
    keys: list[bytes] = []
    sample_start: list[int] = []
    member_field: list[int] = []
    reasons: dict[int, str] = {}
    stem, stem_bytes = _NO_STEM, len(_NO_STEM)
    for member, name in enumerate(chain.names):
        if name.startswith(stem):  # another member of the same sample, unless the dot is in a folder's name
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
    _check_fields(len(fields.names), url)
    chosen = np.delete(np.arange(len(chain.names)), list(reasons))
    offset, starts = offsets[chosen], np.array(sample_start, np.int64)
    numbers, names = np.array(member_field, np.int64), tuple(fields.names)
    whole, resume = len(keys), chain.reached
    member_end = len(chain.names)
    if needs is None:
        resume = resume if total is None else total
    elif keys:
        whole, member_end = len(keys) - 1, int(chosen[starts[-2]])
        last = member_end - 1
        resume = start if member_end == 0 else int(offsets[last]) + padded(int(sizes[last]))
    skipped = Counter(reason for place, reason in chain.skipped if place < resume or needs is None)
    skipped.update(reason for member, reason in reasons.items() if member < member_end)
    end = int(starts[whole])
    table = ShardTable(
        shard_bytes=UNKNOWN_BYTES if total is None else total,
        # Fields are numbered as they appear, so the fields of the first members have the lowest numbers.
        fields=names[: int(numbers[:end].max()) + 1 if end else 0],
        member_offset=offset[:end],
        member_size=sizes[chosen[:end]],
        member_field=numbers[:end].astype(np.uint16),
        sample_start=starts[: whole + 1],
        key_bytes=np.frombuffer(b"".join(keys[:whole]), np.uint8),
        key_start=np.cumsum([0, *map(len, keys[:whole])], dtype=np.int64),
        skipped=dict(skipped),
    )
    _refuse_repeated_fields(table, url)
    return ScannedPiece(start, table, resume, needs)


class _FieldNumbers(dict[bytes, int]):
    """Number extensions on first use; extensions that differ only in case share a number.

    Reserved names, and text with a slash, have the number -1.
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
    """Return why a member belongs to no sample, or None."""
    if _META.match(name):
        return "meta"
    if dot > component:
        return "reserved field" if _RESERVED.fullmatch(name, dot + 1) else None
    if component == len(name) and name:
        return "directory"  # V7 tar marks a directory only by the slash
    return "hidden" if dot == component else "no extension"


def _refuse_repeated_fields(table: ShardTable, url: str) -> None:
    sample_of_member = np.repeat(np.arange(len(table)), np.diff(table.sample_start))
    pairs = sample_of_member * _MOST_FIELDS + table.member_field
    order = np.argsort(pairs, kind="stable")
    repeats = order[1:][pairs[order[1:]] == pairs[order[:-1]]]
    if len(repeats):
        repeat = int(repeats.min())
        raise ShardFormatError(
            f"the sample has the field {table.fields[table.member_field[repeat]]!r} twice; pack the shard with one",
            url=url,
            key=table.key(int(sample_of_member[repeat])),
            offset=int(table.member_offset[repeat]) - BLOCK_BYTES,
        )


def _check_fields(count: int, url: str) -> None:
    if count <= _MOST_FIELDS:
        return
    raise ShardFormatError(
        f"{count} different fields (at most {_MOST_FIELDS}); the text after the first dot of a file's name is its "
        "field, so numbers belong before that dot",
        url=url,
    )
