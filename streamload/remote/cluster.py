"""The Ray cluster of a loader's feeders: connecting to it, placing actors, and saying why one cannot be placed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from streamload.arguments import parse_bytes
from streamload.decode.failure import Attempt, in_words
from streamload.errors import WorkerError
from streamload.ray_feeders import RayFeeders
from streamload.remote.actor import FeederActor, Greeting, versions

__all__ = ["Cluster", "PlacedActor", "RayCluster"]


_ANSWER_S = 4.0
_MOST_ATTEMPTS = 3
"""How long an actor may take to answer before another one is started beside it, and how many may be started."""


class PlacedActor(Protocol):
    """An actor, seen from the relay."""

    async def serve(self) -> None:
        """Have it serve whoever connects to it; this ends, or raises why, when it does."""


class Cluster(Protocol):
    """Where actors are placed."""

    async def connect(self) -> None:
        """Connect to it.

        Raises:
            WorkerError: it cannot be used.
        """

    async def place(self, *, relaxed: bool = False, again: bool = False) -> tuple[PlacedActor, Greeting]:
        """Start an actor on some node; returns it and what it says.

        Args:
            relaxed: it claims nothing, so any node will do.
            again: one has died a moment ago.

        Raises:
            WorkerError: it was not placed in time, or runs other versions.
            Exception: it died.
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


class RayCluster:
    """Ray, as this process is connected to it; see `Cluster`.

    Args:
        feeders: what the user wants.
    """

    def __init__(self, feeders: RayFeeders) -> None:
        self._feeders = feeders
        self._actors: list[RayActor] = []

    async def connect(self) -> None:
        """Connect, as the driver of a job of its own. Ray's calls block, so they are made on a thread."""
        await self._within(asyncio.to_thread(self._join), lambda: "connecting to the Ray cluster took longer")
        await asyncio.to_thread(self._check_resources, self._feeders.number)

    def _join(self) -> None:
        import ray

        logging.getLogger("ray").setLevel(
            logging.ERROR
        )  # it says how it connects, with a warning that it is on a thread
        options: dict[str, Any] = {"address": self._feeders.address, "log_to_driver": False}
        if self._feeders.runtime_env is not None:
            options["runtime_env"] = dict(self._feeders.runtime_env)
        with Attempt() as attempt:
            ray.init(**options, configure_logging=False, include_dashboard=False)
        if attempt.error is None:
            return
        if "ersion mismatch" in str(attempt.error):
            raise WorkerError(
                f"the Ray cluster has other versions than this process: {attempt.error}; install the same Python and "
                "the same Ray on all nodes"
            ) from attempt.error
        raise WorkerError(
            f"no Ray cluster is found at address={self._feeders.address!r} ({in_words(attempt.error)}); start one with "
            "`ray start --head`, and have this machine join it with `ray start --address=HOST:PORT`"
        ) from attempt.error

    def _check_resources(self, number: int) -> None:
        """Refuse what no node, or all of them together, can have, without waiting for it.

        Raises:
            WorkerError: there is too little, even when nobody else uses it.
        """
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        missing = missing_resources(nodes, self._feeders.demands, number)
        if missing:
            raise WorkerError(missing)

    async def place(self, *, relaxed: bool = False, again: bool = False) -> tuple[RayActor, Greeting]:
        """See `Cluster`. Where the one before has died, its node may have too, and Ray takes a while to find out, in
        which it still places actors there: so another one is started beside one that does not answer soon.
        """
        if not relaxed:
            await asyncio.to_thread(self._check_resources, 1)
        starting = self._first_to_answer(relaxed, _ANSWER_S if again else None)
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
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _start(self, relaxed: bool) -> tuple[RayActor, Greeting]:
        """Start an actor, and wait for its greeting; one that gives none is killed."""
        import ray

        feeders = self._feeders
        claims: dict[str, Any] = {"num_cpus": 0}
        if not relaxed:
            claims = {"num_cpus": feeders.num_cpus, "resources": dict(feeders.resources or {})}
            if feeders.memory is not None:
                claims["memory"] = parse_bytes("memory", feeders.memory)
        kind: Any = ray.remote(FeederActor)
        wanted = kind.options(scheduling_strategy="SPREAD", max_restarts=0, **claims)
        actor = RayActor(await asyncio.to_thread(wanted.remote))
        self._actors.append(actor)
        try:
            greeting: Greeting = await actor.handle.greet.remote()
            check_versions(greeting)
        except BaseException:
            self.end(actor)
            raise
        return actor, greeting

    async def _within(self, coroutine: Any, what: Callable[[], str]) -> Any:
        try:
            return await asyncio.wait_for(coroutine, self._feeders.start_timeout)
        except TimeoutError:
            raise WorkerError(
                f"{what()} than start_timeout={self._feeders.start_timeout} s; `ray status` shows what the cluster does"
            ) from None

    def _too_late(self) -> str:
        import ray

        free, demands = ray.available_resources(), self._feeders.demands
        return (
            f"a feeder that claims {_listed(demands)} was not placed on the Ray cluster: {_listed(free, demands)} are "
            "free there. Ask for fewer or smaller feeders, or end what uses the rest; it took longer"
        )

    def end(self, actor: RayActor) -> None:
        """See `Cluster`."""
        import ray

        if actor in self._actors:
            self._actors.remove(actor)
            with Attempt():  # the cluster may be gone
                ray.kill(actor.handle)

    def close(self) -> None:
        """See `Cluster`; the connection ends with this process."""
        for actor in list(self._actors):
            self.end(actor)


def _cannot_start(error: BaseException | None) -> WorkerError:
    if isinstance(error, WorkerError):
        return error
    failed = WorkerError(
        f"actors with feeders do not start on the Ray cluster, where {_MOST_ATTEMPTS} were tried; is streamload "
        f"installed on all of its nodes, or named in runtime_env=? The last one: {error}"
    )
    failed.__cause__ = error
    return failed


def missing_resources(nodes: Sequence[Mapping[str, float]], demands: Mapping[str, float], number: int) -> str:
    """Why so many feeders with these demands cannot be placed, or an empty string.

    Args:
        nodes: what each of them has in all, by Ray's names.
        demands: of one feeder.
        number: of feeders.
    """
    fit = sum(
        min((int(node.get(name, 0.0) // demand) for name, demand in demands.items() if demand), default=number)
        for node in nodes
    )
    if fit >= number:
        return ""
    have = "; ".join(_listed(node, demands) for node in nodes)
    return (
        f"feeders=RayFeeders({number}) claims {_listed(demands)} for each, and the nodes of the Ray cluster have place "
        f"for {fit}: they have {have}. Ask for fewer or smaller feeders, or add nodes"
    )


def _listed(amounts: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):,g} {name}" for name in (amounts if names is None else names))


def check_versions(greeting: Greeting) -> None:
    """Refuse an actor that runs other versions than this process.

    Raises:
        WorkerError: with all that differs.
    """
    ours = versions()
    differ = [
        f"{name} {greeting.versions.get(name)} there and {version} here"
        for name, version in ours.items()
        if greeting.versions.get(name) != version
    ]
    if differ:
        raise WorkerError(
            f"the node {greeting.node} of the Ray cluster has other versions: {', '.join(differ)}; "
            "install the same on all nodes, or name them in runtime_env="
        )
