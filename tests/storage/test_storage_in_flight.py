"""What obstore's threads still hold on to is waited for, and only that."""

from __future__ import annotations

import asyncio
import threading

from streamload.storage.object_storage import InFlight


async def held_elsewhere(in_flight: InFlight, let_go: threading.Event) -> threading.Thread:
    """An answer that was cancelled, and that another thread holds until it is told to let go."""
    answer: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future()]
    in_flight.add(answer[0])
    answer[0].cancel()

    def hold() -> None:
        let_go.wait()
        answer.clear()

    thread = threading.Thread(target=hold)
    thread.start()
    return thread


async def test_an_answer_that_a_thread_holds_is_waited_for() -> None:
    async def main() -> tuple[bool, bool]:
        in_flight, let_go = InFlight(lambda: None), threading.Event()
        thread = await held_elsewhere(in_flight, let_go)
        over = asyncio.create_task(in_flight.wait_until_empty())
        await asyncio.sleep(0.05)
        before = over.done()
        let_go.set()
        await over
        thread.join()
        return before, over.done()

    assert await main() == (False, True)


async def test_an_answer_that_is_kept_for_ever_does_not_hold_up_the_end() -> None:
    in_flight, let_go = InFlight(lambda: None), threading.Event()
    thread = await held_elsewhere(in_flight, let_go)
    await asyncio.wait_for(in_flight.wait_until_empty(), 10)
    let_go.set()
    thread.join()


async def test_what_is_freed_with_a_call_only_is_freed() -> None:
    kept: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future()]
    in_flight = InFlight(kept.clear)
    in_flight.add(kept[0])
    await asyncio.wait_for(in_flight.wait_until_empty(), 0.5)


async def test_what_has_come_is_not_waited_for() -> None:
    in_flight = InFlight(lambda: None)
    for number in range(3):
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        answer.set_result(number)
        assert await in_flight.add(answer) == number
    del answer
    await asyncio.wait_for(in_flight.wait_until_empty(), 0.5)
