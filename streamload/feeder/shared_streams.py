"""Streams of batches for ranks that get the same ones: each batch is made once, and its slot is mapped by all of them.

A stream is a feeder whose trainer is several ranks, its members. A member reads the pass that it has requested, and
is sent what comes of that pass and of no other. Who requests the same pass joins it, and is sent all of it, for which
the messages are logged, and their slots held, until every rank of the group has come. A rank that comes when the log
is gone, or wants another pass while this one is being read, gets a stream of its own: the same batches, made again.

A batch is taken when the last one that reads its pass has taken it, so the slowest bounds how far a stream is ahead.
Its slot is free when the last one has released it, also of those that have left the pass since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streamload.feeder.calls import COUNT_SAMPLES
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import AbandonEpoch, Acknowledge, Answer, Call, EpochStart, Failed, Ready, Send, Tracing
from streamload.feeder.pipeline import Pipeline
from streamload.limits import LEAST_LOGGED_BATCHES, LOGGED_BYTES, MOST_LOGGED_BATCHES
from streamload.memory.slots import SlotPool, SlotPools, round_up
from streamload.schedule.epoch import ReadyBatch
from streamload.text import counted
from streamload.totals import Totals

__all__ = ["SharedStreams"]

Identity = tuple[int, int, int]
_OF_OTHERS: Identity = (-1, -1, -1)


@dataclass(slots=True, eq=False)
class _Pass:
    """A pass over an epoch, in one stream.

    Attributes:
        stream: where it is made.
        start: as requested; None for an epoch that was begun ahead.
        obsolete: nobody will request it any more.
        ended: all of its batches have come.
        readers: the members that want what comes of it.
        joined: those that have requested it. None does so twice: the slots may still hold what it has.
        log: all that came of it, with its batches; None where that is gone, so that nobody can join.
        taken, taken_bytes: the batches in the log that all readers have taken.
    """

    stream: _Stream
    start: EpochStart | None = None
    obsolete: bool = False
    ended: bool = False
    readers: set[Member] = field(default_factory=set)
    joined: set[Member] = field(default_factory=set)
    log: list[tuple[Ready, list[_Shared]]] | None = field(default_factory=list)
    taken: int = 0
    taken_bytes: int = 0

    @property
    def log_is_full(self) -> bool:
        """Whether its slots are needed for more than a rank that is a little late."""
        if self.taken > LEAST_LOGGED_BATCHES:
            return self.taken > MOST_LOGGED_BATCHES or self.taken_bytes > LOGGED_BYTES
        return False

    def logged(self) -> list[_Shared]:
        """The batches in the log."""
        return [each for _, batches in self.log or () for each in batches]

    def is_of(self, start: EpochStart) -> bool:
        """Whether its batches are those of a start; a sampler may have named other samples on another rank."""
        return self.start == start and np.array_equal(_numbers(self.start), _numbers(start))


@dataclass(slots=True, eq=False)
class _Shared:
    """A batch from its announcement until its slot is free.

    Attributes:
        batch: it.
        of: its pass.
        waits_for: the members that are to take it.
        held_by: the members that may view its slot.
        taken: the feeder knows that it was taken.
        free: the feeder knows, or is about to, that its slot is free.
    """

    batch: ReadyBatch
    of: _Pass
    waits_for: set[Member] = field(default_factory=set)
    held_by: set[Member] = field(default_factory=set)
    taken: bool = False
    free: bool = False

    @property
    def can_be_taken(self) -> bool:
        """Whether all that are to take it have; one that nobody has requested yet waits."""
        return not self.waits_for and (self.of.start is not None or self.of.obsolete)


class SharedStreams:
    """All streams of a feeder's process.

    Args:
        pipeline: makes the batches.
        slots: of all ranks.
        descriptors: how many each stream may have open, see `SlotPool`.
        workers: how many the ranks want.
        sharers: how many ranks of this machine get the same batches.

    Attributes:
        pipeline: as given.
    """

    def __init__(self, pipeline: Pipeline, slots: SlotPools, *, descriptors: int, workers: int, sharers: int) -> None:
        self.pipeline = pipeline
        self._slots = slots
        self._descriptors = descriptors
        self._workers = workers
        self._sharers = sharers
        self._members: list[Member] = []
        self._streams: list[_Stream] = []

    def join(self, send: Send) -> Member:
        """Serve another rank.

        Args:
            send: takes messages for its trainer, with descriptors.
        """
        member = Member(self, send)
        self._members.append(member)
        return member

    def leave(self, member: Member) -> None:
        """A member is gone."""
        self._members.remove(member)

    def find(self, member: Member, start: EpochStart) -> _Stream | None:
        """The stream of which a member can have all batches of a pass."""
        return next((stream for stream in self._streams if stream.offers(member, start)), None)

    def new(self) -> _Stream:
        """Another stream."""
        pool = self._slots.new(self._descriptors)
        stream = _Stream(self.pipeline, pool, workers=self._workers, sharers=self._sharers, retire=self.retire)
        self._streams.append(stream)
        return stream

    def close(self, stream: _Stream) -> None:
        """End a stream without members."""
        self._streams.remove(stream)
        stream.closed = True
        stream.feeder.leave()
        slots = self._slots.close(stream.slots)
        self.pipeline.pool.forget_slots(slots)
        self.retire(slots)

    def retire(self, slots: Sequence[int]) -> None:
        """These are to be dropped, also by members that have left their stream."""
        if slots:
            for member in self._members:
                member.retire(slots)


class _Stream:
    """One feeder for several ranks; see the module.

    Args:
        pipeline: makes the batches.
        slots: whose memory they lie in.
        workers: how many the ranks want.
        sharers: how many ranks are to join a pass.
        retire: has members drop slots.

    Attributes:
        slots: as given.
        feeder: makes the plans.
        members: the ranks.
        failed: the feeder cannot go on, and the members have been told.
        closed: nothing is left of it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        slots: SlotPool,
        *,
        workers: int,
        sharers: int,
        retire: Callable[[Sequence[int]], None],
    ) -> None:
        self.slots = slots
        self._sharers = sharers
        self._retire = retire
        self.members: list[Member] = []
        self.failed = self.closed = False
        self._passes: dict[Identity, _Pass] = {}
        self._requested: _Pass | None = None
        self._untaken: deque[_Shared] = deque()
        self._free: list[int] = []
        self._asking: list[tuple[Member, int]] = []
        self.feeder = Feeder(pipeline, slots, self._on_message, workers=workers)

    # -- members ---------------------------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """Another rank is served from here."""
        self.members.append(member)
        self._note_members()

    def remove(self, member: Member) -> None:
        """A rank is not served from here any more; it has left its pass."""
        self.members.remove(member)
        self._asking = [each for each in self._asking if each[0] is not member]
        self._note_members()

    def _note_members(self) -> None:
        if self.members:
            self.feeder.meter.sharers = len(self.members)
            self.note_tracing()

    def note_tracing(self) -> None:
        """Some members record a trace, or none."""
        self.feeder.handle(Tracing(on=any(member.traces for member in self.members)))

    def totals(self) -> Totals:
        """What a member has been, or would be, told now."""
        meter, in_own_process = self.feeder.meter, self.feeder.pipeline.owns_process
        return Totals(meter.to_send(always=True, in_own_process=in_own_process) or {})

    def ask(self, member: Member, call: Call) -> None:
        """Answer a call of a member."""
        self._asking.append((member, call.number))
        self.feeder.handle(call)

    # -- passes ----------------------------------------------------------------------------------------------------

    def offers(self, member: Member, start: EpochStart) -> bool:
        """Whether the pass is here, with all that came of it, and the member has not had it yet."""
        found = self._passes.get(start.identity)
        return (
            not self.failed
            and found is not None
            and found.is_of(start)
            and found.log is not None
            and member not in found.joined
            and all(self.slots.holds(each.batch.slot) for each in found.logged())
        )

    def can_begin(self) -> bool:
        """Whether a pass can be begun here without taking one away from its readers."""
        requested = self._requested
        return not self.failed and (requested is None or requested.ended or not requested.readers)

    def request(self, member: Member, start: EpochStart) -> _Pass:
        """Let a member have a pass, which is offered or can be begun."""
        if self.offers(member, start):
            return self._read(member, self._passes[start.identity])
        requested = self._begin(start)
        self._read(member, requested)
        self.feeder.handle(start)
        self.advance()
        return requested

    def _begin(self, start: EpochStart) -> _Pass:
        """Note that a pass is requested. One that is late may still join the one before, if that has ended."""
        before, ahead = self._requested, self._passes.get(start.identity)
        requested = _Pass(self) if ahead is None or ahead.start is not None else ahead
        for identity, other in self._passes.items():
            if other is not requested and (other is not before or not other.ended or identity == start.identity):
                self._end_log(other)
                other.obsolete = True
        self._passes = {identity: each for identity, each in self._passes.items() if each.log is not None}
        self._passes[start.identity] = self._requested = requested
        requested.start = start
        return requested

    def _read(self, member: Member, joined: _Pass) -> _Pass:
        """Have a member read a pass from its beginning."""
        joined.readers.add(member)
        joined.joined.add(member)
        for ready, batches in joined.log or ():
            member.give(ready, batches)
        if len(joined.joined) >= self._sharers:
            self._end_log(joined)
        return joined

    def leave_pass(self, member: Member, left: _Pass) -> None:
        """A member wants no more of a pass; what nobody reads is abandoned."""
        left.readers.discard(member)
        if left is self._requested and not left.readers and not left.ended and not self.failed and not self.closed:
            self._end_log(left)
            assert left.start is not None
            self.feeder.handle(AbandonEpoch(left.start.number))

    def _end_log(self, of: _Pass) -> None:
        """Nobody can join a pass any more."""
        logged, of.log = of.logged(), None
        for shared in logged:
            self.free_if_unused(shared)

    def what_holds_up(self, member: Member) -> str:
        """Whether a rank waits for others of its group, in words; empty where it does not."""
        others = len(self._untaken[0].waits_for - {member}) if self._untaken else 0
        if not others:
            return ""
        return (
            "this rank is ahead of its group (shared_by=), whose ranks get the same batches: "
            f"{counted(others, 'rank')} of it must take an earlier one first"
        )

    # -- batches ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Have the feeder know what has been taken, and which slots are free."""
        taken = 0
        while not self.closed and self._untaken and self._untaken[0].can_be_taken:
            self._take(self._untaken.popleft())
            taken += 1
        free, self._free = self._free, []
        if not self.closed and (taken or free):
            self.feeder.handle(Acknowledge(taken, tuple(free)))

    def _take(self, shared: _Shared) -> None:
        shared.taken = True
        of = shared.of
        if of.log is not None:
            of.taken += 1
            of.taken_bytes += shared.batch.size_bytes
            if of.log_is_full:
                self._end_log(of)
        self.free_if_unused(shared)

    def free_if_unused(self, shared: _Shared) -> None:
        """Free the slot of a batch with the next `advance`, where nobody views it and nobody can join its pass."""
        if shared.taken and not shared.free and not shared.held_by and shared.of.log is None:
            shared.free = True
            self._free.append(shared.batch.slot)

    # -- the feeder ------------------------------------------------------------------------------------------------

    def _on_message(self, message: Any, _: Sequence[int]) -> None:
        """Take a message from the feeder for those that it concerns; each member is sent descriptors of its own."""
        match message:
            case Ready():
                self._on_ready(message)
            case Answer():
                asking, self._asking = self._asking, []
                for member, number in asking:
                    member.send(message._replace(number=number), ())
            case _:
                self.failed = self.failed or isinstance(message, Failed)
                for member in self.members:
                    member.tell(message)

    def _on_ready(self, ready: Ready) -> None:
        of = self._passes.setdefault(ready.start, _Pass(self))
        shared = [_Shared(batch, of) for batch in ready.batches]
        self._untaken += shared
        self._retire(ready.retired)
        of.ended = ready.last
        if of.log is not None:
            of.log.append((ready._replace(totals=None, events=()), shared))
        for member in list(of.readers):
            member.give(ready, shared)


class Member:
    """A rank, as the feeder's process knows it, if others get the same batches.

    Args:
        streams: where batches come from.
        send: takes messages for its trainer, with descriptors.

    Attributes:
        pipeline: makes the batches.
        send: as given.
        traces: whether it records a trace.
    """

    def __init__(self, streams: SharedStreams, send: Send) -> None:
        self.pipeline = streams.pipeline
        self.send = send
        self.traces = False
        self._streams = streams
        self._stream: _Stream | None = None
        self._reads: _Pass | None = None
        self._requested: EpochStart | None = None  # as the trainer has numbered it
        self._sent: deque[_Shared] = deque()
        self._holds: dict[int, _Shared] = {}
        self._mapped: dict[int, int] = {}
        self._retired: list[int] = []
        self._totals_before: Totals = Totals()
        self._totals_at_join: Totals = Totals()

    def handle(self, message: Any) -> None:
        """Take a message from the trainer."""
        match message:
            case EpochStart():
                self._request(message)
            case AbandonEpoch():
                if self._requested is not None and self._requested.number == message.number:
                    self._leave_pass()
            case Acknowledge():
                self._note_taken(message)
            case Tracing():
                self.traces = message.on
                if self._stream is not None:
                    self._stream.note_tracing()
            case Call() if message.function == COUNT_SAMPLES:
                self._here().ask(self, message)

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""
        of_group = "" if self._stream is None else self._stream.what_holds_up(self)
        return of_group or await self.pipeline.what_holds_up()

    def give(self, ready: Ready, shared: Iterable[_Shared]) -> None:
        """Send batches of the pass that it reads."""
        assert self._stream is not None
        for each in shared:
            each.waits_for.add(self)
            each.held_by.add(self)
            self._sent.append(each)
            self._holds[each.batch.slot] = each
        opened = tuple(batch.slot for batch in ready.batches if self._must_map(batch))
        retired, self._retired = tuple(self._retired), []
        totals = ready.totals
        if totals is not None:
            totals = self._totals_before.plus(totals.since(self._totals_at_join))
        # Of the last batches each is acknowledged at once: else those that are not would hold up the others' next pass.
        after = 1 if ready.last else ready.acknowledge_after
        assert self._requested is not None
        own = ready._replace(
            start=self._requested.identity,
            opened=opened,
            retired=retired,
            totals=totals,
            acknowledge_after=after,
        )
        self.send(own, [self._stream.slots.descriptor(slot) for slot in opened])

    def tell(self, message: Any) -> None:
        """Pass on what is no batch; a failure of a pass that it does not read is one of work that it does not want."""
        if isinstance(message, Failed) and message.start is not None:
            read = None if self._reads is None or self._reads.start is None else self._reads.start.identity
            own = self._requested.identity if self._requested is not None and read == message.start else _OF_OTHERS
            message = message._replace(start=own)
        self.send(message, ())

    def retire(self, slots: Sequence[int]) -> None:
        """Have the trainer drop these, if it has mapped them, with the next batches that it gets."""
        self._retired += [slot for slot in slots if self._mapped.pop(slot, None) is not None]

    def leave(self) -> None:
        """The trainer is gone, and others are served."""
        self._streams.leave(self)
        self._leave_pass()
        self._release(list(self._holds))
        self._move(None)

    def _must_map(self, batch: ReadyBatch) -> bool:
        """Whether the trainer has not mapped a batch's slot, or not enough of it."""
        if batch.size_bytes <= self._mapped.get(batch.slot, -1):
            return False
        self._mapped[batch.slot] = round_up(batch.size_bytes)  # at least: it maps all there is
        return True

    def _request(self, start: EpochStart) -> None:
        if self._stream is not None and self._stream.failed:
            return  # it has been told, and goes
        self._leave_pass()
        self._requested = start
        start = replace(start, number=start.epoch)  # each rank counts its passes, of which one may have begun more
        stream = self._streams.find(self, start)
        if stream is None:
            stream = self._stream if self._stream is not None and self._stream.can_begin() else self._streams.new()
        self._move(stream)
        self._reads = stream.request(self, start)

    def _leave_pass(self) -> None:
        """Wait for nothing more of it; what has been sent is still held until it is released."""
        left, self._reads = self._reads, None
        if left is None or self._stream is None:
            return
        for shared in self._sent:
            shared.waits_for.discard(self)
        self._stream.leave_pass(self, left)
        self._stream.advance()

    def _note_taken(self, message: Acknowledge) -> None:
        taken = [self._sent.popleft() for _ in range(message.batches)]
        for shared in taken:
            shared.waits_for.discard(self)
        _advance(taken)
        self._release(message.released)

    def _release(self, slots: Sequence[int]) -> None:
        """No view of these is left in the trainer."""
        released = [self._holds.pop(slot) for slot in slots]
        for shared in released:
            shared.held_by.discard(self)
            shared.of.stream.free_if_unused(shared)
        _advance(released)

    def _here(self) -> _Stream:
        """The stream that it is served from."""
        if self._stream is None:
            self._move(self._streams.new())
        assert self._stream is not None
        return self._stream

    def _move(self, stream: _Stream | None) -> None:
        """Be served from another stream, or from none."""
        left, self._stream = self._stream, stream
        if left is stream:
            return
        if stream is not None:
            if left is not None:
                self._totals_before = self._totals_before.plus(left.totals().since(self._totals_at_join))
            self._totals_at_join = stream.totals() if stream.members or left is not None else Totals()
            stream.add(self)
        if left is not None:
            left.remove(self)
            if not left.members:
                self._streams.close(left)


def _advance(batches: Sequence[_Shared]) -> None:
    """Have the feeders of these know what has become of them."""
    for stream in dict.fromkeys(shared.of.stream for shared in batches):
        stream.advance()


def _numbers(start: EpochStart | None) -> Any:
    return () if start is None or start.numbers is None else start.numbers
