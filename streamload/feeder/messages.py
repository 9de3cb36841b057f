"""Messages between a trainer and its feeder, and the feeder's functions that the trainer may call."""

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
        fields: the fields to read, or None for all.
        verify: check the bytes against the index's checksums.
        prefetch_batches: the maximum number of batches in flight or waiting for the loop, unless workers need more.
    """

    order: OrderOptions
    fields: tuple[str, ...] | None
    verify: bool
    prefetch_batches: int


class FailedRow(NamedTuple):
    """A failed row, and the URL and key of its sample."""

    failure: RowFailure
    url: str
    key: str


class ReadyBatch(NamedTuple):
    """A batch for the trainer.

    Attributes:
        done: the worker's answer, without its failures.
        failed: the failed rows, in order.
        end: the position in the epoch's order after the batch's last sample.
    """

    slot: int
    done: BatchDone
    failed: tuple[FailedRow, ...]
    end: int


class Call(NamedTuple):
    """Ask the feeder to call a function of `Calls.functions`, or `WAIT_REASON`; `number` is unique."""

    number: int
    function: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """The result or failure of the call with this number."""

    number: int
    value: Any = None
    failure: Failure | None = None


class Configure(NamedTuple):
    """Settings that hold for all epochs. Calls may precede this message, but epochs may not.

    Attributes:
        job: the result of `pickle_job`; empty without workers.
        workers: the number of workers; 0 if the trainer makes the rows itself.
        import_path: the trainer's `sys.path`.
        ends_at_failure: the first sample that fails, in the epoch's order, ends the pass.
        log_levels: the levels of the trainer's loggers, for the workers.
        descriptors: the number of descriptors that the trainer may open if it makes the rows, else 0.
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
    """The number of batches that the trainer has taken since the last message, and the slots that it has released."""

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
        start: `EpochStart.identity` of the batches' epoch; the trainer may have left that epoch.
        opened: slots that are new to the trainer, or have grown; their descriptors come with the message.
        retired: slots to drop.
        last: all batches of the epoch have been sent.
        acknowledge_after: the number of batches that may be taken before they are acknowledged.
        totals: the feeder's statistics so far; None if unknown.
        skipped_members: the number of skipped members so far, by reason.
        events: the events since the last message, for a trace.
        counts: each shard's number of samples, sent with the last batch if all are known, but not from the listing.
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
    """The feeder has failed, and makes no more batches of the epoch.

    Attributes:
        failure: the error.
        start: `EpochStart.identity` of the epoch that has failed; None if the feeder has failed as a whole.
    """

    failure: Failure
    start: tuple[int, int, int] | None = None


WAIT_REASON = "wait_reason"
"""The name of a function that only configured feeders have; it tells why the next batch has not come."""


class Calls:
    """The functions that a trainer may call in its feeder; some block, some are coroutine functions.

    Args:
        list_shards: replaces the function of that name.
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
        """Call a function, in a thread if it would block the event loop."""
        called = self.functions[function]
        if inspect.iscoroutinefunction(called):
            return await called(*arguments)
        return await asyncio.to_thread(called, *arguments)

    def call_here(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """Call a function and wait for it; run a coroutine function in another thread, and close its connections."""
        called = self.functions[function]
        if not inspect.iscoroutinefunction(called):
            return called(*arguments)
        with ThreadPoolExecutor(1, "streamload-read") as thread:  # the calling thread may run an event loop
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
