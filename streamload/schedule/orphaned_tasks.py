"""Tasks that are in flight for nobody any more: what they read stays until they come back."""

from __future__ import annotations

from streamload.decode.tasks import RowTask
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import parts_of_rows, shard_and_number

__all__ = ["OrphanedTasks"]


class OrphanedTasks:
    """Those whose batch is made again by another task, or whose epoch was given up.

    A worker that has such a task does it all the same. Were its bytes freed meanwhile, it would find zeros, and
    the user's code would be run on these.

    Args:
        fetcher: has the bytes; None where nothing is fetched.
    """

    def __init__(self, fetcher: Fetcher | None) -> None:
        self._fetcher = fetcher
        self._parts: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, task: RowTask) -> None:
        """Nobody waits for this one any more; its batch still holds what it reads. Idempotent."""
        if self._fetcher is None or task.number in self._parts:
            return
        keys = parts_of_rows(task.table.shards, task.table.places())
        held = [key for key in keys if shard_and_number(key)[0] in self._fetcher.fetched]
        self._fetcher.ledger.hold(held)
        self._parts[task.number] = held

    def over(self, number: int) -> None:
        """A task is not in flight any more. It need not be one of these."""
        held = self._parts.pop(number, None)
        if held is not None and self._fetcher is not None:
            self._fetcher.ledger.release(held)
            self._fetcher.freed()
