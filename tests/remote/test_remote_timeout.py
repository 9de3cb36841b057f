"""`timeout=` without workers: it bounds what one batch waits for, however often the wait is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from places import Place, write_datasets
from servers.faults import FaultServer

from streamload import StreamLoader
from streamload.errors import SampleError
from streamload.feeder.epoch import ReadyBatch
from streamload.feeder.messages import Ready
from streamload.order.epoch_start import EpochStart
from streamload.statistics import Meter
from streamload.trainer.epoch_iterator import Cursor, EpochIterator
from streamload.trainer.skipped_members import SkippedMembers

_TURN_S = 0.4


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("timeout")
    write_datasets(folder, [[200] * 10] * 3, [])
    with FaultServer(folder) as server:
        yield list(Place(server.url).urls("indexed", range(3)))


class Scripted:
    """A feeder that says what it is told to, and has the trainer wait for each message."""

    closed = False
    death = None

    def __init__(self, *messages: Ready) -> None:
        self.waited_s = 100.0
        self.timeouts_s: list[float] = []
        self._messages = list(messages)

    def receive(self, timeout_s: float) -> Ready:
        self.timeouts_s.append(round(timeout_s, 3))
        self.waited_s += _TURN_S
        return self._messages.pop(0)

    def forget(self, _: object) -> None:
        """It has no slots."""

    def lease(self, *_: int) -> None:
        """None of them is lent either."""

    def close(self) -> None:
        """Nothing is open."""

    def note_taken(self, *_: int) -> None:
        """It does not count."""


class Given:
    """Every batch is its end."""

    def __init__(self) -> None:
        self.skipped: list[SampleError] = []
        self.n_skipped = 0
        self.fills_up = False
        self.skipped_members = SkippedMembers()

    def judge(self, _: ReadyBatch, *, noted: bool) -> range:
        return range(1)

    def build(self, batch: ReadyBatch, *_: object) -> int:
        return batch.end


def test_messages_without_a_batch_do_not_extend_it_and_each_batch_has_all_of_it() -> None:
    start = EpochStart(0, 0, 0, 1)

    def ready(*ends: int, last: bool = False) -> Ready:
        batches = tuple(ReadyBatch(0, 0, None, 1, (), (), False, end) for end in ends)
        return Ready(start.identity, batches, (), (), last, 1)

    connection: Any = Scripted(ready(), ready(), ready(1), ready(), ready(2), ready(last=True))
    batch_builder: Any = Given()
    begun = EpochIterator(
        start,
        connection,
        batch_builder,
        Cursor(),
        Meter(),
        begin_again=lambda start, check: connection,
        last_position=lambda _: 2,
        on_nothing=lambda _: None,
        timeout_s=1.0,
    )
    assert list(begun) == [1, 2]
    assert connection.timeouts_s == [1.0, 0.6, 0.2, 1.0, 0.6, 1.0]


def test_work_in_the_callers_thread_does_not_count(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("streamload.trainer.connection.monotonic", lambda: now_s[0])

    def slow(label: int) -> int:
        now_s[0] += 1000.0
        return label

    with StreamLoader(urls, 5, num_workers=0, transform={"cls": slow}, timeout=60.0) as loader:
        assert len(list(loader)) == 6
    assert now_s[0] == 30 * 1000.0, "it was called here"
