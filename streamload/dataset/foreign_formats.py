"""The files in which other tools keep what they know of tar shards, parsed as they write them.

- **wids** (`shardindex.json`): `wids/wids_index.py` and `wids/wids_specs.py` of webdataset 0.2; the package has it no
  longer from 1.0 on. JSON with `wids_version` 1 and a `shardlist` of `url`, `nsamples` and mostly `filesize`, also
  within `datasets`. References to other files (`source_url`) are not followed.
- **DALI** (`x.idx` for `x.tar`): `tools/wds2idx.py` of NVIDIA DALI, read by its `webdataset_loader.cc`. A line with the
  version and the number of samples, and a line for each sample: for each member extension, offset of the payload and
  size, and in v1.2 the name, all between blanks. v1.1 has no names. v1.0 is what AMD's rocAL wrote first: as v1.2.
- **Energon** (`x.tar.idx` for `x.tar`): `itar.py` and `prepare.py` of NVIDIA Megatron-Energon. Offsets as unsigned
  64-bit numbers, little endian: of the first header of each sample, and last of the end of the archive's members.
- **Energon** (`.nv-meta/.info.json`): its page "Dataset Format on Disk". JSON with `shard_counts`, from each shard's
  path below the dataset's folder to its number of samples. `index.sqlite` beside it is left alone, since that
  page says that it may change in any release, and so is `.info.yaml` of older releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from streamload.dataset.table_file import MAX_COUNT
from streamload.errors import DatasetIndexError
from streamload.wording import counted

__all__ = ["DaliIndex", "WidsShard", "read_dali", "read_energon_info", "read_energon_offsets", "read_wids"]

_DALI_HEADER = re.compile(rb"(v[0-9]+\.[0-9]+)[ \t]+([0-9]{1,18})[ \t]*\r?\Z")
_DALI_WITH_NAMES = {b"v1.0": True, b"v1.1": False, b"v1.2": True}
_WIDS_VERSION = 1
_ADVICE = "make it anew with the tool that wrote it, or remove it"


@dataclass(frozen=True, slots=True)
class WidsShard:
    """What a wids file says of one shard.

    Attributes:
        name: the last component of its url.
        samples: how many samples it holds.
        bytes: its size, or None where that was not recorded.
    """

    name: str
    samples: int
    bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class DaliIndex:
    """What a DALI index says of its shard.

    Attributes:
        samples: the number of samples, as DALI counts them.
        extensions: the extension of each member, in order; empty, as are the rest, if the lines cannot be taken apart
            because there are blanks in names.
        offset: int64[M], where each payload starts.
        size: int64[M], payload bytes.
        names: the members' names as GNU tar lists them, or None where the version has none.
    """

    samples: int
    extensions: list[bytes]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    names: list[bytes] | None


def read_wids(content: bytes, url: str) -> list[WidsShard] | None:
    """The shards that a wids file lists; None if the content is not of wids at all.

    Raises:
        DatasetIndexError: it is of wids, and damaged or of another version.
    """
    document = _json(content)
    if not isinstance(document, dict) or "wids_version" not in document:
        return None
    if document["wids_version"] != _WIDS_VERSION:
        raise DatasetIndexError(
            f"a wids file of version {document['wids_version']!r}, and only {_WIDS_VERSION} is known; remove it",
            url=url,
        )
    parts = document.get("datasets", [])
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _damaged("wids file", url)
    shards = []
    for part in [document, *parts]:
        entries = part.get("shardlist", [])
        if not isinstance(entries, list):
            raise _damaged("wids file", url)
        shards += [_wids_shard(entry, url) for entry in entries]
    return shards


def _wids_shard(entry: Any, url: str) -> WidsShard:
    if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or not _is_count(entry.get("nsamples")):
        raise _damaged("wids file", url)
    size = entry.get("filesize")
    if size is not None and not _is_count(size):
        raise _damaged("wids file", url)
    where = entry["url"]
    try:
        path = urlsplit(where).path if "://" in where else where
    except ValueError as exc:
        raise _damaged("wids file", url) from exc
    return WidsShard(path.rpartition("/")[2], entry["nsamples"], size)


def read_energon_info(content: bytes, url: str) -> dict[str, int]:
    """The number of samples of each shard, by its path below the dataset's folder.

    Raises:
        DatasetIndexError: the file is damaged.
    """
    document = _json(content)
    counts = document.get("shard_counts") if isinstance(document, dict) else None
    if not isinstance(counts, dict) or not all(_is_count(count) for count in counts.values()):
        raise _damaged("Energon's .info.json", url)
    return counts


def read_energon_offsets(content: bytes, url: str) -> NDArray[np.int64]:
    """int64[S + 1]: where the first header of each sample lies, and where the members end.

    Raises:
        DatasetIndexError: these are no such offsets.
    """
    offsets = np.frombuffer(content[: len(content) // 8 * 8], "<u8")
    sound = len(content) % 8 == 0 and len(offsets) > 0 and not (offsets % 512).any() and int(offsets.max()) < 1 << 62
    if not sound or (np.diff(offsets.astype(np.int64)) <= 0).any():
        raise _damaged("Energon's .tar.idx", url)
    return offsets.astype(np.int64)


def read_dali(content: bytes, url: str) -> DaliIndex | None:
    """What a DALI index says; None if the content is no DALI index at all (other tools have files of that name).

    Raises:
        DatasetIndexError: it is one, and damaged or cut or of another version.
    """
    first, *lines = content.split(b"\n")
    header = _DALI_HEADER.match(first)
    if header is None:
        return None
    version, samples = header[1], int(header[2])
    if version not in _DALI_WITH_NAMES:
        raise DatasetIndexError(
            f"a DALI index of version {version.decode()}, and v1.0 to v1.2 are known; remove it, or write one of those",
            url=url,
        )
    if lines.pop() if lines else True:
        raise _damaged("DALI index", url)  # the last line has no end, so it is cut
    if len(lines) != samples:
        raise DatasetIndexError(
            f"this DALI index says that it has {counted(samples, 'sample')} and has lines for {len(lines)}; {_ADVICE}",
            url=url,
        )
    return _dali_index(lines, with_names=_DALI_WITH_NAMES[version])


def _dali_index(lines: list[bytes], *, with_names: bool) -> DaliIndex:
    width = 4 if with_names else 3
    nothing = np.empty(0, np.int64)
    tokens: list[bytes] = []
    for line in lines:
        words = line.split()
        if not words or len(words) % width or not all(_numbers(words, width)):
            return DaliIndex(len(lines), [], nothing, nothing, None)
        tokens += words
    return DaliIndex(
        len(lines),
        tokens[0::width],
        np.array([int(word) for word in tokens[1::width]], np.int64),
        np.array([int(word) for word in tokens[2::width]], np.int64),
        tokens[3::width] if with_names else None,
    )


def _numbers(words: list[bytes], width: int) -> Iterator[bool]:
    """Whether the words are numbers where an offset or a size should be."""
    for column in (1, 2):
        yield all(word.isdigit() and len(word) <= 18 for word in words[column::width])


def _json(content: bytes) -> Any:
    """The document, or None where there is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _damaged(what: str, url: str) -> DatasetIndexError:
    return DatasetIndexError(f"this file is damaged, or is not what its name says ({what}); {_ADVICE}", url=url)
