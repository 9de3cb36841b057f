"""`async for` over a loader: the event loop goes on while it waits, and to be cancelled loses nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from closed_when_late import ClosedWhenLate
from matrix import exhaustive
from transforms import wait_a_little

from streamload import StreamLoader
from streamload.errors import LoaderClosedError
from streamload.trainer.epoch_iterator import EpochIterator

TOTAL = 60
FEW = pytest.mark.parametrize("workers", [0, exhaustive((1,))])


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A folder with a path that, while nothing is there, holds samples up."""
    return tmp_path / "open"


def make(source: str, workers: int = 1, **options: Any) -> StreamLoader:
    return StreamLoader(source, **{"batch_size": 10, "fields": ("cls",), "num_workers": workers, **options})


def held_up_from(first: int, gate: Path) -> dict[str, Any]:
    """Options for a loader whose samples from number `first` on are not made before `gate` is there."""

    def wait(value: int) -> int:
        time.sleep(0.004)  # so that a task has no more than a batch
        while value >= first and not gate.exists():
            time.sleep(0.005)
        return value

    return {"transform": {"cls": wait}, "prefetch_batches": 1}


async def read(batches: Any) -> list[int]:
    return [number async for batch in batches for number in batch[0].tolist()]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_same_batches_and_epochs_as_in_a_for_loop(source: str, workers: int) -> None:
    async def loop(loader: StreamLoader) -> list[list[int]]:
        return [await read(loader), await read(loader)]

    threads = threading.active_count()
    with make(source, workers, shuffle=True) as loader:
        expected = [[number for batch in loader for number in batch[0].tolist()] for _ in range(4)]
    with make(source, workers, shuffle=True) as loader:
        got = asyncio.run(loop(loader))
        got.append([number for batch in loader for number in batch[0].tolist()])
        got.append(asyncio.run(loop(loader))[0])
        assert threading.active_count() == threads
    assert got == expected, "in one event loop after the other, and in a plain loop between them"


async def test_others_run_while_it_waits(source: str, gate: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1
            if ticks == 20:
                gate.touch()  # without it no batch would ever come

    async with make(source, **held_up_from(0, gate)) as loader:
        ticking = asyncio.create_task(tick())
        assert await read(loader) == list(range(TOTAL))
        assert ticks >= 20
        ticking.cancel()


@FEW
async def test_others_have_a_turn_before_each_batch(source: str, workers: int) -> None:
    turns, seen = 0, []

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with make(source, workers) as loader:
        others = asyncio.create_task(take_turns())
        async for _ in loader:
            seen.append(turns)
        others.cancel()
    assert len(seen) == len(set(seen)) == 6


async def test_cancelled_at_every_moment(source: str) -> None:
    async with make(source, transform=wait_a_little, prefetch_batches=1, batch_size=2) as loader:
        batches, got, cancelled = aiter(loader), [], 0
        while True:
            try:
                got += (await asyncio.wait_for(anext(batches), 0.0002 * (cancelled % 17)))[0].tolist()
            except TimeoutError:
                cancelled += 1
            except StopAsyncIteration:
                break
            assert loader.state_dict()["position"] in (len(got), 0)
        assert got == list(range(TOTAL))
        assert cancelled > 5


async def test_leaving_the_loop_ends_the_pass(source: str) -> None:
    async with make(source) as loader:
        async for _ in loader:
            break
        assert loader.state_dict()["position"] == 10
        assert await read(loader) == list(range(TOTAL)), "the next epoch"
        batches = aiter(loader)
        await anext(batches)
        assert isinstance(batches, EpochIterator)
        await batches.aclose()
        await batches.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        with pytest.raises(ZeroDivisionError):
            async for _ in loader:
                1 / 0
    gc.collect()


@pytest.mark.parametrize("how", ["aclose", "another pass", exhaustive(("close",))])
async def test_who_waits_is_woken_when_the_pass_is_ended_elsewhere(source: str, gate: Path, how: str) -> None:
    async with make(source, **held_up_from(0, gate)) as loader:
        batches = aiter(loader)
        waiting = asyncio.create_task(anext(batches))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        following = None
        if how == "close":
            loader.close()
        elif how == "aclose":
            await loader.aclose()
        else:
            following = aiter(loader)
        with pytest.raises(LoaderClosedError):
            await waiting
        gate.touch()
        if following is not None:
            assert await read(following) == list(range(TOTAL))


@pytest.mark.exhaustive
async def test_what_a_batch_waits_for_is_logged(source: str, gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make(source, **held_up_from(10, gate)) as loader:
        batches = aiter(loader)
        await anext(batches)
        with ClosedWhenLate(loader, monkeypatch, 0.3) as log, pytest.raises(LoaderClosedError):
            await anext(batches)
    assert "is at work, decoding or transforming" in log.message
