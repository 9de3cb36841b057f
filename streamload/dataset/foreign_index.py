"""What indexes of other tools say of the shards beside them: numbers of samples, and where samples lie.

They are read where there is no index of streamload's own, and are trusted no further than they can be checked:

- **Counts** are what the other tool counted. The tools count members without an extension or with a name such as
  `__meta__` differently from each other, and most of them do not say which version of the shard they saw. So a count is
  a promise that whoever reads the shard holds it to, with `check_samples`.
- **A table** is made only from a DALI index with names that accounts for every byte of the shard: the first header at
  its start, each header right behind the payload before it, and behind the last payload nothing but what tar itself
  fills up with. Such offsets cannot be wrong unless the shard was replaced by another one of the same size. Where
  anything else is in between (directories, long names, pax headers, which older versions of DALI's tool give wrong
  offsets for), or a name was escaped in writing, there is no table and the shard is scanned. A table from here has no
  checksums and no labels, and the headers were not looked at.

What contradicts itself or the shard is an error; what merely says too little is passed over.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamload.dataset.foreign_formats import (
    DaliIndex,
    read_dali,
    read_energon_info,
    read_energon_offsets,
    read_wids,
)
from streamload.dataset.grouping import group_members
from streamload.dataset.table import ShardTable
from streamload.dataset.tar import BLOCK_BYTES
from streamload.errors import DatasetIndexError
from streamload.wording import counted

__all__ = ["ForeignIndex", "ForeignKind", "check_samples", "find_foreign", "foreign_counts", "foreign_table"]

Read = Callable[[str], bytes]
"""Gives the content of a file by its name in the folder."""

_ENERGON_INFO = ".nv-meta/.info.json"
_WIDS_DEFAULT = "shardindex.json"
_MOST_JSON_FILES = 4
_END_MARK_BYTES = 2 * BLOCK_BYTES
_RECORD_BYTES = 20 * BLOCK_BYTES


class ForeignKind(enum.Enum):
    """Which tool's index; the value is what to call it."""

    ENERGON_DATASET = "Energon's .info.json"
    WIDS = "wids file"
    ENERGON_SHARD = "Energon's .tar.idx"
    DALI = "DALI index"


@dataclass(frozen=True, slots=True)
class ForeignIndex:
    """A file that may be an index of another tool, by its name.

    Attributes:
        kind: what it would be.
        name: the file, relative to the folder.
        shard: the shard that it is about, or None if it is about many.
    """

    kind: ForeignKind
    name: str
    shard: str | None


def find_foreign(names: Sequence[str]) -> list[ForeignIndex]:
    """The files of a folder that may be indexes of other tools, those about many shards first. Nothing is read.

    A JSON file under any name may be one of wids; where a folder has more than four (some tools write one for each
    shard), only `shardindex.json` is taken for it, the name that wids gives by itself.

    Args:
        names: the names in the folder, or paths below it: shards and all else. The file of Energon in the hidden
            folder `.nv-meta` counts if either that folder or `.nv-meta/.info.json` is named.
    """
    present = set(names)
    found = []
    if present & {".nv-meta", ".nv-meta/", _ENERGON_INFO}:
        found.append(ForeignIndex(ForeignKind.ENERGON_DATASET, _ENERGON_INFO, None))
    documents = sorted(name for name in present if name.endswith(".json") and not name.startswith(".nv-meta/"))
    if len(documents) > _MOST_JSON_FILES:
        documents = [name for name in documents if name == _WIDS_DEFAULT]
    found += [ForeignIndex(ForeignKind.WIDS, name, None) for name in documents]
    for shard in sorted(name for name in present if name.endswith(".tar")):
        found += _of_shard(shard, present)
    return found


def _of_shard(shard: str, present: set[str]) -> list[ForeignIndex]:
    """The files about one shard by their names, of those that are there."""
    found = []
    if f"{shard}.idx" in present:
        found.append(ForeignIndex(ForeignKind.ENERGON_SHARD, f"{shard}.idx", shard))
    folder, slash, name = shard.rpartition("/")
    # DALI's tool cuts the name at its first dot, rocAL's and people at the last.
    stems = dict.fromkeys([name[: name.index(".", 1)], name.removesuffix(".tar")] if "." in name[1:] else [])
    for stem in stems:
        if (file := f"{folder}{slash}{stem}.idx") in present:
            found.append(ForeignIndex(ForeignKind.DALI, file, shard))
            break
    return found


def foreign_counts(
    read: Read, names: Sequence[str], sizes: Mapping[str, int] | None = None, *, each_shard: bool = True
) -> dict[str, int]:
    """How many samples each shard holds, as far as other tools' indexes say so.

    Files about many shards are asked first, and one about a single shard only where none of them knew it.

    Args:
        read: gives the content of one of the files; what it raises is passed on.
        names: the files of the folder, as for `find_foreign`.
        sizes: the sizes of shards in bytes, as far as known; what an index says is checked against them.
        each_shard: False leaves out files about a single shard, each of which would have to be read.

    Returns:
        The counts by the names of the shards; shards that nothing is known of are missing.

    Raises:
        DatasetIndexError: an index is damaged, contradicts another one, or belongs to another version of its shard.
        ShardFormatError: a shard's samples are not in order, as its DALI index shows by their names.
    """
    sizes = sizes or {}
    shards = {name for name in names if name.endswith(".tar")}
    counts: dict[str, int] = {}
    said_by: dict[str, str] = {}
    for index in find_foreign(names):
        if index.shard is not None and (index.shard in counts or not each_shard):
            continue
        for shard, count in _counts_of(index, read(index.name), shards, sizes):
            if counts.setdefault(shard, count) != count:
                raise DatasetIndexError(
                    f"this shard has {counted(counts[shard], 'sample')} by {said_by[shard]} and {count} by "
                    f"{index.name}; remove the one that is wrong",
                    url=shard,
                )
            said_by.setdefault(shard, index.name)
    return counts


def _counts_of(
    index: ForeignIndex, content: bytes, shards: set[str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """What one file says of shards that are there."""
    match index.kind:
        case ForeignKind.ENERGON_DATASET:
            counts = read_energon_info(content, index.name)
            yield from ((shard, counts[shard]) for shard in sorted(shards & counts.keys()))
        case ForeignKind.WIDS:
            yield from _wids_counts(index.name, content, shards, sizes)
        case ForeignKind.ENERGON_SHARD if index.shard is not None:
            offsets = read_energon_offsets(content, index.name)
            _check_end(index.name, int(offsets[-1]), sizes.get(index.shard), index.shard)
            yield index.shard, len(offsets) - 1
        case ForeignKind.DALI if index.shard is not None:
            found = read_dali(content, index.name)
            if found is not None:
                yield index.shard, _dali_count(found, index.name, sizes.get(index.shard), index.shard)


def _wids_counts(name: str, content: bytes, shards: set[str], sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    found = read_wids(content, name)
    if found is None:
        return
    by_name = {entry.name: entry for entry in found}
    ambiguous = {entry.name for entry in found if by_name[entry.name] != entry}  # of the same name in other folders
    for shard in sorted(shards & (by_name.keys() - ambiguous)):
        entry, actual = by_name[shard], sizes.get(shard)
        if entry.bytes is not None and actual is not None and actual != entry.bytes:
            raise DatasetIndexError(
                f"the shard has {actual} bytes, and {name} says that it has {entry.bytes}, so it was re-packed or cut; "
                "make that file anew, or remove it",
                url=shard,
            )
        yield shard, entry.samples


def _dali_count(index: DaliIndex, name: str, shard_bytes: int | None, shard: str) -> int:
    """The number of samples by our own rules where the names are known, else by DALI's."""
    _check_dali(index, name, shard_bytes, shard)
    if index.names is None:
        return index.samples
    return len(group_members(index.names, index.offset - BLOCK_BYTES, shard).keys)


def foreign_table(read: Read, names: Sequence[str], shard: str, shard_bytes: int) -> ShardTable | None:
    """Where the samples of one shard lie, if another tool's index says so beyond doubt; see the module's docstring.

    Args:
        read: gives the content of one of the files; what it raises is passed on.
        names: the files of the folder, as for `find_foreign`; those that belong to the shard are enough.
        shard: the shard's name in the folder.
        shard_bytes: its size.

    Returns:
        The table, without checksums and labels; or None, and then the shard is to be scanned.

    Raises:
        DatasetIndexError: the index is damaged, or does not belong to the shard.
        ShardFormatError: the shard's samples are not in order, as a scan would say.
    """
    for candidate in _of_shard(shard, set(names)):
        if candidate.kind is ForeignKind.DALI:
            index = read_dali(read(candidate.name), candidate.name)
            if index is not None:
                _check_dali(index, candidate.name, shard_bytes, shard)
                return _table(index, index.names, shard, shard_bytes) if _accounts_for(index, shard_bytes) else None
    return None


def _check_dali(index: DaliIndex, name: str, shard_bytes: int | None, shard: str) -> None:
    """Refuse what cannot be true of this shard, or of any."""
    if not len(index.offset):
        return
    ends = index.offset + -(-index.size // BLOCK_BYTES) * BLOCK_BYTES
    starts = index.offset - BLOCK_BYTES
    named_otherwise = index.names is not None and any(map(_disagree, index.names, index.extensions))
    if (index.offset % BLOCK_BYTES).any() or starts[0] < 0 or (starts[1:] < ends[:-1]).any() or named_otherwise:
        raise DatasetIndexError(
            "this DALI index is damaged: it has members that overlap or begin within a block, or a name that does not "
            "end in its extension; make it anew, or remove it",
            url=name,
        )
    _check_end(name, int(ends[-1]), shard_bytes, shard)


def _disagree(name: bytes, extension: bytes) -> bool:
    last = name[name.rfind(b"/") + 1 :]
    return b"." in last and last.partition(b".")[2] != extension


def _check_end(name: str, end: int, shard_bytes: int | None, shard: str) -> None:
    if shard_bytes is not None and end > shard_bytes:
        raise DatasetIndexError(
            f"{name} has samples up to byte {end} of this shard, which has {shard_bytes} bytes, so it was re-packed or "
            "cut; make that file anew, or remove it",
            url=shard,
        )


def _accounts_for(index: DaliIndex, shard_bytes: int) -> bool:
    """Whether the members leave no byte of the shard unexplained."""
    if index.names is None or not len(index.offset) or any(b"\\" in name for name in index.names):
        return False
    ends = index.offset + -(-index.size // BLOCK_BYTES) * BLOCK_BYTES
    headers_fit = index.offset == np.append(0, ends[:-1]) + BLOCK_BYTES
    behind = shard_bytes - int(ends[-1])
    filled_up = shard_bytes % _RECORD_BYTES == 0 and _END_MARK_BYTES <= behind < _RECORD_BYTES + _END_MARK_BYTES
    return bool(headers_fit.all()) and (behind == _END_MARK_BYTES or filled_up)


def _table(index: DaliIndex, names: list[bytes] | None, shard: str, shard_bytes: int) -> ShardTable:
    samples = group_members(names or [], index.offset - BLOCK_BYTES, shard)
    return ShardTable(
        shard_bytes=shard_bytes,
        fields=samples.fields,
        member_offset=index.offset[samples.member],
        member_size=index.size[samples.member],
        member_field=samples.member_field,
        sample_start=samples.sample_start,
        key_bytes=np.frombuffer(b"".join(samples.keys), np.uint8),
        key_start=np.cumsum([0, *map(len, samples.keys)], dtype=np.int64),
        skipped=Counter(samples.skipped.values()),
    )


def check_samples(expected: int, table: ShardTable, shard: str) -> None:
    """Make sure that a shard holds as many samples as another tool's index said.

    Raises:
        DatasetIndexError: it holds fewer or more.
    """
    if len(table) != expected:
        raise DatasetIndexError(
            f"the shard holds {counted(len(table), 'sample')}, and another tool's index beside it says {expected}; "
            "remove that, or make an index with `streamload index`",
            url=shard,
        )
