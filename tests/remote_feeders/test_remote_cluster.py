"""How actors are placed on a cluster: by a Ray of the tests' own, which starts none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streamload import RayFeeders
from streamload.environment.ray_cluster import RayCluster, Versions
from streamload.errors import WorkerError
from streamload.remote import cluster
from streamload.remote.actor import Greeting
from streamload.remote.cluster import RayActors

GREETING = Greeting(Versions.here(), "n", ("n", 1), b"", 1, 0.0)


class FakeRay:
    """Makes actors that answer when the test says so.

    Attributes:
        answers: of the actors, in the order in which they were started.
        killed: the numbers of actors that were ended.
    """

    def __init__(self, on_start: Callable[[int], None] = lambda _: None) -> None:
        self.answers: list[asyncio.Future[Greeting]] = []
        self.killed: list[int] = []
        self._on_start = on_start
        self._loop = asyncio.get_running_loop()

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="n:1")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 4.0}}]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def kill(self, handle: Any) -> None:
        self.killed.append(handle.number)

    def _start(self, _arguments: list[str]) -> Any:
        number, answer = len(self.answers), self._loop.create_future()
        self.answers.append(answer)
        self._loop.call_soon_threadsafe(self._on_start, number)
        return SimpleNamespace(number=number, greet=SimpleNamespace(remote=lambda: answer))


async def connected(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> RayActors:
    monkeypatch.setattr(cluster, "connect", lambda *_, **__: RayCluster(ray, "n:1", is_own=False))
    actors = RayActors(RayFeeders(1), answer_s=0.01)
    await actors.connect()
    return actors


async def test_of_two_actors_that_answer_at_once_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_both(number: int) -> None:
        for each in ray.answers if number == 1 else ():
            each.set_result(GREETING)

    ray = FakeRay(answer_both)
    actors = await connected(ray, monkeypatch)
    kept, _ = await actors.place(again=True)
    assert sorted([*ray.killed, kept.handle.number]) == list(range(len(ray.answers))), "there may be a third one by now"


async def test_what_actors_die_of_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        ray.answers[number].set_exception(RuntimeError("no module 'streamload'\nTraceback\n ..."))

    ray = FakeRay(fail)
    actors = await connected(ray, monkeypatch)
    with pytest.raises(WorkerError, match=r"The last one: RuntimeError: no module 'streamload'$"):
        await actors.place()
    assert sorted(ray.killed) == [0, 1, 2]
