"""The relay: what a feeder is to its trainer, with the batches that several feeders on other nodes have made."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

from streamload.arguments import parse_bytes
from streamload.decode.failure import Attempt, failure_of
from streamload.environment.launch import EarlyWorkers
from streamload.feeder.calls import COUNT_SAMPLES, WHAT_HOLDS_UP
from streamload.feeder.messages import (
    AbandonEpoch,
    Acknowledge,
    Answer,
    Call,
    Configure,
    EpochStart,
    Failed,
    Ready,
    Send,
    Tracing,
)
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.limits import FREE_MEMORY_SHARE, LEAST_BUDGET_BYTES
from streamload.log_records import set_log_levels
from streamload.memory.mapped import Bytes
from streamload.memory.slots import MappedSlots, SlotPool
from streamload.memory.unnamed import naming_the_limit
from streamload.order.share import Share
from streamload.remote.actor import Greeting
from streamload.remote.cluster import Cluster, RayActors
from streamload.remote.merging import ReceivedBatch, Unmergeable, merge, write
from streamload.remote.remote_feeder import RemoteFeeder
from streamload.schedule.epoch import ReadyBatch
from streamload.totals import Totals
from streamload.trace import Event

__all__ = ["make_relay"]

_log = logging.getLogger("streamload")

_AHEAD_BYTES = 16 << 20
_MOST_AHEAD = 64
"""Batches ahead of the loop, and of each feeder ahead of the others: as many as that, or `prefetch_batches`, and no
more than there are descriptors for."""

_DESCRIPTORS_OF_SLOT = 2
"""The slot's own, and one to map it here."""

_TOTALS_EVERY_S = 0.02
_EXPLAIN_S = 2.0
_CLOCK, _AWAITED = "feeder_s", "awaited_s/"
"""What all feeders go through at the same time: their mean is given, of everything else their sum."""


class _HasFailedError(Exception):
    """A feeder cannot go on, and its next batch is the next one of all."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.failure.summary)
        self.failure = failed.failure


def make_relay(
    configure: Configure,
    listing: Listing,
    send: Send,
    _early: EarlyWorkers,
    _indexes: Mapping[str, DatasetIndex],
    *,
    cluster: Cluster | None = None,
) -> Relay:
    """Make a relay; see `process.Make`."""
    set_log_levels(configure.log_levels)
    return Relay(configure, listing, send, cluster)


class Relay:
    """Puts the batches of several feeders together, for one trainer, which takes it for a feeder.

    Of every batch of the rank each feeder makes some rows (`Share`), which are put one behind the other; where a batch
    must be made in one place, each feeder makes one batch after the other in turn.

    Args:
        configure: what the trainer wants; its `feeders` say of whom.
        listing: the shards.
        send: takes messages for the trainer, with descriptors.
        cluster: where the feeders are; None for Ray's.
    """

    def __init__(self, configure: Configure, listing: Listing, send: Send, cluster: Cluster | None = None) -> None:
        assert configure.feeders is not None
        self._configure = configure._replace(listing=listing, feeders=None)
        self._number = number = configure.feeders.number
        settings = configure.settings
        self._whole_by_need = False
        """Rows were found that do not make a batch in parts."""
        self._whole = settings.whole_batches or configure.whole_batches or not settings.in_order
        self._in_order, self._fills_up = settings.in_order, settings.fills_up
        self._send = send
        self._slots = SlotPool()
        self._mapped = MappedSlots()
        self._most_ahead = max(1, self._slots.most_in_flight // (_DESCRIPTORS_OF_SLOT * (number + 1)))
        self._cluster = cluster or RayActors(configure.feeders)
        self._feeders = [RemoteFeeder(each, number, self._cluster, self) for each in range(number)]
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._untaken = 0
        self._passes = itertools.count(1)
        self._turn = 0
        self._calls = itertools.count()
        self._explaining: dict[int, asyncio.Future[str]] = {}
        self._counting: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_placed = False
        self._placed = self._begin(self._place())
        self._pass: asyncio.Task[None] | None = None
        self._requested: EpochStart | None = None
        self._has_warned_of_lanes = False
        self._largest_bytes = 0
        self._sent_totals_s = 0.0
        self._set_ahead(settings.prefetch_batches)

    # -- what the trainer says ---------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Take a message from the trainer."""
        match message:
            case EpochStart():
                self._leave_pass()
                self._requested = message
                self._pass = self._begin(self._run(message))
            case AbandonEpoch():
                if self._requested is not None and self._requested.number == message.number:
                    self._leave_pass()
            case Acknowledge():
                self._slots.note_taken(message.batches)
                self._slots.note_released(message.released)
                self._untaken -= message.batches
                self._wake.set()
            case Tracing():
                for feeder in self._feeders:
                    feeder.trace(on=message.on)
            case Call() if message.function == COUNT_SAMPLES:
                number = next(self._calls)
                self._counting[number] = message.number
                self._feeders[0].call(message._replace(number=number))

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""
        missing = [feeder for feeder in self._feeders if not feeder.items and not feeder.ended]
        unplaced = [feeder for feeder in missing if feeder.greeting is None]
        if unplaced:
            return f"{len(unplaced)} of {self._number} feeders wait for a place on the Ray cluster"
        answers = await asyncio.gather(*(self._explain(feeder) for feeder in missing[:2]))
        return "\n".join(answers)

    def leave(self) -> None:
        """The trainer is gone: the process ends, and all with it."""

    async def _explain(self, feeder: RemoteFeeder) -> str:
        number, greeting = next(self._calls), feeder.greeting
        assert greeting is not None
        answer = self._explaining[number] = asyncio.get_running_loop().create_future()
        feeder.call(Call(number, WHAT_HOLDS_UP))
        try:
            said = await asyncio.wait_for(answer, _EXPLAIN_S)
        except TimeoutError:
            said = "it does not answer"
        finally:
            del self._explaining[number]
            feeder.forget(number)
        return f"feeder {feeder.number + 1} of {self._number} on the node {greeting.node}: {said or 'nothing shows'}"

    async def aclose(self) -> None:
        """End everything, the actors too."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._cluster.close()
        self._mapped.close()
        self._slots.close()

    # -- what the feeders want ---------------------------------------------------------------------------------------

    def configuration(self, greeting: Greeting) -> Configure:
        """What a feeder on this node is told; an automatic budget shares the node's memory with the others there."""
        configure = self._configure
        fetching = configure.fetching
        if configure.budget_is_automatic:
            there = sum(each.greeting is not None and each.greeting.node == greeting.node for each in self._feeders)
            share = greeting.free_bytes // (FREE_MEMORY_SHARE * max(1, there))
            if configure.feeders is not None and configure.feeders.memory is not None:  # the rest is its workers'
                share = min(share, parse_bytes("memory", configure.feeders.memory) // 2)
            fetching = fetching._replace(budget_bytes=min(fetching.budget_bytes, max(LEAST_BUDGET_BYTES, share)))
        settings = configure.settings._replace(fills_up=False, in_order=True)
        if self._whole_by_need:
            settings = settings._replace(whole_batches=True)
        return configure._replace(fetching=fetching, settings=settings)

    def take_slot(self, size_bytes: int) -> tuple[int, Bytes]:
        """See `FeederOwner`."""
        slot = self._slots.take(size_bytes)
        return slot, self._memory(slot, size_bytes)[:size_bytes]

    def _memory(self, slot: int, size_bytes: int) -> Bytes:
        if not self._mapped.holds(slot):
            self._mapped.add(slot, os.dup(self._slots.descriptor(slot)))
        return self._mapped.at_least(slot, size_bytes)

    def put_back(self, slot: int) -> None:
        """See `FeederOwner`."""
        self._slots.put_back(slot)

    def changed(self) -> None:
        """See `FeederOwner`."""
        self._wake.set()

    def forward(self, message: Any, events: Sequence[Event] = ()) -> None:
        """See `FeederOwner`."""
        self._events += events
        if isinstance(message, Answer) and message.number in self._counting:
            message = message._replace(number=self._counting.pop(message.number))
        elif isinstance(message, Answer):
            answer = self._explaining.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(str(message.value or ""))
            return
        if message is not None:
            self._send(message, ())

    # -- passes --------------------------------------------------------------------------------------------------------

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._failing(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _failing(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Send what is raised inside to the trainer: it would wait for ever."""
        with Attempt() as attempt:
            await coroutine
        if attempt.error is not None:
            error = attempt.error
            failure = error.failure if isinstance(error, _HasFailedError) else failure_of(naming_the_limit(error))
            self._send(Failed(failure, None if self._requested is None else self._requested.identity), ())

    async def _place(self) -> None:
        await self._cluster.connect()
        await asyncio.gather(*(feeder.place() for feeder in self._feeders))
        for feeder in self._feeders:
            self._begin(feeder.live())
        self._is_placed = True

    def _leave_pass(self) -> None:
        if self._pass is not None and not self._pass.done():
            self._pass.cancel()
            for feeder in self._feeders:
                feeder.abandon()
        self._pass = self._requested = None

    async def _run(self, start: EpochStart) -> None:
        """Deliver a pass."""
        await asyncio.shield(self._placed)
        if not self._is_placed:  # and the trainer knows why
            return
        self._warn_of_lanes(start.world_size)
        something_left, owes = start.position > 0, False
        self._request(start)
        delivered = start.position
        while True:
            await self._room()
            batches = await self._next_batches(start, delivered)
            if not batches:
                break
            delivered = batches[-1].end
            if self._fills_up:
                for batch in batches:
                    owes = batch.nothing_left and something_left
                    something_left = something_left or not batch.nothing_left
            self._announce(start, batches, last=not owes and self._all_ended())
            if not owes and self._all_ended():
                self._requested = None
                return
        if owes:
            await self._fill_up(start)
        self._announce(start, [], last=True)
        self._requested = None

    def _warn_of_lanes(self, world_size: int) -> None:
        """Say once that feeders fetch what others fetch too; those that make whole batches do with any lanes."""
        lanes, readers = self._configure.settings.order.lanes, world_size * self._number
        if self._has_warned_of_lanes or self._whole or self._number == 1 or lanes % readers == 0:
            return
        self._has_warned_of_lanes = True
        _log.warning(
            "feeders read the same shards, since lanes=%d is no multiple of %d ranks times %d feeders; where a run "
            "begins with lanes=%d, each byte is fetched once",
            lanes,
            world_size,
            self._number,
            readers,
        )

    async def _fill_up(self, start: EpochStart) -> None:
        """Deliver the first batch of the order of which something is left, for those at the end that are empty."""
        again = replace(start, position=0)
        self._request(again)
        while batches := await self._next_batches(again, 0, most=1):
            batch = batches[0]._replace(extra=True)
            self._announce(start, [batch], last=False)
            if not batch.nothing_left:
                break
            await self._room()
        for feeder in self._feeders:
            feeder.abandon()

    def _request(self, start: EpochStart) -> None:
        """Request the pass of all feeders, each its share."""
        number, self._turn = next(self._passes), 0
        for feeder in self._feeders:
            share = Share(feeder.number, self._number, self._whole)
            feeder.begin(replace(start, number=number, share=share))

    def _all_ended(self) -> bool:
        return all(feeder.ended and not feeder.items for feeder in self._feeders)

    async def _room(self) -> None:
        """Wait until the loop has few enough batches."""
        while self._untaken >= self._most_untaken:
            await self._change()

    async def _change(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    async def _next_batches(self, start: EpochStart, delivered: int, most: int = _MOST_AHEAD) -> list[ReadyBatch]:
        """The next batches, as many as are here and as there is room for, at least one; none at the end.

        Raises:
            Exception: what a feeder has failed with, if its batch is the next one.
        """
        batches: list[ReadyBatch] = []
        most = min(most, max(1, self._most_untaken - self._untaken))
        while len(batches) < most:
            parts = self._next_parts()
            if parts is None:
                if batches:
                    break
                await self._change()
                continue
            if not parts:
                break
            failed = [part for part in parts if isinstance(part, Failed)]
            if failed and batches:
                break
            if failed:
                raise _HasFailedError(failed[0])
            taken = self._take(parts)
            try:
                batches.append(self._merged(taken))
            except Unmergeable:
                delivered = batches[-1].end if batches else delivered
                self._collate_in_one_place(replace(start, position=delivered), taken)
        for feeder in self._feeders:
            feeder.replenish()
        return batches

    def _next_parts(self) -> list[ReceivedBatch | Failed] | None:
        """What the next batch is made of; none at the end, and None while something of it is missing."""
        feeders = self._feeders
        if not self._in_order:
            heads = [feeder.items[0] for feeder in feeders if feeder.items]
            return heads[:1] if heads or self._all_ended() else None
        if self._whole:
            feeder = feeders[self._turn]
            return [feeder.items[0]] if feeder.items else [] if feeder.ended else None
        if not all(feeder.items or feeder.ended for feeder in feeders):
            return None
        heads = [feeder.items[0] for feeder in feeders if feeder.items]
        ends = [head.batch.end for head in heads if isinstance(head, ReceivedBatch)]
        return [head for head in heads if isinstance(head, Failed) or head.batch.end == min(ends)]

    def _take(self, parts: Sequence[ReceivedBatch | Failed]) -> list[ReceivedBatch]:
        """Take the parts of the next batch from their feeders."""
        taken = []
        for feeder in self._feeders:
            if feeder.items and any(feeder.items[0] is part for part in parts):
                item = feeder.items.popleft()
                assert isinstance(item, ReceivedBatch)
                taken.append(item)
        self._turn = (self._turn + 1) % self._number
        return taken

    def _merged(self, parts: Sequence[ReceivedBatch]) -> ReadyBatch:
        """The batch that the parts make. A single one is received into its slot, several are copied there.

        Raises:
            Unmergeable: they make none.
        """
        if len(parts) == 1:
            self._note_size(parts[0].batch.size_bytes)
            return parts[0].batch
        merged = merge(parts)
        size_bytes = merged.batch.size_bytes
        slot = self._slots.take(size_bytes)
        write(parts, merged, self._memory(slot, size_bytes))
        for part in parts:
            self._slots.put_back(part.batch.slot)
        self._note_size(size_bytes)
        return merged.batch._replace(slot=slot)

    def _collate_in_one_place(self, start: EpochStart, parts: Sequence[ReceivedBatch]) -> None:
        """From this position on, for good, have one feeder make each batch: its rows must be seen together."""
        for part in parts:
            self._slots.put_back(part.batch.slot)
        self._whole = self._whole_by_need = True
        for feeder in self._feeders:
            feeder.host_again()
        self._request(start)

    def _note_size(self, size_bytes: int) -> None:
        if size_bytes > self._largest_bytes:
            self._largest_bytes = size_bytes
            prefetch = self._configure.settings.prefetch_batches
            self._set_ahead(max(prefetch, min(_MOST_AHEAD, _AHEAD_BYTES // size_bytes)))

    def _set_ahead(self, batches: int) -> None:
        batches = min(batches, self._most_ahead)
        self._most_untaken = batches
        for feeder in self._feeders:
            feeder.ahead = batches

    def _announce(self, start: EpochStart, batches: Sequence[ReadyBatch], *, last: bool) -> None:
        opened = tuple(batch.slot for batch in batches if self._slots.announce(batch.slot, batch.size_bytes))
        descriptors = [self._slots.descriptor(slot) for slot in opened]
        retired = tuple(self._slots.take_retired())
        for slot in retired:
            self._mapped.drop(slot)
        events, self._events = tuple(self._events), []
        self._untaken += len(batches)
        ready = Ready(
            start.identity,
            tuple(batches),
            opened,
            retired,
            last=last,
            acknowledge_after=max(1, self._most_untaken // 5),
            totals=self._totals(always=last),
            skipped_members=self._skipped_members(),
            events=events,
        )
        self._send(ready, descriptors)

    # -- statistics ----------------------------------------------------------------------------------------------------

    def _totals(self, *, always: bool) -> Totals | None:
        """What all feeders have added up, if it is time to send it."""
        now_s = perf_counter()
        if not always and now_s - self._sent_totals_s < _TOTALS_EVERY_S:
            return None
        self._sent_totals_s = now_s
        total = Totals()
        for feeder in self._feeders:
            total.add(feeder.totals)
        for name in total:
            if name == _CLOCK or name.startswith(_AWAITED):
                total[name] /= self._number
        total["feeder_processor_s"] += process_time()
        total["restarted_workers"] += sum(feeder.restarts for feeder in self._feeders)
        return total

    def _skipped_members(self) -> Mapping[str, int]:
        """Those of one feeder: all scan the same shards."""
        most: dict[str, int] = {}
        for feeder in self._feeders:
            most |= {reason: max(n, most.get(reason, 0)) for reason, n in feeder.skipped_members.items()}
        return most
