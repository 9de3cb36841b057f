"""One of a relay's feeders: an actor that is placed, watched, and replaced where it dies, and what has come from it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol

from streamload.decode.failure import Attempt, failure_of, first_line, in_words
from streamload.errors import ClusterError, StreamloadError, WorkerError
from streamload.feeder.messages import AbandonEpoch, Answer, Call, Configure, EpochStart, Failed, Tracing
from streamload.memory.mapped import Bytes
from streamload.memory.unnamed import naming_the_limit
from streamload.remote.actor import Greeting, Hosting
from streamload.remote.cluster import Cluster, PlacedActor
from streamload.remote.merging import ReceivedBatch
from streamload.remote.wire import Batches, Credit, Wire, connect
from streamload.totals import Totals
from streamload.trace import Event

__all__ = ["RemoteFeeder"]

_log = logging.getLogger("streamload")
_REASON_S = 2.0
"""How long Ray may take to say why an actor is gone whose connection has ended."""


class FeederOwner(Protocol):
    """What a feeder needs of its relay."""

    def configuration(self, greeting: Greeting) -> Configure:
        """What a feeder on this node is told."""

    def take_slot(self, size_bytes: int) -> tuple[int, Bytes]:
        """A slot to receive a batch of this size in, and as much of its memory."""

    def put_back(self, slot: int) -> None:
        """A slot is not needed after all."""

    def changed(self) -> None:
        """There is something new in `items`, or the feeder has ended its pass."""

    def forward(self, message: Any, events: Sequence[Event] = ()) -> None:
        """Take a message that is no batch, and events for a trace."""


class RemoteFeeder:
    """A feeder on another node, and its batches in order; where it dies, another one goes on behind the last of them.

    Args:
        number: of the feeder.
        of: how many there are.
        cluster: where it is placed.
        owner: the relay.

    Attributes:
        items: what has come and was not taken: batches, and behind them what the feeder has failed with.
        ended: the pass has no batch behind those that have come.
        ahead: how many batches the feeder may send beyond those that were taken.
        greeting: of its actor; None while there is none.
        restarts: how often it has died.
        skipped_members: see `Ready`.
    """

    def __init__(self, number: int, of: int, cluster: Cluster, owner: FeederOwner) -> None:
        self.number = number
        self._name = f"feeder {number + 1} of {of}"
        self._cluster = cluster
        self._owner = owner
        self.items: deque[ReceivedBatch | Failed] = deque()
        self.ended = False
        self.ahead = 1
        self.greeting: Greeting | None = None
        self.restarts = 0
        self.skipped_members: dict[str, int] = {}
        self._actor: PlacedActor | None = None
        self._start: EpochStart | None = None
        self._sent_start: EpochStart | None = None
        self._received_end: int | None = None
        self._credits = 0
        self._receiving: list[int] = []
        self._outbox: deque[Any] = deque()
        self._posted = asyncio.Event()
        self._calls: dict[int, Call] = {}
        self._traces = False
        self._died_in_turn = False
        self._error: Exception | None = None
        self._totals, self._totals_before = Totals(), Totals()
        self._clock_offset_s = 0.0

    @property
    def totals(self) -> Totals:
        """What it has added up, with those before it that have died."""
        return self._totals_before.plus(self._totals)

    # -- what the relay wants -----------------------------------------------------------------------------------------

    def begin(self, start: EpochStart) -> None:
        """Request a pass; what there is of an earlier one is dropped."""
        self._drop_batches()
        self._start, self._received_end, self.ended, self._credits = start, None, False, 0
        if self.items:  # it has failed as a whole, and says so once
            self._owner.changed()
            return
        if self._error is not None:
            self._fail(self._error)
            return
        self._request(start)

    def _request(self, start: EpochStart) -> None:
        self._sent_start, self._credits = start, 0
        self._post(start)
        self.replenish()

    def replenish(self) -> None:
        """Let the feeder send more where enough was taken."""
        room = self.ahead - len(self.items) - self._credits
        if self._start is not None and not self.ended and room >= max(1, self.ahead // 4):
            self._credits += room
            self._post(Credit(room))

    def abandon(self) -> None:
        """Nothing more is wanted of the pass."""
        self._drop_batches()
        if self._start is not None:
            self._post(AbandonEpoch(self._start.number))
            self._start = self._sent_start = None

    def call(self, call: Call) -> None:
        """Have it answer a call; whoever is there when it dies does."""
        if self._error is not None:
            self._owner.forward(Answer(call.number, failure=failure_of(self._error)))
            return
        self._calls[call.number] = call
        self._post(call)

    def forget(self, number: int) -> None:
        """An answer is not waited for any more."""
        self._calls.pop(number, None)

    def trace(self, *, on: bool) -> None:
        """Have it note events, or no more."""
        self._traces = on
        self._post(Tracing(on=on))

    def host_again(self) -> None:
        """Have it configured anew, by another feeder's process; then it has no pass."""
        self._drop_batches()
        self.items.clear()
        self._start = self._sent_start = None
        self._note_totals_end()
        if self.greeting is not None:
            self._outbox.clear()
            self._host(self.greeting)

    def _host(self, greeting: Greeting) -> None:
        """Have it configured; then it gets what it has not answered."""
        self._post(self._hosting(greeting))
        if self._traces:
            self._post(Tracing(on=True))
        for call in self._calls.values():
            self._post(call)

    def _drop_batches(self) -> None:
        """Drop what there is of a pass."""
        for item in self.items:
            if isinstance(item, ReceivedBatch):
                self._owner.put_back(item.batch.slot)
        failed = [item for item in self.items if isinstance(item, Failed) and item.start is None]
        self.items.clear()
        self.items.extend(failed)

    def _fail(self, error: Exception) -> None:
        self.items.append(Failed(failure_of(error)))
        self._owner.changed()

    def _post(self, message: Any) -> None:
        if self._actor is not None:  # else it is all sent as soon as there is one
            self._outbox.append(message)
            self._posted.set()

    # -- its life ------------------------------------------------------------------------------------------------------

    async def place(self, *, relaxed: bool = False, again: bool = False) -> None:
        """Place an actor; see `Cluster.place`."""
        actor, greeting = await self._cluster.place(relaxed=relaxed, again=again)
        self._clock_offset_s = perf_counter() - greeting.clock_s
        self._actor, self.greeting = actor, greeting

    async def live(self) -> None:
        """Serve the relay for ever, by one actor after the other, from the one that has been placed on."""
        while True:
            with Attempt() as attempt:
                await self._serve()
            assert attempt.error is not None
            self._note_end()
            named = naming_the_limit(attempt.error)
            if isinstance(named, WorkerError) and named is not attempt.error:  # this process has too many, not the node
                self._break(named)
                return
            self.restarts += 1
            if self._died_in_turn:
                self._break(self._second_death(attempt.error))
                return
            self._died_in_turn = True
            _log.warning(
                "%s has died (%s); another one is started, and goes on in its place",
                self._where(),
                first_line(attempt.error),
            )
            with Attempt() as attempt:
                await self._place_again()
            if attempt.error is not None:
                self._break(attempt.error)
                return

    def _break(self, error: Exception) -> None:
        self._error = error if isinstance(error, StreamloadError) else _lost(self._name, error)
        self._fail(self._error)
        for number in self._calls:
            self._owner.forward(Answer(number, failure=failure_of(self._error)))
        self._calls.clear()

    async def _place_again(self) -> None:
        try:
            await self.place(again=True)
        except (ClusterError, WorkerError) as error:
            _log.warning("%s cannot be placed as it was (%s); it shares a node with others now", self._name, error)
            await self.place(relaxed=True, again=True)

    async def _serve(self) -> None:
        """Serve the relay until the actor is gone.

        Raises:
            Exception: why it is gone.
        """
        greeting, actor = self.greeting, self._actor
        assert greeting is not None
        assert actor is not None
        life = asyncio.ensure_future(actor.serve())
        tasks: list[asyncio.Future[Any]] = [life]
        wire: Wire | None = None
        try:
            wire = await connect(greeting.address, greeting.token)
            self._begin_again(greeting)
            tasks += [asyncio.create_task(self._receive_all(wire)), asyncio.create_task(self._send_all(wire))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([life], timeout=_REASON_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if wire is not None:
                wire.close()
            self._cluster.end(actor)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        raise ConnectionError("its connection has ended")

    def _begin_again(self, greeting: Greeting) -> None:
        """Send an actor all that the one before it has been sent and not done."""
        self._outbox.clear()
        self._host(greeting)
        if self._start is not None and not self.ended and not self._has_failed():
            self._request(self._rest(self._start))

    def _rest(self, start: EpochStart) -> EpochStart:
        """What of a pass has not come."""
        if self._received_end is None:
            return start
        share = start.share
        if share.whole_batches:  # the others have the next ones
            share = replace(share, number=share.of - 1)
        return replace(start, position=self._received_end, share=share)

    def _has_failed(self) -> bool:
        return bool(self.items) and isinstance(self.items[-1], Failed)

    def _hosting(self, greeting: Greeting) -> Hosting:
        return Hosting(self._owner.configuration(greeting), os.getcwd())

    def _note_end(self) -> None:
        self._note_totals_end()
        self._outbox.clear()
        self._actor = self._sent_start = None
        for slot in self._receiving:
            self._owner.put_back(slot)
        self._receiving = []

    def _note_totals_end(self) -> None:
        self._totals_before, self._totals = self.totals, Totals()

    def _where(self) -> str:
        return self._name if self.greeting is None else f"{self._name} on the node {self.greeting.node}"

    def _second_death(self, error: Exception) -> WorkerError:
        return WorkerError(
            f"{self._name} died twice in turn, and no batch or answer came in between: where memory runs out on its "
            "node, lower memory_budget or num_workers, or claim memory= in RayFeeders; `ray list actors` and its log "
            f"there say more. The second time, on the node {self.greeting and self.greeting.node}: {first_line(error)}"
        )

    # -- what comes ----------------------------------------------------------------------------------------------------

    async def _send_all(self, wire: Wire) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._outbox:
                await wire.send(self._outbox.popleft())

    async def _receive_all(self, wire: Wire) -> None:
        while True:
            self._handle(await wire.receive(self._places))

    def _places(self, message: Batches) -> list[Bytes]:
        """Where the bytes of batches go."""
        places = []
        for size_bytes in message.sent_bytes:
            slot, memory = self._owner.take_slot(size_bytes)
            self._receiving.append(slot)
            places.append(memory)
        self._memory = places
        return places

    def _handle(self, message: Any) -> None:
        match message:
            case Batches():
                self._take(message)
            case Failed():
                if message.start is None or (self._sent_start and message.start == self._sent_start.identity):
                    self.items.append(message)  # others are of an earlier pass
                    self._owner.changed()
            case Answer():
                self._died_in_turn = False
                if self._calls.pop(message.number, None) is not None:
                    self._owner.forward(message)
            case _:
                self._owner.forward(message)

    def _take(self, message: Batches) -> None:
        """Take in batches, or put their slots back where they are of an earlier pass."""
        ready = message.ready
        if not self._receiving:  # nothing is left of any of them
            self._places(message)
        slots, self._receiving = self._receiving, []
        memory, self._memory = self._memory, []
        self._note_statistics(ready.totals, ready.skipped_members, ready.events)
        if self._sent_start is None or ready.start != self._sent_start.identity:
            for slot in slots:
                self._owner.put_back(slot)
            return
        for batch, slot, part in zip(ready.batches, slots, memory, strict=True):
            self.items.append(ReceivedBatch(batch._replace(slot=slot), part))
            self._received_end = batch.end
        self._credits -= len(ready.batches)
        self.ended = ready.last
        self._died_in_turn = False
        self._owner.changed()

    def _note_statistics(self, totals: Totals | None, skipped_members: dict[str, int], events: Sequence[Event]) -> None:
        if totals is not None:
            self._totals = Totals(totals)
        if skipped_members:
            self.skipped_members = dict(skipped_members)
        if events:
            self._owner.forward(None, [self._dated_here(event) for event in events])

    def _dated_here(self, event: Event) -> Event:
        """The event by this machine's clock, and on a track of this feeder."""
        track = event.track if event.track == "connection" else f"{event.track} of {self._name}"
        return event._replace(start_s=event.start_s + self._clock_offset_s, track=track)


def _lost(name: str, error: Exception) -> WorkerError:
    lost = WorkerError(f"{name} cannot be started: {in_words(error)}")
    lost.__cause__ = error
    return lost
