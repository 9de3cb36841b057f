"""The functions that a trainer may call in a feeder's process: whatever it wants to know that may need remote I/O."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamload.fetch.range_reader import ByteRange, RangeReader
from streamload.index.columns import read_class_names, read_columns, read_labels
from streamload.index.listing import Listing, list_shards, shard_sizes
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable

COUNT_SAMPLES = "count_samples"
"""A function that needs a configured feeder, which answers it: the samples of each shard, scanned if need be."""

WHAT_HOLDS_UP = "what_holds_up"
"""Another one: what the next batch waits for, in words."""


class Calls:
    """A fixed table of functions, by name: some block, some are coroutine functions.

    Args:
        list_shards: stands for the function of that name.

    Attributes:
        functions: by name.
    """

    def __init__(self, list_shards: Callable[..., Any] = list_shards) -> None:
        self._reader: RangeReader | None = None
        self.functions: Mapping[str, Callable[..., Any]] = {
            "list_shards": list_shards,
            "look_at": shard_sizes,
            "read_class_names": read_class_names,
            "read_columns": read_columns,
            "read_labels": read_labels,
            "open_reader": self._open_reader,
            "read_tables": self._read_tables,
            "read_ranges": self._read_ranges,
        }

    async def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """What a function returns; it is called on a thread where it would block the event loop."""
        called = self.functions[function]
        if inspect.iscoroutinefunction(called):
            return await called(*arguments)
        return await asyncio.to_thread(called, *arguments)

    def call_here(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """The same without an event loop, in the calling thread. No connection stays open."""
        called = self.functions[function]
        if not inspect.iscoroutinefunction(called):
            return called(*arguments)
        with ThreadPoolExecutor(1, "streamload-read") as thread:  # the caller may be in an event loop of its own
            return thread.submit(asyncio.run, self._call_and_close(function, arguments)).result()

    async def aclose(self) -> None:
        """Close the reader's connections that belong to the running event loop."""
        if self._reader is not None:
            await self._reader.aclose()

    async def _call_and_close(self, function: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return await self.call(function, arguments)
        finally:
            await self.aclose()

    async def _open_reader(self, listing: Listing, storages: Storages) -> None:
        self._reader = RangeReader(listing, storages)

    async def _read_tables(self, shards: Sequence[int]) -> list[ShardTable | None]:
        assert self._reader is not None, "open_reader comes first"
        return await self._reader.tables(shards)

    async def _read_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        assert self._reader is not None, "open_reader comes first"
        return await self._reader.read(ranges)
