"""Read the samples of tar shards by number, for torch's own DataLoader and samplers."""

from __future__ import annotations

import operator
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import data as torch_data

from streamload.arguments import advises
from streamload.decode.failure import sample_error, with_fields
from streamload.decode.field_reader import OpenShards, ShardReader
from streamload.decode.rows import RowMaker
from streamload.decode.tasks import RowFailure, Transform
from streamload.errors import DatasetIndexError, SampleError, ShardChangedError, without_secrets
from streamload.feeder.planned import PlannedRows, locate
from streamload.fetch.fetcher import ByteRange, joined_ranges
from streamload.fetch.resident import fetched_shards, open_listed
from streamload.index.dataset import LABEL, Dataset
from streamload.index.listing import Listing
from streamload.memory.mapped import Bytes
from streamload.options import Options
from streamload.order.plan import RowBlock
from streamload.order.randomness import SampleRandomness
from streamload.sampling.arguments import Portion
from streamload.sampling.expression import Where
from streamload.storage.storages import Urls
from streamload.tar.decompression import compression_of
from streamload.tar.extensions import Decode
from streamload.tar.scan import scan_file
from streamload.text import counted
from streamload.trainer.feeder_link import (
    FeederClient,
    OpenDataset,
    SkippedMembers,
    listing_places,
    named_places,
    refuse_unused_decoders,
)

# Maximum number of open local shards; by default a process may have 1,024 open files.
_OPEN_SHARDS = 64

# Maximum number of shards whose tables are read by one request.
_TABLES_AT_ONCE = 32

# Maximum number of samples that iteration reads together.
_ITERATED_TOGETHER = 32

_SEEDS = (1 << 63) - 1
_OF_PROCESS = ("_access", "_makers", "labels")


class RowBytes(ShardReader):
    """Read the bytes of rows from open local shards and from fetched ranges of remote shards."""

    def __init__(self, listing: Listing, opened: dict[int, OpenShards], fetched: dict[ByteRange, bytes]) -> None:
        self._listing = listing
        self._opened = opened
        self._fetched = fetched
        self._ranges = sorted(fetched)

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """Return a range of a shard, as `ShardReader.read` describes."""
        if shard in self._opened:
            return self._opened[shard].read(shard, start, size_bytes)
        if not size_bytes:
            return b""
        place = self._ranges[bisect_right(self._ranges, (shard, start), key=lambda place: place[:2]) - 1]
        return self._fetched[place][start - place.start : start - place.start + size_bytes]

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """Read ranges of an open shard together, as `ShardReader.gather` describes; None for a remote shard."""
        opened = self._opened.get(shard)
        return None if opened is None else opened.gather(shard, offsets, sizes)

    def listed(self, shard: int) -> tuple[str, int]:
        """Return a shard's url and size in bytes."""
        listed = self._listing.shard(shard)
        return listed.url, listed.bytes


class RandomAccess:
    """Keep the open shards of a dataset and the shards' tables, in one process. Thread-safe.

    Attributes:
        process_id: the id of the process that opened the shards; a fork opens its own.
        tables: the shards' tables, read at first use.
    """

    def __init__(self, listing: Listing, client: FeederClient) -> None:
        self.process_id = os.getpid()
        self._listing = listing
        self._client = client
        self._storages = client.storages
        client.read_from(listing)
        self.tables = Dataset(listing, client.storages)
        self._remote = fetched_shards(listing, client.storages)
        self._open: OrderedDict[int, OpenShards] = OrderedDict()
        self._lock = threading.Lock()

    def counts_and_fields(self) -> tuple[Sequence[int], list[str]]:
        """Return the number of samples in each shard, and all fields, sorted; shards without an index are scanned.

        Raises:
            StreamloadError: a shard or an index cannot be read, or is damaged.
        """
        counts, fields = self._listing.counts, set(self._listing.fields)
        if counts is None:
            with self._lock:
                for shard in range(len(self._listing.shards)):
                    if shard % _TABLES_AT_ONCE == 0:
                        self._ensure_tables(range(shard, min(shard + _TABLES_AT_ONCE, len(self._listing.shards))))
                    table = self.tables.at_hand(shard)
                    fields.update(() if table is None else table.fields)
                counts = self.tables.counts.values.tolist()
        return counts, sorted(fields)

    def labels(self) -> NDArray[np.int64]:
        """Return the integer in each sample's `cls`, int64[samples]. Raises as `read_columns`."""
        with self._lock:
            columns, _ = self._client.call("read_columns", self._listing, self._storages, (LABEL,))
        labels: NDArray[np.int64] = columns[LABEL]
        return labels

    def rows(self, block: RowBlock, fields: tuple[str, ...] | None, *, verify: bool) -> tuple[PlannedRows, RowBytes]:
        """Locate rows, and fetch their bytes from remote shards; `fields` and `verify` are as for `locate`.

        Raises:
            StreamloadError: a shard, its index or its bytes cannot be read.
        """
        with self._lock:
            shards = list(dict.fromkeys(block.shard.tolist()))
            self._ensure_tables(shards)
            planned = locate(block, self.tables, fields, verify=verify)
            read_shards = planned.table.read_shards()
            opened = {shard: self._open_shard(shard) for shard in read_shards if shard not in self._remote}
            places: list[tuple[int, int, int]] = []
            for column in planned.table.columns() if len(opened) < len(read_shards) else ():
                chosen = ~np.isin(column.shards, list(opened)) & (column.sizes > 0)
                ranges = np.stack((column.shards, column.offsets, column.offsets + column.sizes))
                places += map(tuple, ranges[:, chosen].T.tolist())
            wanted = joined_ranges(places)
            read = dict(zip(wanted, self._client.call("read_ranges", wanted), strict=True)) if wanted else {}
        return planned, RowBytes(self._listing, opened, read)

    def error(self, failure: RowFailure) -> SampleError | ShardChangedError:
        """Return the error for a sample that failed."""
        with self._lock:
            self._ensure_tables([failure.shard])
            table = self.tables.find_joined(failure.shard)
            assert table is not None, "the row was located by this table"
        failure = with_fields(failure, table, frozenset(self._listing.sidecar_fields))
        return sample_error(failure, self.tables.url(failure.stored_in), table.key(failure.sample))

    def close(self) -> None:
        """Close local shards, and end the process that reads remote shards; both are reopened on demand."""
        with self._lock:
            for opened in self._open.values():
                opened.close()
            self._open.clear()
            self._client.close()

    def _ensure_tables(self, shards: Sequence[int]) -> None:
        missing = [] if self._client.is_here else self.tables.hold(self.tables.with_sidecars(shards))
        tables = self._client.call("read_tables", missing) if missing else ()
        for shard, table in zip(missing, tables, strict=True):
            assert table is not None, "an index has a table for each of its shards"
            self.tables.add(shard, table)
        for shard in shards:
            if self.tables.at_hand(shard) is None and self.tables.find(shard) is None:
                opened, url = self._open_shard(shard), self.tables.url(shard)
                table = scan_file(opened.descriptors[shard], opened.listed(shard)[1], url)
                self.tables.add(shard, table)

    def _open_shard(self, shard: int) -> OpenShards:
        if shard not in self._open:
            listed, opened = self._listing.shard(shard), OpenShards(maps=False)
            opened.add(shard, listed.url, listed.bytes, open_listed(listed))
            self._open[shard] = opened
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)  # closed once no thread reads it
        self._open.move_to_end(shard)
        return self._open[shard]


class TarDataset(OpenDataset, torch_data.Dataset[Any]):
    """Read the samples of tar shards (WebDataset's format) by number: a map-style dataset.

    Sample i is the i-th of the concatenated shards, in the order of `StreamLoader(urls)` on one rank without shuffle,
    and has the same value as in the loader. Use it with torch's `DataLoader`, samplers, `Subset`, `random_split` and
    `ConcatDataset`, or in a notebook. To iterate over all samples, prefer `StreamLoader`: it reads larger pieces,
    decodes in its own processes, and can be resumed.

    Each process opens shards at its first sample, so a dataset can be forked or pickled; its functions may be lambdas.
    It is thread-safe. If a subclass overrides `__getitem__`, each sample is read separately, even for a DataLoader's
    batch.

    Args:
        urls: paths, patterns or folders, as for `StreamLoader`. Shards must not be compressed as a whole. Remote shards
            must have an index; local ones without one are scanned.
        fields: the fields to read, as tuples; None gives dicts of all fields. As for `StreamLoader`.
        decode: how to decode fields; as for `StreamLoader`.
        transform: a function of a sample, or a mapping from fields to functions; as for `StreamLoader`, except for
            random numbers: those come from torch, whose `DataLoader` seeds `random`, `numpy.random` and torch in each
            worker. A parameter named `rng` gets a `numpy.random.Generator` that is seeded for every sample from torch's
            default generator, so `torch.manual_seed` (or the DataLoader's `generator`) determines it too.
        index: a folder with the index of the shards, if it is not beside them.
        storage_options: credentials and options; as for `StreamLoader`.
        filesystem: an fsspec filesystem to read everything with: `urls` and `index` are its paths, or urls of its own
            protocol; other urls are refused.
        verify: check every field against the checksum in the index.
        where: the samples to select, which are numbered from 0; as for `StreamLoader`.
        join: sidecars with more fields of the samples; as for `StreamLoader`.

    Raises:
        TypeError, ValueError: an argument is invalid, or a shard is compressed as a whole.
        ShardNotFoundError: a shard does not exist, or a pattern matches nothing.
        StorageError: a shard or an index cannot be read.
        ShardFormatError: a shard without an index is damaged.
        DatasetIndexError: an index is damaged, describes other shards, or is required but missing; or folders give
            different classes the same label in their `classes.json`.
    """

    @advises
    def __init__(
        self,
        urls: Urls,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode = True,
        transform: Transform | None = None,
        index: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        verify: bool = False,
        where: Where | None = None,
        join: Urls | None = None,
    ) -> None:
        options = Options.among({**locals(), "num_workers": 0})
        portion = Portion(urls, 1.0, index=index, where=where, join=join)
        with closing(FeederClient(options.storages, named_places([portion]))) as client:
            listing = client.list_shards(urls, index, portion.sidecars)
            remote = fetched_shards(listing, options.storages)
            for number, shard in enumerate(listing.numbered):
                if compression_of(shard.url) is not None:
                    raise ValueError(
                        f"urls names {without_secrets(shard.url)!r}, which is compressed as a whole and can only be "
                        "read from its start; decompress it (or compress its members instead), or use StreamLoader"
                    )
                if number in remote and shard.index_folder is None:
                    raise DatasetIndexError(
                        "reading samples of a remote shard by number needs an index; make one with `streamload index`",
                        url=shard.url,
                    )
            with closing(RandomAccess(listing, client)) as access:
                counts, existing_fields = access.counts_and_fields()
                skipped_members = SkippedMembers()
                skipped_members.inspect(access.tables.skipped)
                if not sum(counts):
                    skipped_members.explain_emptiness()
                options.check_fields_exist(existing_fields)
                refuse_unused_decoders(options, existing_fields)
                client.check_classes({"": portion}, [listing], options)
            selected = None if where is None else np.flatnonzero(client.select(portion.selection, listing))
        self._options, self._listing, self._selected = options, listing, selected
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._job = options.job()
        self._access: RandomAccess | None = None
        # A subclass's `__getitem__` is called for each sample.
        self._has_own_samples = type(self).__getitem__ is not TarDataset.__getitem__
        self._makers = threading.local()  # a RowMaker is not thread-safe

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._ends[-1]) if self._selected is None else len(self._selected)

    def __getitem__(self, index: int | slice) -> Any:
        """Return one sample by number (negative numbers count from the end), or a list of samples for a slice.

        Raises:
            IndexError: the number is out of range.
            SampleError: the sample fails (DecodeError, TransformError); the error names shard, key and offset.
            StreamloadError: its shard, or that shard's index, cannot be read.
        """
        if isinstance(index, slice):
            return list(self._samples(range(*index.indices(len(self)))))
        return next(self._samples((index,)))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, reading neighbours in remote shards together. Called by torch's `DataLoader`.

        Raises:
            IndexError, StreamloadError: as for `__getitem__`.
        """
        if self._has_own_samples:
            return [self[index] for index in indices]
        return list(self._samples(indices))

    def __iter__(self) -> Iterator[Any]:
        """Yield all samples in order. An error is raised in place of its sample."""
        samples = range(len(self))
        if self._has_own_samples:
            yield from map(self.__getitem__, samples)
            return
        for start in samples[::_ITERATED_TOGETHER]:
            yield from self._samples(samples[start : start + _ITERATED_TOGETHER])

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """Return the integer in each sample's `cls`, int64[samples], for weights and for splits by class.

        Labels are read from the index, or from local shards without one.

        Raises:
            DatasetIndexError: a sample has no integer `cls`.
            StreamloadError: a shard or its index cannot be read.
        """
        labels = self._own_access().labels()
        return labels if self._selected is None else labels[self._selected]

    def close(self) -> None:
        """Close this process's open shards, and this thread's event loop; the next sample reopens them."""
        self._maker().close()
        if self._access is not None and self._access.process_id == os.getpid():
            self._access.close()

    def __repr__(self) -> str:
        shards = self._listing.shards
        contents = f"{counted(len(self), 'sample')} in {counted(len(shards), 'shard')}"
        return f"<TarDataset of {contents} from {without_secrets(shards[0].url)!r}>"

    def __getstate__(self) -> bytes:
        pickled: bytes = cloudpickle.dumps({k: v for k, v in vars(self).items() if k not in _OF_PROCESS})
        return pickled

    def __setstate__(self, pickled: bytes) -> None:
        self.__dict__.update(cloudpickle.loads(pickled))
        self._access, self._makers = None, threading.local()

    def _samples(self, indices: Sequence[int]) -> Iterator[Any]:
        """Make samples together, and yield them. An error is raised in place of its sample."""
        if not len(indices):
            return
        numbers = self._checked(indices)
        shards = np.searchsorted(self._ends, numbers, "right")
        samples = numbers - np.concatenate(([0], self._ends))[shards]
        rows = len(numbers)
        block = RowBlock(np.array([0, rows]), shards.astype(np.int64), samples.astype(np.int64), np.array([rows]))
        access = self._own_access()
        planned, data = access.rows(block, self._job.fields, verify=self._options.verify)
        work = self._maker().make(planned.table, data, _FromTorch(), keys=planned.keys)
        failed = min(work.failures, default=rows)
        yield from work.rows.as_list()[:failed]
        if work.failures:
            raise access.error(work.failures[failed])

    def _maker(self) -> RowMaker:
        if not hasattr(self._makers, "maker"):
            self._makers.maker = RowMaker(self._job, in_callers_process=True, one_by_one=True)
        maker: RowMaker = self._makers.maker
        return maker

    def _checked(self, indices: Sequence[int]) -> NDArray[np.int64]:
        numbers = np.fromiter(map(operator.index, indices), np.int64, len(indices))
        wrong = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if len(wrong):
            raise IndexError(f"sample {wrong[0]} is out of range: the dataset has {counted(len(self), 'sample')}")
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        return numbers if self._selected is None else self._selected[numbers]

    def _own_access(self) -> RandomAccess:
        """Return this process's `RandomAccess`, created at the first use."""
        if self._access is None or self._access.process_id != os.getpid():
            client = FeederClient(self._options.storages, listing_places(self._listing))
            self._access = RandomAccess(self._listing, client)
        return self._access


class _FromTorch(SampleRandomness):
    """Seed each sample's generator from torch's."""

    def __init__(self) -> None:
        """Create nothing: the base class's generators belong to an epoch."""

    def generator(self, shard: int, sample: int, repeat: int = 0) -> np.random.Generator:
        del shard, sample, repeat
        return np.random.default_rng(int(torch.randint(_SEEDS, ())))
