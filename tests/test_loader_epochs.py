"""From one epoch to the next: its first batches are made ahead, and nobody notices but for the time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from make_shards import write_numbers
from processes import children
from transforms import Noting

from streamload import StreamLoader
from streamload.errors import ShardNotFoundError
from streamload.feeder.epoch import Epochs
from streamload.feeder.scheduler import RowBatcher
from streamload.memory.channel import Channel
from streamload.order.epoch_start import EpochStart

COUNTS = [40, 30, 50]
TOTAL = sum(COUNTS)
TIMEOUT_S = 60.0


@pytest.fixture
def source(shard_folder: Path) -> str:
    return write_numbers(shard_folder, COUNTS)


def options(**others: Any) -> dict[str, Any]:
    return {"batch_size": 10, "shuffle": 25, "fields": ("cls",), "num_workers": 1, **others}


def numbers(loader: StreamLoader) -> list[int]:
    return [number for batch in loader for number in batch[0].tolist()]


def epochs_apart(source: str, *epochs: int) -> list[list[int]]:
    """What each epoch is when nothing is made ahead."""
    found = []
    for epoch in epochs:
        with StreamLoader(source, **options(num_workers=0)) as loader:
            loader.set_epoch(epoch)
            found.append(numbers(loader))
    return found


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_sleep() -> bool:
    """Whether the feeder and its workers wait for messages."""
    return all(child.status() == psutil.STATUS_SLEEPING for child in children())


def test_the_next_epoch_is_begun_before_it_is_requested(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made")
    with StreamLoader(source, **options(transform={"cls": noting}, prefetch_batches=4)) as loader:
        first = numbers(loader)
        wait_until(lambda: noting.made() > TOTAL)
        assert [first, numbers(loader), numbers(loader)] == epochs_apart(source, 0, 1, 2)


def test_nothing_is_said_between_epochs(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To wake the feeder is the largest part of what an epoch's end could cost the loop."""
    noting, said = Noting(tmp_path / "made"), []
    send_all = Channel.send_all
    monkeypatch.setattr(Channel, "send_all", lambda channel, all_: (said.extend(all_), send_all(channel, all_)))
    with StreamLoader(source, **options(batch_size=1, transform={"cls": noting}, prefetch_batches=2 * TOTAL)) as loader:
        batches = iter(loader)
        for _ in range(TOTAL):
            next(batches)
        wait_until(lambda: noting.made() >= 2 * TOTAL and all_sleep())  # so all of it has been announced, too
        said.clear()
        assert len(list(batches)) == 0
        batches = iter(loader)
        next(batches)
        assert said == []
        assert 1 + len(list(batches)) == TOTAL
        assert any(isinstance(message, EpochStart) for message in said)


def test_no_more_than_is_prefetched_is_made_ahead(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made", pause_s=0.003)
    with StreamLoader(source, **options(transform={"cls": noting}, collate_fn=list, prefetch_batches=1)) as loader:
        list(loader)
        wait_until(lambda: noting.made() > TOTAL)
        time.sleep(0.3)
        assert noting.made() <= TOTAL + 10 * 4, "two tasks for each worker and two more, of a batch each"


@pytest.mark.parametrize("epochs", [(0, 3, 4, 4, 1, 2), (5, 5, 5), (1, 0, 1, 0)])
def test_epochs_in_any_order(source: str, epochs: tuple[int, ...]) -> None:
    found = []
    with StreamLoader(source, **options()) as loader:
        for epoch in epochs:
            loader.set_epoch(epoch)
            found.append(numbers(loader))
    assert found == epochs_apart(source, *epochs)


def test_nothing_is_made_ahead_in_the_callers_thread(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made")
    with StreamLoader(source, **options(transform={"cls": noting}, num_workers=0)) as loader:
        for passes in (1, 2):
            list(loader)
            assert noting.made() == passes * TOTAL


def test_who_stays_at_an_epoch_has_none_made_ahead(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made")
    with StreamLoader(source, **options(transform={"cls": noting})) as loader:
        for passes in (1, 2, 3):
            loader.set_epoch(7)
            list(loader)
            made_ahead = noting.made() - passes * TOTAL
        wait_until(lambda: noting.made() >= 3 * TOTAL)
        time.sleep(0.3)
        assert noting.made() - 3 * TOTAL <= made_ahead + 20, "what was in flight when the second pass began"


def test_a_state_loaded_between_epochs(source: str) -> None:
    whole = epochs_apart(source, 0, 1)
    with StreamLoader(source, **options()) as loader:
        states = [loader.state_dict() for _ in loader]
        assert numbers(loader) == whole[1]
        loader.load_state_dict(states[3])
        assert numbers(loader) == whole[0][40:]
        assert numbers(loader) == whole[1]


def test_every_epoch_is_whole(source: str) -> None:
    with StreamLoader(source, **options(batch_size=7)) as loader:
        for _ in range(12):
            assert sorted(numbers(loader)) == list(range(TOTAL))


def slots_held() -> int:
    """How many slots the trainer or its feeder has a descriptor of."""
    feeder = children("streamload.feeder")[0]
    found = set()
    for process in (os.getpid(), feeder.pid):
        for number in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                seen = os.stat(f"/proc/{process}/fd/{number}")
                if "/memfd:" in os.readlink(f"/proc/{process}/fd/{number}"):
                    found.add(seen.st_ino)
    return len(found)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system does not show descriptors")
def test_memory_of_what_was_not_wanted_is_used_again(tmp_path: Path) -> None:
    """How many slots there are depends on timing; their bound, of those free, lent and in flight, is below 300."""
    noting, total, ahead, turns = Noting(tmp_path / "made"), 50, 30, 12
    source = write_numbers(tmp_path / "few", [total])
    with StreamLoader(source, **options(batch_size=1, transform={"cls": noting}, prefetch_batches=40)) as loader:
        for turn in range(turns):
            made = noting.made() if turn else 0
            for epoch in (10 * turn, 10 * turn + 1):
                loader.set_epoch(epoch)
                list(loader)
            wait_until(
                lambda made=made: noting.made() >= made + 2 * total + ahead
            )  # in vain: the next turn is elsewhere
        assert slots_held() < 300 < ahead * turns


def test_what_is_made_ahead_counts_with_what_is_left_of_the_epoch_before(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made", pause_s=0.003)
    with StreamLoader(
        source, **options(transform={"cls": noting}, collate_fn=list, prefetch_batches=1, num_workers=2)
    ) as loader:
        for number, _ in enumerate(loader, start=1):
            if number == TOTAL // 10 - 5:  # five are left: of those that may be in flight, one is the next epoch's
                wait_until(lambda: noting.made() >= TOTAL)
                time.sleep(0.3)
                assert noting.made() <= TOTAL + 10 * 3


class ByHand:
    """An epoch of one batch that is there at once; `failing` ones cannot be worked on."""

    def __init__(self, start: EpochStart, *, failing: bool) -> None:
        self.start = start
        self.batcher = RowBatcher()
        self.failing = failing
        self.left = [f"batch of {start.epoch}"]
        self.exhausted = False
        self.abandoned = False

    @property
    def ended(self) -> bool:
        return self.exhausted and not self.left

    @property
    def must_wrap(self) -> bool:
        return False

    def pump(self) -> int:
        if self.failing:
            raise ShardNotFoundError("it is gone", url="a.tar")
        self.exhausted = True
        return 0

    def take_ready(self) -> tuple[list[str], int]:
        if not self.exhausted:
            return [], 1
        ready, self.left = self.left, []
        return ready, 1

    def take_result(self, done: object) -> bool:
        return False

    def abandon(self) -> None:
        self.abandoned = True

    def close(self) -> None:
        assert self.ended


class EpochsByHand:
    def __init__(self, failing: set[int]) -> None:
        self.said: list[str] = []
        self.begun: list[ByHand] = []
        self.passes = 0

        def begin(start: EpochStart, _: object) -> Any:
            self.begun.append(ByHand(start, failing=start.epoch in failing))
            return self.begun[-1]

        def send_ready(start: EpochStart, ready: list[Any], last: bool, _: int) -> None:
            self.said += [*ready, "ended"] if last else ready

        self.epochs = Epochs(begin, send_ready, works_ahead=True)

    def run(self, epoch: int) -> None:
        self.passes += 1
        self.epochs.request(EpochStart(epoch, 0, 0, 1, number=self.passes))
        for _ in range(3):
            self.epochs.pump()


def test_what_fails_ahead_is_raised_when_it_is_requested() -> None:
    by_hand = EpochsByHand(failing={1})
    by_hand.run(0)
    assert by_hand.said == ["batch of 0", "ended"]
    with pytest.raises(ShardNotFoundError, match="it is gone"):
        by_hand.run(1)


def test_what_fails_ahead_and_is_not_requested_is_forgotten() -> None:
    by_hand = EpochsByHand(failing={1})
    by_hand.run(0)
    by_hand.run(4)
    assert by_hand.said == ["batch of 0", "ended", "batch of 4", "ended"]
    assert [epoch.start.epoch for epoch in by_hand.begun if epoch.abandoned] == [1]


def test_the_next_epoch_is_announced_after_the_end_of_the_one_before() -> None:
    by_hand = EpochsByHand(failing=set())
    by_hand.run(0)
    assert by_hand.said == ["batch of 0", "ended", "batch of 1"], "which has not been asked for, so it does not end"
    by_hand.run(1)
    assert by_hand.said[3:] == ["ended", "batch of 2"]


@pytest.mark.parametrize("counted", [True, False])
def test_epochs_of_which_all_is_announced_ahead(source: str, counted: bool) -> None:
    """The next epoch's only message is there before the loop asks; what ends it comes only then."""
    with StreamLoader(source, **options(batch_size=60, prefetch_batches=8)) as loader:
        found, feeders = [], set()
        for _ in range(5):
            batches = iter(loader)
            given = [next(batches) for _ in range(TOTAL // 60)] if counted else list(batches)
            found.append([number for batch in given for number in batch[0].tolist()])
            time.sleep(0.05)  # so that the next one is announced whole
            feeders.add(children("streamload.feeder")[0].pid)
    assert found == epochs_apart(source, 0, 1, 2, 3, 4)
    assert len(feeders) == 1, "none was restarted"
