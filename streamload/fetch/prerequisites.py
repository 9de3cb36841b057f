"""Everything that has to come before rows can be made: parts of shards, and tables of remote indexes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial

from streamload.errors import without_secrets
from streamload.fetch.fetcher import Failures, Fetcher
from streamload.index.dataset import Dataset
from streamload.limits import SMALL_REQUESTS


class Prerequisites:
    """A fetcher, and the loading of tables beside it.

    Args:
        fetcher: fetches parts.
        tables: takes the tables.
        wake: called when there is something to pump.
        progress: called in the loop when tables have come or failed.
    """

    def __init__(
        self, fetcher: Fetcher, tables: Dataset, *, wake: Callable[[], None], progress: Callable[[], None]
    ) -> None:
        self.fetcher = fetcher
        self._tables = tables
        self._wake = wake
        self._progress = progress
        self._wanted: dict[int, None] = {}
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._failures = Failures()

    def has_tables(self, shards: Collection[int]) -> bool:
        """Whether the tables of some shards can be had at once; if not, they are loaded, in this order.

        None of them is dropped before this is called for others.

        Raises:
            DatasetIndexError, StorageError: one of them cannot be loaded.
        """
        missing = self._tables.hold(self._tables.with_sidecars(shards))
        self._failures.check(missing)
        self.want_tables(shards)
        return not missing

    def want_tables(self, shards: Iterable[int]) -> None:
        """Have tables loaded that will be needed."""
        numbers = self._tables.with_sidecars(shards)
        new = [shard for shard in numbers if shard not in self._wanted and shard not in self._loading]
        wanted = [shard for shard in new if self._tables.needs_read(shard) and shard not in self._failures]
        self._wanted.update(dict.fromkeys(wanted))
        if wanted:
            self._wake()

    def loading_now(self) -> str:
        """Which table is being loaded, in words; empty where none is."""
        shard = next(iter(self._loading), None)
        return "" if shard is None else f"the index: where samples lie in {without_secrets(self._tables.url(shard))!r}"

    def try_again(self) -> None:
        """Forget what has failed, so that it is tried once more when it is needed."""
        self._failures.take()
        self.fetcher.try_again()

    def pump(self) -> None:
        """Start all that there is room for; in the running loop."""
        while self._wanted and len(self._loading) < SMALL_REQUESTS:
            shard = next(iter(self._wanted))
            del self._wanted[shard]
            if not self._tables.needs_read(shard):
                continue  # it came with another
            self._loading[shard] = task = asyncio.create_task(self._load(shard))
            task.add_done_callback(partial(self._loaded, shard))
        self.fetcher.pump()

    async def close(self) -> None:
        """Stop everything and release all memory. Idempotent."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await self.fetcher.close()

    async def _load(self, shard: int) -> None:
        try:
            await self._tables.fetch(shard)
        finally:
            del self._loading[shard]

    def _loaded(self, shard: int, task: asyncio.Task[None]) -> None:
        """Note what was raised, a mistake of ours too: `has_tables` raises it, and nothing else would tell of it."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._failures.note(shard, error)
        self._progress()
        self._wake()
