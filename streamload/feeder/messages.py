"""Messages between the trainer and its feeder, and the functions that a trainer may call there."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.decode.tasks import BatchDone, Failure, RowFailure
from streamload.fetch.fetcher import ByteRange, RangeReader
from streamload.index.dataset import read_class_names, read_columns, read_labels
from streamload.index.listing import Listing, list_shards, shard_infos
from streamload.storage.storages import Storages
from streamload.tar.scan import ShardTable

if TYPE_CHECKING:
    from streamload.fetch.resident import Fetching
    from streamload.order.options import OrderOptions
    from streamload.totals import Event, Totals


class PipelineSettings(NamedTuple):
    """The settings of every epoch of a loader.

    Attributes:
        fields: the wanted fields, or None for all.
        verify: check the bytes against the index's checksums.
        prefetch_batches: the least number of batches that may be in flight or wait for the loop.
    """

    order: OrderOptions
    fields: tuple[str, ...] | None
    verify: bool
    prefetch_batches: int


class FailedRow(NamedTuple):
    """A failed row, and the sample that it was made of."""

    failure: RowFailure
    url: str
    key: str


class ReadyBatch(NamedTuple):
    """A batch for the trainer.

    Attributes:
        done: the worker's answer, without its failures.
        failed: the failed rows, in order.
        end: the position in the epoch's order after its last sample.
    """

    slot: int
    done: BatchDone
    failed: tuple[FailedRow, ...]
    end: int


class Call(NamedTuple):
    """The trainer calls a function of `Calls.functions`, or `WAIT_REASON`; `number` is unique."""

    number: int
    function: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """The result of the call of that number, or its failure."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Configure(NamedTuple):
    """Everything that holds for all epochs; calls may come before it, epochs may not.

    Attributes:
        job: the pickled `Job`, see `job_pickle`.
        workers: how many; 0 if the trainer makes the rows itself.
        import_path: the trainer's `sys.path`.
        ends_at_failure: the first sample that fails, in the epoch's order, ends the pass.
        log_levels: of the trainer's loggers, for the workers.
        descriptors: how many the trainer may have open if it makes the rows, else 0.
    """

    listing: Listing
    settings: PipelineSettings
    job: bytes
    workers: int
    fetching: Fetching
    import_path: tuple[str, ...]
    ends_at_failure: bool = False
    log_levels: tuple[tuple[str, int], ...] = ()
    descriptors: int = 0


class Acknowledge(NamedTuple):
    """The trainer has taken so many batches, and released these slots."""

    batches: int
    released: tuple[int, ...]


class AbandonEpoch(NamedTuple):
    """The loop has left the pass of this number."""

    number: int


class Tracing(NamedTuple):
    """The trainer starts or stops recording a trace."""

    on: bool


class Ready(NamedTuple):
    """Batches for the loop.

    Attributes:
        start: `EpochStart.identity` of their epoch, which the trainer may not have requested, or have left.
        batches: in order.
        opened: slots that are new to the trainer, or have grown; their descriptors come with the message.
        retired: slots to drop.
        last: all batches of the epoch have been sent, and the trainer has requested it.
        acknowledge_after: how many batches may be taken before they are acknowledged.
        totals: what the feeder has added up; None if unknown.
        skipped_members: so far, by reason.
        events: for a trace, since the last message.
        counts: the samples of each shard, once scans have found them; with the last batch.
    """

    start: tuple[int, int, int]
    batches: tuple[ReadyBatch, ...]
    opened: tuple[int, ...]
    retired: tuple[int, ...]
    last: bool
    acknowledge_after: int
    totals: Totals | None = None
    skipped_members: Mapping[str, int] = {}
    events: tuple[Event, ...] = ()
    counts: tuple[int, ...] | None = None


class Failed(NamedTuple):
    """The feeder cannot go on, and does nothing more.

    Attributes:
        failure: why.
        start: `EpochStart.identity` of the epoch that it has failed for; None if it has failed as a whole.
    """

    failure: Failure
    start: tuple[int, int, int] | None = None


WAIT_REASON = "wait_reason"
"""A function that needs a configured feeder, which answers it: what the next batch waits for, in words."""


class Calls:
    """Functions by name; some block, some are coroutine functions.

    Args:
        list_shards: stands for the function of that name.

    Attributes:
        functions: by name.
    """

    def __init__(self, list_shards: Callable[..., Any] = list_shards) -> None:
        self._reader: RangeReader | None = None
        self.functions: Mapping[str, Callable[..., Any]] = {
            "list_shards": list_shards,
            "shard_infos": shard_infos,
            "read_class_names": read_class_names,
            "read_columns": read_columns,
            "read_labels": read_labels,
            "open_reader": self._open_reader,
            "read_tables": self._read_tables,
            "read_ranges": self._read_ranges,
        }

    async def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """Call a function, on a thread if it would block the event loop."""
        called = self.functions[function]
        if inspect.iscoroutinefunction(called):
            return await called(*arguments)
        return await asyncio.to_thread(called, *arguments)

    def call_here(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """Call a function without an event loop, in the calling thread. No connection stays open."""
        called = self.functions[function]
        if not inspect.iscoroutinefunction(called):
            return called(*arguments)
        with ThreadPoolExecutor(1, "streamload-read") as thread:  # the caller may be in an event loop of its own
            return thread.submit(asyncio.run, self._call_and_close(function, arguments)).result()

    async def aclose(self) -> None:
        """Close the reader's connections that belong to the running event loop."""
        if self._reader is not None:
            await self._reader.storages.aclose()

    async def _call_and_close(self, function: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return await self.call(function, arguments)
        finally:
            await self.aclose()

    async def _open_reader(self, listing: Listing, storages: Storages) -> None:
        self._reader = RangeReader(listing, storages)

    async def _read_tables(self, shards: Sequence[int]) -> list[ShardTable | None]:
        assert self._reader is not None, "open_reader comes first"
        return await asyncio.gather(*map(self._reader.table, shards))

    async def _read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        assert self._reader is not None, "open_reader comes first"
        return await asyncio.gather(*map(self._reader.read, ranges))
