"""Which shards are to be scanned, and what the scans have found."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from streamload.decode.failure import error_from
from streamload.decode.tasks import ScanDone, ScanTask
from streamload.fetch.tables import Tables

__all__ = ["Scans"]


class Scans:
    """Sees to it that what is asked for becomes known: from an index, from an earlier run, or by a scan.

    Args:
        tables: takes what is found.
        strict: how shards are scanned.

    Attributes:
        numbers: the numbers of tasks, unique within a pool.
    """

    def __init__(self, tables: Tables, *, strict: bool) -> None:
        self._tables = tables
        self._strict = strict
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()
        self.numbers: Iterator[int] = itertools.count()

    def ask_for(self, shards: Iterable[int]) -> None:
        """Have the counts of some shards found out.

        Raises:
            DatasetIndexError: an index is damaged.
        """
        for shard in shards:
            if self._tables.counts.values[shard] >= 0 or shard in self._asked:
                continue
            if self._tables.find(shard) is None:
                self._asked.add(shard)
                self._waiting.append(shard)

    def next_task(self) -> ScanTask | None:
        """The next scan to do."""
        return ScanTask(next(self.numbers), self._waiting.popleft(), self._strict) if self._waiting else None

    def on_done(self, done: ScanDone) -> None:
        """A scan has come back.

        Raises:
            ShardFormatError: the shard is damaged.
        """
        self._asked.discard(done.shard)
        if done.failure is not None:
            raise error_from(done.failure)
        assert done.table is not None
        self._tables.add(done.shard, done.table)
