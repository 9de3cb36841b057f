"""Members to samples, by WebDataset's rules for names.

The key is the path up to the first dot of its last component, the field is what follows that dot, in lower case; the
members that follow one another with one key are one sample (`base_plus_ext` and `group_by_keys` of WebDataset 1.0.2).
Stricter than there: a member that belongs to no sample is counted, and a repeated key is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardFormatError

_META = re.compile(rb"__[^/]*__($|/)")
_RESERVED = re.compile(rb"__[^/]*__")
"""Fields that loaders add to a sample, `__key__` for example, and that no member may replace."""

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
