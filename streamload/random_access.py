"""Reading at random from the shards of a listing: what a process needs is opened there, when it is first needed.

Local shards are read in place, others by a `FeederClient`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.failure import sample_error
from streamload.decode.field_reader import ShardReader
from streamload.decode.missing_field import with_fields
from streamload.decode.open_shards import OpenShards
from streamload.decode.row_table import RowTable
from streamload.decode.tasks import RowFailure, ShardOpened
from streamload.errors import DatasetIndexError, SampleError, ShardChangedError
from streamload.feeder.planned import PlannedRows, locate
from streamload.fetch.range_reader import ByteRange, joined_ranges
from streamload.fetch.resident import open_listed
from streamload.index.listing import Listing
from streamload.index.tables import Tables
from streamload.memory.mapped import Bytes
from streamload.order.plan import RowBlock
from streamload.tar.scan import labels_of, scan_file
from streamload.tar.table import ShardTable
from streamload.trainer.connection import with_another_feeder
from streamload.trainer.feeder_client import FeederClient

_OPEN_SHARDS = 64
"""Local shards that stay open; a process may have 1,024 files open at most by default."""

_TABLES_AT_ONCE = 32


class RowBytes(ShardReader):
    """Where the bytes of some rows are: the shards that they lie in, or the ranges of these that were read."""

    def __init__(self, listing: Listing, opened: dict[int, OpenShards], read: dict[ByteRange, bytes]) -> None:
        self._listing = listing
        self._opened = opened
        self._starts: dict[int, list[int]] = {}
        self._contents: dict[int, list[bytes]] = {}
        for place in sorted(read, key=lambda place: (place.shard, place.start, place.end)):
            self._starts.setdefault(place.shard, []).append(place.start)
            self._contents.setdefault(place.shard, []).append(read[place])

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` with the bytes of a place; returns how many, fewer where the shard ends before.

        Raises:
            OSError: the storage cannot read them.
        """
        if shard in self._opened:
            return self._opened[shard].read_into(target, shard, start)
        if not target:
            return 0
        number = bisect_right(self._starts[shard], start) - 1
        first = start - self._starts[shard][number]
        data = self._contents[shard][number][first : first + len(target)]
        target[: len(data)] = data
        return len(data)

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """The bytes of a place, fewer where the shard ends before. Raises what `read_into` raises."""
        if shard in self._opened:
            return self._opened[shard].read(shard, start, size_bytes)
        if not size_bytes:
            return b""
        number = bisect_right(self._starts[shard], start) - 1
        first = start - self._starts[shard][number]
        return self._contents[shard][number][first : first + size_bytes]

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """See `ShardReader.gather`; what was read of a shard that is not open is at hand one by one."""
        opened = self._opened.get(shard)
        return None if opened is None else opened.gather(shard, offsets, sizes)

    def url(self, shard: int) -> str:
        """Its url."""
        return self._listing.shard(shard).url

    def size_bytes(self, shard: int) -> int:
        """How long it is."""
        return self._listing.shard(shard).bytes


class RandomAccess:
    """What one process has open of a dataset. Several threads may use it.

    Args:
        listing: the shards; none of them compressed, and those that are not local in an index.
        client: reads what is not local; it becomes this object's own.

    Attributes:
        process_id: of the process that made it, for which alone it is good.
    """

    def __init__(self, listing: Listing, client: FeederClient) -> None:
        self.process_id = os.getpid()
        self._listing = listing
        self._client = client
        self._storages = storages = client.storages
        self._tables = Tables(listing, storages=storages)
        self._open: OrderedDict[int, OpenShards] = OrderedDict()
        self._reader: object = None
        self._lock = threading.Lock()

    def counts(self) -> list[int]:
        """The samples of each shard; shards that no index knows are scanned.

        Raises:
            ShardFormatError: a shard is damaged.
            DatasetIndexError: an index is damaged.
            StorageError: a shard cannot be read.
        """
        if self._listing.counts is not None:
            return list(self._listing.counts)
        with self._lock:
            return [len(table) for _, table in self._all_tables()]

    def skipped(self) -> Mapping[str, int]:
        """How many members were skipped, by reason, in the shards that no index knows and that are at hand."""
        return self._tables.skipped

    def fields(self) -> tuple[str, ...]:
        """The fields of all shards whose tables are at hand, and those that indexes name, in alphabetical order."""
        held = (self._tables.at_hand(shard) for shard in range(len(self._listing.shards)))
        names = {name for table in held if table is not None for name in table.fields}
        return tuple(sorted(names.union(self._listing.fields)))

    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64[samples], the integer in each sample's `cls`: from the index, or read where a local shard has none.

        Raises:
            DatasetIndexError: some sample has no such label, or its index does not know it.
            StreamloadError: as `counts`.
        """
        found = []
        with self._lock:
            for shard, table in self._all_tables():
                labels = table.labels
                if labels is None and self._is_local(shard):
                    labels = labels_of(table, partial(self._gathered, shard))
                if labels is None:
                    raise DatasetIndexError(
                        "there are no labels: not every sample has a decimal integer in a field `cls`, or the index "
                        "was made without looking; collect them from the samples",
                        url=self._tables.url(shard),
                    )
                found.append(labels)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def rows(self, block: RowBlock, fields: tuple[str, ...] | None, *, verify: bool) -> tuple[PlannedRows, RowBytes]:
        """Some rows, located, and their bytes.

        Args:
            block: the rows; they may lie anywhere.
            fields: as for `locate`.
            verify: as for `locate`.

        Raises:
            StreamloadError: a shard, its index or its bytes cannot be read.
        """
        with self._lock:
            shards = list(dict.fromkeys(block.shard.tolist()))
            self._have_tables(shards)
            planned = locate(block, self._tables, fields, verify=verify)
            read_shards = planned.table.read_shards()
            opened = {shard: self._opened(shard) for shard in read_shards if self._is_local(shard)}
            wanted = joined_ranges(_places(planned.table, opened)) if len(opened) < len(read_shards) else []
            read = dict(zip(wanted, self._read_remotely("read_ranges", wanted), strict=True)) if wanted else {}
        return planned, RowBytes(self._listing, opened, read)

    def error(self, failure: RowFailure, fields: tuple[str, ...] | None) -> SampleError | ShardChangedError:
        """The error for a sample that failed when these fields were wanted."""
        with self._lock:
            self._have_tables([failure.shard])
            table = self._tables.find_joined(failure.shard)
            assert table is not None, "it was found or scanned"
        failure = with_fields(failure, table, fields, self._tables.sidecar_fields)
        return sample_error(failure, self._tables.url(failure.stored_in), table.key(failure.sample))

    def close(self) -> None:
        """Close shards, and end the process that reads remote ones. Idempotent: what is needed is opened again."""
        with self._lock:
            for opened in self._open.values():
                opened.close()
            self._open.clear()
            self._client.close()

    def _all_tables(self) -> Iterator[tuple[int, ShardTable]]:
        shards = range(len(self._listing.shards))
        for start in range(0, len(shards), _TABLES_AT_ONCE):
            some = shards[start : start + _TABLES_AT_ONCE]
            self._have_tables(some)
            for shard in some:
                yield shard, self._table(shard)

    def _have_tables(self, shards: Sequence[int]) -> None:
        """Load the tables of remote indexes, and scan shards that no index knows."""
        missing = [shard for shard in self._tables.with_sidecars(shards) if self._tables.is_remote(shard)]
        tables = self._read_remotely("read_tables", missing) if missing else ()
        for shard, table in zip(missing, tables, strict=True):
            assert table is not None, "a shard that an index knows has a table there"
            self._tables.add(shard, table)
        for shard in shards:
            if self._tables.at_hand(shard) is None and self._tables.find(shard) is None:
                opened, url = self._opened(shard), self._tables.url(shard)
                table = scan_file(opened.descriptor(shard), opened.size_bytes(shard), url)
                self._tables.add(shard, table)

    def _gathered(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]]:
        found = self._opened(shard).gather(shard, offsets, sizes)
        if found is None:
            raise ShardChangedError(
                "the shard cannot be read where it was listed to have samples, so it was cut; fetch or pack it again",
                url=self._tables.url(shard),
            )
        return found

    def _table(self, shard: int) -> ShardTable:
        table = self._tables.find(shard)
        assert table is not None, "it was scanned"
        return table

    def _is_local(self, shard: int) -> bool:
        return self._storages.is_local(self._tables.url(shard))

    def _opened(self, shard: int) -> OpenShards:
        """A local shard, open."""
        opened = self._open.get(shard)
        if opened is None:
            listed = self._listing.shard(shard)
            opened = self._open[shard] = OpenShards(maps=False)
            try:
                opened.add(ShardOpened(shard, listed.url, listed.bytes), open_listed(listed))
            except BaseException:
                del self._open[shard]
                raise
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)  # it is closed when whoever still reads from it is done
        self._open.move_to_end(shard)
        return opened

    def _read_remotely(self, function: str, wanted: Sequence[Any]) -> Sequence[Any]:
        """What a function of the client's reader returns, which is opened again in a new process."""

        def attempt() -> Sequence[Any]:
            if (peer := self._client.connect()) is not self._reader:
                self._client.call_once("open_reader", self._listing, self._storages)
                self._reader = peer
            read: Sequence[Any] = self._client.call_once(function, wanted)
            return read

        return with_another_feeder(attempt)


def _places(table: RowTable, opened: dict[int, OpenShards]) -> list[tuple[int, int, int]]:
    """Where the fields of the rows lie that are in no open shard: shard, start, end."""
    found = []
    for shards, offsets, sizes in table.places():
        chosen = ~np.isin(shards, list(opened)) & (sizes > 0)
        starts = offsets[chosen]
        found += list(zip(shards[chosen].tolist(), starts.tolist(), (starts + sizes[chosen]).tolist(), strict=True))
    return found
