"""Places a loader's feeders on a Ray cluster as actors, and says why one cannot be placed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from streamload.arguments import parse_bytes
from streamload.decode.failure import Attempt, first_line
from streamload.environment.launch import program_arguments
from streamload.environment.ray_cluster import RayCluster, Versions, connect
from streamload.errors import ClusterError, StreamloadError, WorkerError
from streamload.ray_feeders import RayFeeders
from streamload.remote.actor import FeederActor, Greeting

__all__ = ["Cluster", "PlacedActor", "RayActors"]

_MOST_ATTEMPTS = 3
"""How many actors may be started in the place of one."""


class PlacedActor(Protocol):
    """An actor, seen from the relay."""

    async def serve(self) -> None:
        """Have it serve whoever connects to it; this ends, or raises why, when it does."""


class Cluster(Protocol):
    """Where actors are placed."""

    async def connect(self) -> None:
        """Connect to it.

        Raises:
            ClusterError: it cannot be used, or its nodes have not what the feeders claim.
        """

    async def place(self, *, relaxed: bool = False, again: bool = False) -> tuple[PlacedActor, Greeting]:
        """Start an actor on some node; returns it and what it says.

        Args:
            relaxed: it claims nothing, so any node will do.
            again: one has died a moment ago.

        Raises:
            ClusterError: it was not placed in time, or its node has other versions.
            WorkerError: it died, and so did those that were tried in its place.
        """

    def end(self, actor: Any) -> None:
        """Kill an actor, and what it has started with it. Idempotent."""

    def close(self) -> None:
        """Kill all actors."""


class RayActor:
    """An actor of Ray's.

    Args:
        handle: Ray's.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def serve(self) -> None:
        """See `PlacedActor`."""
        await self.handle.serve.remote()


class RayActors:
    """Actors on a Ray cluster, as this process is connected to it; see `Cluster`.

    Args:
        feeders: what the user wants.
        answer_s: how long an actor in the place of a dead one may take to answer before another is started beside it.
    """

    def __init__(self, feeders: RayFeeders, *, answer_s: float = 4.0) -> None:
        self._feeders, self._answer_s = feeders, answer_s
        self._actors: list[RayActor] = []
        self._connected: RayCluster | None = None

    @property
    def _cluster(self) -> RayCluster:
        assert self._connected is not None, "connect comes first"
        return self._connected

    async def connect(self) -> None:
        """Connect, as the driver of a job of its own. Ray's calls block, so they are made on a thread."""
        feeders = self._feeders
        joining = asyncio.to_thread(connect, feeders.address, runtime_env=feeders.runtime_env)
        where = f"connecting to the Ray cluster (address={feeders.address!r}) took longer"
        self._connected = await self._within(joining, lambda: where)
        await asyncio.to_thread(self._cluster.require, feeders.demands, feeders.number, "feeders")

    async def place(self, *, relaxed: bool = False, again: bool = False) -> tuple[RayActor, Greeting]:
        """See `Cluster`. Where the one before has died, its node may have too, and Ray takes a while to find out, in
        which it still places actors there: so another one is started beside one that does not answer soon.
        """
        if not relaxed:
            await asyncio.to_thread(self._cluster.require, self._feeders.demands)
        starting = self._first_to_answer(relaxed, self._answer_s if again else None)
        placed: tuple[RayActor, Greeting] = await self._within(starting, self._too_late)
        return placed

    async def _first_to_answer(self, relaxed: bool, answer_s: float | None) -> tuple[RayActor, Greeting]:
        attempts: list[asyncio.Task[tuple[RayActor, Greeting]]] = []
        try:
            while True:
                attempts.append(asyncio.create_task(self._start(relaxed)))
                has_another = len(attempts) < _MOST_ATTEMPTS
                while True:
                    waited = [attempt for attempt in attempts if not attempt.done()]
                    timeout_s = answer_s if has_another else None
                    done, _ = await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    good = next((attempt for attempt in done if attempt.exception() is None), None)
                    if good is not None:
                        attempts.remove(good)
                        return good.result()
                    if has_another:
                        break
                    if len(done) == len(waited):
                        raise _cannot_start(done.pop().exception())
        finally:
            for attempt in attempts:
                attempt.cancel()
            for late in await asyncio.gather(*attempts, return_exceptions=True):
                if not isinstance(late, BaseException):  # it answered at the same moment, and claims its node
                    self.end(late[0])

    async def _start(self, relaxed: bool) -> tuple[RayActor, Greeting]:
        """Start an actor, and wait for its greeting; one that gives none is killed."""
        feeders = self._feeders
        claims: dict[str, Any] = {"num_cpus": 0}
        if not relaxed:
            claims = {"num_cpus": feeders.num_cpus, "resources": dict(feeders.resources or {})}
            if feeders.memory is not None:
                claims["memory"] = parse_bytes("memory", feeders.memory)
        kind: Any = self._cluster.ray.remote(FeederActor)
        wanted = kind.options(scheduling_strategy="SPREAD", max_restarts=0, **claims)
        starting = asyncio.create_task(asyncio.to_thread(lambda: RayActor(wanted.remote(program_arguments()))))
        try:
            actor = await asyncio.shield(starting)
            self._actors.append(actor)
        except asyncio.CancelledError:  # another one has answered, and this one is there all the same
            self._actors.append(await starting)
            self.end(starting.result())
            raise
        try:
            greeting: Greeting = await actor.handle.greet.remote()
            Versions.here().check(greeting.versions, greeting.node)
        except BaseException:
            self.end(actor)
            raise
        return actor, greeting

    async def _within(self, coroutine: Any, what: Callable[[], str]) -> Any:
        try:
            return await asyncio.wait_for(coroutine, self._feeders.start_timeout)
        except TimeoutError:
            raise ClusterError(
                f"{what()} than start_timeout={self._feeders.start_timeout} s; `ray status` shows what the cluster does"
            ) from None

    def _too_late(self) -> str:
        demands = self._feeders.demands
        claims = ", ".join(f"{amount:,g} {name}" for name, amount in demands.items())
        return (
            f"a feeder that claims {claims} was not placed on the Ray cluster: {self._cluster.free(demands)} are "
            "free there. Ask for fewer or smaller feeders, or end what uses the rest; it took longer"
        )

    def end(self, actor: RayActor) -> None:
        """See `Cluster`."""
        if actor in self._actors:
            self._actors.remove(actor)
            with Attempt():  # the cluster may be gone
                self._cluster.ray.kill(actor.handle)

    def close(self) -> None:
        """See `Cluster`; the connection ends with this process."""
        for actor in list(self._actors):
            self.end(actor)


def _cannot_start(error: BaseException | None) -> StreamloadError:
    if isinstance(error, ClusterError):
        return error
    why = "" if error is None else first_line(error)
    failed = WorkerError(
        f"actors with feeders do not start on the Ray cluster, where {_MOST_ATTEMPTS} were tried; is streamload "
        f"installed on all of its nodes, or named in runtime_env=? The last one: {why}"
    )
    failed.__cause__ = error
    return failed
