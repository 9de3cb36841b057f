"""The loop that turns while its owner waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from streamload.trainer.loop_thread import LoopThread


async def nothing() -> None:
    return None


def test_what_is_called_runs_in_the_loop_and_only_during_turns() -> None:
    loop = LoopThread()
    ran: list[str] = []
    loop.call(lambda: ran.append(threading.current_thread().name))
    assert ran == []
    loop.turn(10)
    assert ran
    assert ran[0].startswith("streamload-fetch")
    loop.close(nothing())


async def test_a_turn_ends_with_what_a_task_has_called_and_works_inside_a_running_loop() -> None:
    loop = LoopThread()
    heard: list[int] = []

    async def later() -> None:
        await asyncio.sleep(0.01)
        loop.call(lambda: heard.append(1))

    tasks: list[asyncio.Task[None]] = []
    loop.call(lambda: tasks.append(asyncio.get_running_loop().create_task(later())))

    while not heard:
        loop.turn(10)
    assert heard == [1]
    loop.close(nothing())


def test_a_turn_in_which_nothing_happens_ends_in_time() -> None:
    loop = LoopThread()
    with pytest.raises(TimeoutError):
        loop.turn(0.01)
    loop.close(nothing())


def test_no_time_passes_in_the_loop_between_turns() -> None:
    """What has come while the owner was busy elsewhere, at a breakpoint perhaps, has not come too late."""
    loop = LoopThread()
    came = asyncio.Event()
    ended: list[str] = []

    async def wait_for_it() -> None:
        try:
            async with asyncio.timeout(0.2):
                await came.wait()
            ended.append("in time")
        except TimeoutError:
            ended.append("too late")
        loop.call(lambda: None)

    tasks: list[asyncio.Task[None]] = []
    loop.call(lambda: tasks.append(asyncio.get_running_loop().create_task(wait_for_it())))
    loop.turn(10)
    time.sleep(0.4)
    loop.call(came.set)
    while not ended:
        loop.turn(10)
    assert ended == ["in time"]
    loop.close(nothing())
