"""Run a trainer's feeders in actors of a Ray cluster, and take their batches in turn. Only `connect` imports Ray."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from time import monotonic
from typing import Any

from streamload.decode.failure import Attempt, first_line
from streamload.errors import ClusterError, WorkerError
from streamload.feeder.messages import Acknowledge, Configure, Failed, Ready, ReadyBatch
from streamload.fetch.budget import default_budget
from streamload.log_records import set_log_levels
from streamload.memory.channel import Message
from streamload.memory.mapped import Bytes
from streamload.memory.slots import SlotPool, round_up
from streamload.memory.unnamed import write_fully
from streamload.options import RayFeeders, is_host_and_port
from streamload.order.share import EpochStart, Share
from streamload.totals import Totals
from streamload.trainer.connection import Connection, start_feeder_process
from streamload.workers.launch import program_arguments
from streamload.workers.launchers import available_processors

_CONNECT_TIMEOUT_S = 10.0
# Number of calls of `FeederActor.next` queued in each actor, so that it need not wait for the trainer.
_CALLS_AHEAD = 2
_INSTALL = 'pip install "streamload[ray]"'
_NONE_RUNS = (
    "no Ray cluster runs on this machine, and RAY_ADDRESS names none; start one with `ray start --head`, join this "
    "machine to one with `ray start --address HOST:PORT`, or give the address"
)
_log = logging.getLogger("streamload")


class RayChannel:
    """Start feeders in actors of a Ray cluster, and receive their batches in order.

    It has the methods of `InProcessChannel`.

    Raises:
        ClusterError: the cluster does not exist or lacks room, or a feeder does not start or has another version.
    """

    def __init__(self, feeders: RayFeeders, configure: Configure, *, budget_is_automatic: bool) -> None:
        self._options = feeders
        program: Program = (program_arguments(), sys.path, os.getcwd())
        self._start_arguments = program, pickle.dumps(configure), feeders.num_cpus, budget_is_automatic
        self._feeders = [_Feeder(number) for number in range(feeders.number)]
        self._start: EpochStart | None = None
        self._turn = self._position = 0
        self._slots = SlotPool()
        self._totals_of_dead = Totals()
        self._cluster = connect(feeders.address, runtime_env=feeders.runtime_env)
        self._cluster.require(feeders.demands, feeders.number, "feeders")
        try:
            self._place(self._feeders)
        except BaseException:
            self.close()
            raise

    def close(self, *, ends: bool = True) -> None:  # noqa: ARG002
        """End the feeders. Idempotent."""
        for feeder in self._feeders:
            self._end(feeder)
        self._slots.close()

    # -- the trainer -----------------------------------------------------------------------------------------------

    def send_all(self, messages: Sequence[Any]) -> None:
        """Begin a pass, or record the slots that the trainer has released; ignore other messages."""
        for message in messages:
            if isinstance(message, Acknowledge):
                self._slots.record_taken(message.batches)
                self._slots.record_released(message.released)
            if isinstance(message, EpochStart):
                self._start, self._turn, self._position = message, 0, message.position
                for feeder in self._feeders:
                    self._begin(feeder)

    def receive_now(self) -> Message | None:
        """Return the next message if it has arrived, else None."""
        while (feeder := self._needed()) is not None:
            if not self._cluster.ray.wait([feeder.calls[0]], timeout=0)[0]:
                return None
            self._fetch(feeder, None)
        return self._message()

    def receive(self, timeout_s: float | None) -> Message:
        """Wait for the next message."""
        deadline_s = None if timeout_s is None else monotonic() + timeout_s
        while (feeder := self._needed()) is not None:
            self._fetch(feeder, None if deadline_s is None else max(0.0, deadline_s - monotonic()))
        return self._message()

    def wait_reason(self) -> str:
        """Name the feeder that the next batch waits for."""
        number, count = self._turn % len(self._feeders), len(self._feeders)
        return f"feeder {number} of {count} on the Ray cluster has not returned its next batch"

    # -- batches ---------------------------------------------------------------------------------------------------

    def _needed(self) -> _Feeder | None:
        """Return the feeder that the next message waits for, if any."""
        feeder = self._feeders[self._turn % len(self._feeders)]
        return None if feeder.batches or feeder.failed is not None or feeder.ended else feeder

    def _message(self) -> Message:
        """Return the next message. `_needed` must have returned None."""
        assert self._start is not None
        feeder = self._feeders[self._turn % len(self._feeders)]
        if feeder.batches:
            batch, memory = feeder.batches.popleft()
            self._turn, self._position = self._turn + 1, batch.end
            return self._ready([(batch, memory)], last=False)
        if feeder.failed is not None:
            return feeder.failed._replace(start=self._start.identity), []
        return self._ready((), last=True)

    def _ready(self, batches: Iterable[tuple[ReadyBatch, Bytes]], *, last: bool) -> Message:
        """Return a message with batches, each copied to a slot, since Ray's objects are read-only."""
        assert self._start is not None
        ready, opened, descriptors = [], [], []
        for batch, memory in batches:
            slot = self._slots.take()
            descriptor = self._slots.descriptors[slot]
            if os.fstat(descriptor).st_size < len(memory):
                os.ftruncate(descriptor, round_up(len(memory)))
            write_fully(descriptor, memory.data, 0)
            if self._slots.announce(slot, len(memory)):
                opened.append(slot)
                descriptors.append(os.dup(descriptor))
            ready.append(batch._replace(slot=slot))
        retired = tuple(self._slots.take_retired())
        totals = Totals(self._totals_of_dead)
        for feeder in self._feeders:
            totals.add(feeder.totals)
        return Ready(self._start.identity, tuple(ready), tuple(opened), retired, last, 1, totals), descriptors

    def _fetch(self, feeder: _Feeder, timeout_s: float | None) -> None:
        """Wait for the next batches of a feeder; replace it if it has died."""
        exceptions = self._cluster.ray.exceptions
        try:
            returned = self._cluster.ray.get(feeder.calls[0], timeout=timeout_s)
        except exceptions.GetTimeoutError:
            raise TimeoutError from None
        except exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # set if a method of the actor has raised
            if isinstance(cause, Exception) and not isinstance(cause, WorkerError):
                raise cause from None
            self._replace(feeder, error)
            return
        feeder.calls.popleft()
        feeder.died = False
        if returned is None:
            feeder.ended = True
            return
        message, memory = returned
        if isinstance(message, Failed):
            feeder.failed, feeder.ended = message, True
            return
        feeder.batches += zip(message.batches, memory, strict=True)
        feeder.totals, feeder.ended = message.totals or feeder.totals, message.last
        feeder.calls.append(feeder.actor.next.remote())

    # -- feeders ---------------------------------------------------------------------------------------------------

    def _begin(self, feeder: _Feeder) -> None:
        """Request a feeder's batches from the next turn on."""
        assert self._start is not None
        count = len(self._feeders)
        share = Share((feeder.number - self._turn) % count, count)
        feeder.batches.clear()
        feeder.failed, feeder.ended = None, False
        feeder.actor.begin.remote(replace(self._start, position=self._position, share=share))
        feeder.calls = deque(feeder.actor.next.remote() for _ in range(_CALLS_AHEAD))

    def _replace(self, feeder: _Feeder, error: Exception) -> None:
        """Replace a dead feeder with one that continues at the same batch."""
        why = first_line(error)
        if feeder.died:
            raise WorkerError(
                f"feeder {feeder.number} of {len(self._feeders)} on the Ray cluster died twice without a batch in "
                f"between; if memory runs out, lower memory_budget or num_cpus. The second cause: {why}"
            ) from error
        _log.warning("feeder %d on the Ray cluster died (%s); another one takes its place", feeder.number, why)
        self._totals_of_dead.add(feeder.totals)
        self._totals_of_dead["restarted_workers"] += 1
        feeder.totals, feeder.died = Totals(), True
        self._end(feeder)
        self._place([feeder])
        self._begin(feeder)

    def _place(self, feeders: Sequence[_Feeder]) -> None:
        """Start the actors of feeders, and wait for them.

        Raises:
            ClusterError: an actor does not start, or not in time, or has another version of streamload.
        """
        ray, options = self._cluster.ray, self._options
        resources = options.demands
        cpus, memory = resources.pop("CPU"), resources.pop("memory", None)
        actor_class = ray.remote(FeederActor).options(
            scheduling_strategy="SPREAD", max_restarts=0, num_cpus=cpus, memory=memory, resources=resources
        )
        for feeder in feeders:
            feeder.actor = actor_class.remote()
        started = [feeder.actor.start.remote(own_version(), *self._start_arguments) for feeder in feeders]
        try:
            for version in ray.get(started, timeout=options.start_timeout):
                check_version(version, "of a feeder", own_version())
        except ray.exceptions.GetTimeoutError:
            all_free = ray.available_resources()
            free = listed_amounts({name: all_free.get(name, 0) for name in options.demands})
            raise ClusterError(
                f"the feeders did not start on the Ray cluster within start_timeout={options.start_timeout} s: "
                f"{free} are free there; ask for fewer or smaller feeders, or raise start_timeout"
            ) from None
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"a feeder did not start on the Ray cluster: {first_line(error)}; install streamload on all "
                "nodes, or name it in runtime_env="
            ) from error

    def _end(self, feeder: _Feeder) -> None:
        actor, feeder.actor = feeder.actor, None
        if actor is not None:
            with Attempt():  # the cluster may be gone
                self._cluster.ray.kill(actor)


@dataclass(slots=True, eq=False)
class _Feeder:
    """Feeder `number` of k, which makes every k-th batch of a pass, from batch `number` on.

    Attributes:
        calls: Ray's references to the results of the queued calls of `FeederActor.next`.
        batches: batches that have arrived, with their memory.
        failed: the failure after which no more batches come.
        ended: no more batches of the pass come from it.
        totals: the actor's statistics so far.
        died: the actor died and was replaced, and the new actor has not answered yet.
    """

    number: int
    actor: Any = None
    calls: deque[Any] = field(default_factory=deque)
    batches: deque[tuple[ReadyBatch, Bytes]] = field(default_factory=deque)
    failed: Failed | None = None
    ended: bool = True
    totals: Totals = field(default_factory=Totals)
    died: bool = False


class FeederActor:
    """Run a feeder process for a share of a trainer's batches. Ray calls one method at a time."""

    def __init__(self) -> None:
        # Ray lets numerical libraries use a thread per processor of the actor, but each worker should use one.
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        self._feeder: Connection | None = None
        self._pass = (-1, -1, -1)
        self._ended = True

    def start(self, version: str, program: Program, configure: bytes, num_cpus: int, budget_is_automatic: bool) -> str:
        """Start and configure the feeder; limit an automatic budget to its share of this node's memory.

        Return this node's version of streamload. If the trainer has another one, only return, since both exchange
        pickles.
        """
        if version != own_version():
            return own_version()
        sys.argv[:], import_path, folder = program
        sys.path += [entry for entry in import_path if entry not in sys.path]
        if os.path.isdir(folder):
            os.chdir(folder)
        message: Configure = pickle.loads(configure)
        set_log_levels(message.log_levels)
        if budget_is_automatic:
            actors_of_node = max(1, available_processors() // num_cpus)
            budget_bytes = min(message.fetching.budget_bytes, default_budget(actors_of_node))
            message = message._replace(fetching=message.fetching._replace(budget_bytes=budget_bytes))
        self._feeder = start_feeder_process(message.workers, None)
        self._feeder.send(message)
        return version

    def begin(self, start: EpochStart) -> None:
        """Begin a pass, and abandon the previous one."""
        assert self._feeder is not None, "start comes first"
        self._pass, self._ended = start.identity, False
        self._feeder.send(start)

    def next(self) -> tuple[Ready | Failed, list[Bytes]] | None:
        """Return the next batches with their memory, or a failure; None after the end.

        Raises:
            WorkerError: the feeder is dead, or has failed in an abandoned pass.
        """
        assert self._feeder is not None, "start comes first"
        while not self._ended:
            message = self._feeder.receive(None)
            if isinstance(message, Failed):
                if message.start not in (None, self._pass):
                    raise WorkerError("the feeder has failed in a pass that was abandoned")
                self._ended = True
                return message, []
            if not isinstance(message, Ready):
                continue
            memory = [self._feeder.lease(batch.slot)[: batch.done.size_bytes] for batch in message.batches]
            if message.start == self._pass:
                self._ended = message.last
                return message, memory
            self._feeder.flush()  # the feeder may wait for it
        return None


Program = tuple[Sequence[str], Sequence[str], str]
"""The training program's `sys.argv`, `sys.path` and working folder."""


def connect(address: str = "auto", *, runtime_env: Mapping[str, Any] | None = None) -> RayCluster:
    """Connect this process to a Ray cluster, or use the program's existing connection.

    Args:
        address: "auto" for RAY_ADDRESS, or else this machine's cluster; `HOST:PORT` of a head, or `ray://HOST:PORT`.
        runtime_env: the environment of the processes on the nodes, as `ray.init` takes it.

    Raises:
        ClusterError: Ray is not installed, or the cluster does not exist or has another version of Ray or Python.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as exc:
        raise ClusterError(f"Ray cannot be imported ({exc}); install it: {_INSTALL}") from None
    is_own = not ray.is_initialized()
    if is_own:
        _join(ray, address, runtime_env)
    cluster = RayCluster(ray, str(ray.get_runtime_context().gcs_address), is_own=is_own)
    _log.info("this process uses the Ray cluster at %s", cluster.address)
    return cluster


def _join(ray: Any, address: str, runtime_env: Mapping[str, Any] | None) -> None:
    shown, variable = repr(address), os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto" and variable != "auto":  # as Ray does
        address, shown = variable, f"{variable!r}, which RAY_ADDRESS names"
    if address not in ("auto", "local"):
        _check_reachable(address.removeprefix("ray://"), shown)
    options: dict[str, Any] = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
    try:
        ray.init(address, namespace="streamload", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as exc:
        ray.shutdown()
        text = " ".join(str(exc).split())
        why = f"the Ray cluster at {shown} cannot be used from here: {text}; this machine has to be one of its nodes"
        if shown == "'auto'" and isinstance(exc, ConnectionError):
            why = f"{_NONE_RUNS} ({text})"
        elif "ersion mismatch" in text:
            why = f"the Ray cluster at {shown} has another version: {text}; install that version here"
        raise ClusterError(why) from None


def _check_reachable(address: str, shown: str) -> None:
    """Connect to an address briefly, because Ray would try for a minute and then might end the process."""
    if not is_host_and_port(address):
        raise ClusterError(
            f"{shown} is not the address of a Ray cluster; give auto for this machine's cluster, or HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise ClusterError(
            f"no Ray cluster answers at {shown} ({exc}); check that it runs, that `ray start --head` printed this "
            "address, and that its port is open"
        ) from None


class RayCluster:
    """A connection of this process to a Ray cluster, made by `connect`."""

    def __init__(self, ray: Any, address: str, *, is_own: bool) -> None:
        self.ray, self.address = ray, address
        self._is_own = is_own

    def require(self, resources: Mapping[str, float], number: int = 1, kind: str = "tasks") -> None:
        """Raise ClusterError if `number` tasks or actors exceed even an idle cluster; Ray would wait forever."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = 0
        for node in nodes:
            room += min(number, *(int(node.get(name, 0) // amount) for name, amount in resources.items() if amount))
        if room >= number:
            return
        needed = listed_amounts(resources)
        largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in resources}
        missing = f"no node of the Ray cluster at {self.address!r} has {needed}"
        if room:
            missing = f"the Ray cluster at {self.address!r} has room for {room} of {number} {kind} with {needed} each"
        raise ClusterError(
            f"{missing}; the largest of its {len(nodes)} nodes have {listed_amounts(largest)}; start larger or more "
            "nodes, or ask for less"
        )

    def close(self) -> None:
        """Disconnect, if `connect` made the connection. Idempotent."""
        is_own, self._is_own = self._is_own, False
        if is_own:
            self.ray.shutdown()


def listed_amounts(amounts: Mapping[str, float]) -> str:
    """Return resources in words, such as `3 CPU, 1 GPU`."""
    return ", ".join(f"{amount:,g} {name}" for name, amount in amounts.items())


def check_version(version: str, node: str, expected: str) -> None:
    """Raise ClusterError if a node has another version of streamload. Ray checks its own and Python's version."""
    if version != expected:
        raise ClusterError(
            f"streamload is {version} on the Ray node {node}, but {expected} here; install the same on all nodes"
        )


def own_version() -> str:
    """Return the version of streamload in this process."""
    return str(sys.modules["streamload"].__version__)
