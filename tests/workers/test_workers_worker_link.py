"""What a worker is sent before a task: the shards that it has not open, many of them by one message."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tasks_by_hand import Shelf, numbered

from streamload.decode.tasks import ForgetShards, ShardsOpened
from streamload.errors import ShardNotFoundError
from streamload.fetch.resident import ResidentShards
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.workers.worker_link import WorkerLink

SHARDS = 2 * MAX_DESCRIPTORS + 1
SHELF = Shelf(numbered(SHARDS), per_shard=1)


class Worker:
    """Notes what it is sent, and closes descriptors as a channel does.

    Attributes:
        link: to it.
        opened: the shards of each message.
        closed: the shards that it was to close.
    """

    def __init__(self, folder: Path, most_open: int) -> None:
        shards = ResidentShards(SHELF.write(folder), kept_bytes=0)
        self.link = WorkerLink(self._take, shards=shards, slots=None, most_open=most_open)
        self.opened: list[list[int]] = []
        self.closed: list[int] = []

    def _take(self, message: Any, descriptors: Sequence[int]) -> None:
        if isinstance(message, ShardsOpened):
            sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
            assert sizes == [opened.size_bytes for opened in message.shards]
            self.opened.append([opened.shard for opened in message.shards])
        if isinstance(message, ForgetShards):
            self.closed += message.shards
        for descriptor in descriptors:
            os.close(descriptor)

    def give(self, rows: Sequence[int]) -> None:
        self.link.give(SHELF.task(("cls",), rows))


def test_many_shards_come_by_few_messages_and_only_once(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SHARDS)
    worker.give(range(SHARDS))
    worker.give(range(SHARDS))
    assert [len(shards) for shards in worker.opened] == [MAX_DESCRIPTORS, MAX_DESCRIPTORS, 1]
    assert [shard for shards in worker.opened for shard in shards] == list(range(SHARDS))


def test_the_least_recently_used_are_closed_for_those_of_a_task(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 3)
    worker.give([0, 1, 2])
    worker.give([0])
    worker.give([3, 0, 4])
    assert worker.closed == [1, 2]
    worker.give(range(5))
    assert worker.closed == [1, 2], "a task has all of its shards open, however many"


def test_one_that_cannot_be_opened_is_tried_again_and_those_before_it_are_not(tmp_path: Path) -> None:
    worker = Worker(tmp_path, SHARDS)
    lost, elsewhere = tmp_path / "2.tar", tmp_path / "elsewhere"
    lost.rename(elsewhere)
    with pytest.raises(ShardNotFoundError):
        worker.give(range(5))
    assert worker.opened == [[0, 1]]
    assert not worker.link.tasks
    elsewhere.rename(lost)
    worker.give(range(5))
    assert worker.opened == [[0, 1], [2, 3, 4]]
