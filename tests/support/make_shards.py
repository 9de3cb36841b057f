"""Small datasets for tests of the loader: every sample knows its own number."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from indexed_shards import write_index

from streamload import ShardWriter
from streamload.index.dataset_index import INDEX_FOLDER


def write_numbers(folder: Path, counts: Sequence[int], *, index: bool = True, width: int = 3) -> str:
    """Shards in which sample n (counted through all of them) holds n as `cls` and as an array `npy` of `width`.

    Args:
        folder: made if missing.
        counts: samples of each shard.
        index: keep the index beside the shards.
        width: length of the arrays.

    Returns:
        The folder, as the loader takes it.
    """
    number, tables = 0, []
    for shard, count in enumerate(counts):
        with ShardWriter(folder / f"part{shard:03d}-%06d.tar", index=False) as writer:
            for _ in range(count):
                value = np.full(width, number, np.int32)
                writer.write({"__key__": f"{number:06d}", "npy": value, "cls": number})
                number += 1
        tables += writer.tables
    if index:  # once: for each shard it would be written anew
        write_index(os.fspath(folder / INDEX_FOLDER), tables)
    return os.fspath(folder)


def write_samples(folder: Path | str, samples: Iterable[Mapping[str, Any]], **options: Any) -> str:
    """Write samples, with their numbers as the keys of those that have none; return the folder."""
    with ShardWriter(folder, **options) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:06d}", **sample})
    return os.fspath(folder)
