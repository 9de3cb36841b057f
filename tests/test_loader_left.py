"""A pass that is left, closed or dropped: it behaves as Python's iterators do, and its processes stay for the next."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from matrix import exhaustive
from preloaded import Preloaded
from processes import children, wait_until
from transforms import Noting, as_list, raise_on_33

from streamload import StreamLoader
from streamload.errors import LoaderClosedError
from streamload.memory.channel import Channel

TOTAL = 60


def make(source: str, workers: int = 1, **options: Any) -> StreamLoader:
    common = {"batch_size": 10, "shuffle": 20, "fields": ("cls",), "num_workers": workers}
    return StreamLoader(source, **{**common, **options})


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch[0].tolist()]


@pytest.fixture(scope="module")
def epochs(source: str) -> list[list[int]]:
    """The order of the first epochs."""
    with make(source, 0) as loader:
        return [numbers(loader) for _ in range(8)]


def pids() -> set[int]:
    return {child.pid for child in children()}


# -- as Python's iterators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_an_iterator_is_closed_as_a_generator_is(source: str, epochs: list[list[int]], workers: int) -> None:
    def delegating(loader: StreamLoader) -> Iterator[Any]:
        yield from loader

    with make(source, workers) as loader:
        generator = delegating(loader)
        assert next(generator)[0].tolist() == epochs[0][:10]
        generator.close()
        with contextlib.closing(iter(loader)) as batches:
            assert next(batches)[0].tolist() == epochs[1][:10]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(batches)
            batches.close()
        assert loader.state_dict()["position"] == 10
        assert numbers(delegating(loader)) == epochs[2]
        exhausted = iter(loader)
        assert numbers(exhausted) == epochs[3]
        exhausted.close()
        assert numbers(loader) == epochs[4]


def test_what_ends_a_pass_from_outside_is_still_an_error_of_it(source: str) -> None:
    with make(source, 0) as loader:
        older = iter(loader)
        next(older)
        last = iter(loader)
        with pytest.raises(LoaderClosedError, match="another pass"):
            next(older)
        older.close()
        with pytest.raises(LoaderClosedError, match="another pass"):
            next(older)
    with pytest.raises(LoaderClosedError, match="the loader was closed"):
        next(last)


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_resume_continues_the_epoch_after_a_break(source: str, epochs: list[list[int]], workers: int) -> None:
    with make(source, workers) as loader:
        for (labels,) in loader:
            assert labels.tolist() == epochs[0][:10]
            break
        loader.resume()
        assert numbers(loader) == epochs[0][10:]
        assert numbers(loader) == epochs[1]
        loader.resume()
        assert numbers(loader) == epochs[2], "nothing was left"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_after_the_last_batch_is_the_same_at_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    unindexed = write_numbers(tmp_path / "shards", [30], index=False)
    with make(unindexed, workers) as loader:
        assert len(list(itertools.islice(loader, 3))) == 3
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (0, 30)
        assert len(list(loader)) == 3
        assert len(loader) == 3
        assert len(list(itertools.islice(loader, 3))) == 3
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (3, 0), "the pass before has counted"


AT_EXIT = """
import sys, threading, time
from streamload import StreamLoader

def begun(workers=0, **options):
    batches = iter(StreamLoader(sys.argv[1], 10, fields=("cls",), num_workers=workers, **options))
    next(batches)
    return batches

def delegating():
    yield from begun()

def looping():
    for batch in begun():
        yield batch

in_global = begun(1)
cycle = [begun()]
cycle.append(cycle)
first, second = delegating(), looping()
next(first), next(second)
waiting = threading.Event()

def in_thread():
    batches = begun()
    waiting.set()
    threading.Event().wait()

def blocked():
    batches = begun(1, transform={"cls": lambda label: time.sleep(600) if label == 10 else label})
    waiting.set()
    next(batches)

for function in (in_thread, blocked):
    waiting.clear()
    threading.Thread(target=function, daemon=True).start()
    waiting.wait()
time.sleep(0.1)
del cycle
"""


@pytest.mark.exhaustive
def test_iterators_that_are_held_when_the_program_ends(preloaded: Preloaded, source: str) -> None:
    """In a global, a cycle, generators' frames, and another thread. What they leave behind, every test looks for."""
    ended = preloaded.run(AT_EXIT, source)
    assert (ended.status, ended.output) == (0, "")


# -- what stays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"collate_fn": as_list}, {"workers": 0}])
def test_a_pass_left_anywhere_is_followed_by_the_next_on_its_processes(
    source: str, epochs: list[list[int]], options: dict[str, Any]
) -> None:
    started: set[int] = set()
    with make(source, **options) as loader:
        for epoch, count in enumerate([1, 5, 3, 6, 2]):
            batches = iter(loader)
            got = [next(batches) for _ in range(count)]
            flat = [sample[0] for batch in got for sample in batch] if "collate_fn" in options else numbers(got)
            assert flat == epochs[epoch][: 10 * count]
            started |= pids()
            del batches
        loader.set_epoch(1)
        for _ in range(3):  # the same one again: batches of the pass before are not taken for those of this one
            loader.set_epoch(1)
            batch = next(iter(loader))
            assert ([sample[0] for sample in batch] if "collate_fn" in options else numbers([batch])) == epochs[1][:10]
        assert pids() == started


def test_a_pass_that_an_error_in_the_loop_keeps_alive_is_ended_by_the_next(
    source: str, epochs: list[list[int]]
) -> None:
    with make(source) as loader:
        try:
            for _ in loader:
                raise KeyError("the user's own")
        except KeyError as error:
            kept = error  # with its traceback, and so with the iterator
        started = pids()
        assert numbers(loader) == epochs[1]
        assert pids() == started
        assert kept.__traceback__ is not None
        del kept


def test_no_more_is_made_for_a_pass_that_was_left(source: str, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "made", pause_s=0.002)
    with make(source, transform={"cls": noting}, prefetch_batches=4) as loader:
        loader.set_epoch(0)
        next(iter(loader))
        made = -1
        while made != (made := noting.made()):  # tasks are in flight
            time.sleep(0.3)
        assert made < TOTAL
        assert sorted(numbers(loader)) == list(range(TOTAL))


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_a_bad_sample_of_an_epoch_that_was_left_is_not_the_next_ones(source: str, workers: int) -> None:
    with make(source, workers, shuffle=False, transform={"cls": raise_on_33}, on_error="skip") as loader:
        for _ in range(3):
            next(iter(loader))
        assert loader.skipped == []
        assert len(numbers(loader)) == TOTAL - 1


def test_a_hanging_transform_holds_up_neither_leaving_nor_the_next_pass(source: str, tmp_path: Path) -> None:
    flag = tmp_path / "hung"

    def hang_once(value: int) -> int:
        if value >= 10 and not flag.exists():
            flag.touch()
            time.sleep(1000)
        return value

    with make(source, shuffle=False, transform={"cls": hang_once}) as loader:
        for _ in loader:
            assert wait_until(flag.exists)
            break
        feeder = {child.pid for child in children("streamload.feeder")}
        assert numbers(loader) == list(range(TOTAL))
        assert {child.pid for child in children("streamload.feeder")} == feeder
        assert loader.statistics().restarted_workers == 0, "none has died"


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_one_thread_at_a_time_uses_a_loader(tmp_path: Path, workers: int) -> None:
    """A second one is refused, and the first goes on."""
    unindexed, flag, got = write_numbers(tmp_path / "shards", [25, 35], index=False), tmp_path / "go on", list[int]()

    def wait_for_flag(value: int) -> int:
        while not flag.exists():
            time.sleep(0.005)
        return value

    with make(unindexed, workers, transform={"cls": wait_for_flag}) as loader:
        batches = iter(loader)
        waiting = threading.Thread(target=lambda: got.extend(numbers(batches)))
        waiting.start()
        time.sleep(0.1)
        for use in (lambda: next(batches), lambda: iter(loader), lambda: len(loader)):
            with pytest.raises(RuntimeError, match="another thread uses this loader"):
                use()
        flag.touch()
        waiting.join()
        assert len(loader) == 6
    assert sorted(got) == list(range(TOTAL))


def test_a_pass_that_is_found_to_be_garbage_while_something_is_sent(
    source: str, epochs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Channel.send_all

    def send_all(channel: Channel, messages: Any) -> None:
        gc.collect(1)  # the cycle is young, and all that other tests have left need not be looked at
        real(channel, messages)

    monkeypatch.setattr(Channel, "send_all", send_all)
    with make(source) as loader:
        for epoch in range(3):
            cycle: list[Any] = [iter(loader)]
            cycle.append(cycle)
            assert next(cycle[0])[0].tolist() == epochs[epoch][:10]
            del cycle
            assert len(loader) == TOTAL // 10
        assert numbers(loader) == epochs[3]
