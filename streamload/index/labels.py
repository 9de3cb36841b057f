"""The label of every sample, as the index of its shard has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError
from streamload.index.listing import Listing
from streamload.index.tables import Tables
from streamload.limits import SMALL_REQUESTS
from streamload.order.groups import group_sizes
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The labels of a dataset.

    Attributes:
        values: the labels that exist, ascending.
        number: unsigned[N], for each sample, in the order of the listing, which of them it has.
    """

    values: tuple[int, ...]
    number: NDArray[np.unsignedinteger]

    def numbers_in(self, other: Labels) -> NDArray[np.unsignedinteger]:
        """unsigned[N], where each sample's label lies among the values of `other`, which has some of them.

        For a label that it lacks this is any number up to their count.
        """
        if other is self:
            return self.number
        dtype = np.min_scalar_type(len(other.values))
        found: NDArray[np.unsignedinteger] = np.searchsorted(other.values, self.values).astype(dtype)[self.number]
        return found

    def of(self, selected: NDArray[np.bool_]) -> Labels:
        """Those of the selected samples, bool[N]."""
        numbers = self.number[selected]
        occurring = np.flatnonzero(group_sizes(numbers, len(self.values)))
        dtype = np.min_scalar_type(max(0, len(occurring) - 1))
        values = tuple(self.values[number] for number in occurring.tolist())
        return Labels(values, np.searchsorted(occurring, np.arange(len(self.values))).astype(dtype)[numbers])


def read_labels(listing: Listing, storages: Storages) -> Labels:
    """Read the labels of all samples. Blocks; of a remote index several tables are loaded at a time.

    Raises:
        DatasetIndexError: a shard is in no index, or its index has no labels, is damaged or belongs to other shards.
        StorageError: an index cannot be read.
    """
    for shard, folder in zip(listing.shards, listing.index_of, strict=True):
        if folder is None:
            raise _no_labels("this shard is in no index", shard.url)
    tables = Tables(listing, storages=storages)
    shards = range(len(listing.shards))
    if any(map(tables.is_remote, shards)):
        with ThreadPoolExecutor(1) as thread:  # the caller may be in a loop of its own
            found = thread.submit(asyncio.run, _load_labels(tables, len(shards))).result()
    else:
        found = [_labels_of(tables.find(shard), tables.url(shard)) for shard in shards]
    return _joined(found)


def _joined(pieces: Sequence[Labels]) -> Labels:
    """The labels of the pieces, one after another; of 10^9 samples none is ever held as more than its number."""
    values = np.array(sorted({value for piece in pieces for value in piece.values}), np.int64)
    dtype = np.min_scalar_type(max(0, len(values) - 1))
    numbers = [np.searchsorted(values, piece.values).astype(dtype)[piece.number] for piece in pieces if piece.values]
    return Labels(tuple(values.tolist()), np.concatenate([np.empty(0, dtype), *numbers]))


async def _load_labels(tables: Tables, n_shards: int) -> list[Labels]:
    room = asyncio.Semaphore(SMALL_REQUESTS)

    async def load(shard: int) -> Labels:
        async with room:
            return _labels_of(await tables.load(shard), tables.url(shard))

    return await asyncio.gather(*map(load, range(n_shards)))


def _labels_of(table: ShardTable | None, url: str) -> Labels:
    """The labels of one shard. They are no view of its table, which would stay in memory with them."""
    assert table is not None, "the shard is in an index"
    if table.labels is not None:
        values, number = np.unique(table.labels, return_inverse=True)
        return Labels(tuple(values.tolist()), number.astype(np.min_scalar_type(max(0, len(values) - 1))))
    if len(table) == 0:
        return Labels((), np.empty(0, np.uint8))
    raise _no_labels(
        "the index has no labels of this shard, since not every sample in it has a whole number as cls", url
    )


def _no_labels(why: str, url: str) -> DatasetIndexError:
    return DatasetIndexError(
        f"weights by label need the labels that an index holds, and {why}; write the class of each sample as a field "
        "cls, make the index with `streamload index` (or pack with shardify), or give weights= as one number a sample",
        url=url,
    )
