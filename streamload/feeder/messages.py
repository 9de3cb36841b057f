"""What the trainer and its feeder send each other, as named tuples (like those of `decode.tasks`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from streamload.decode.tasks import Failure, RowFailure, StoredValues

if TYPE_CHECKING:  # most of these are imported only with what makes the feeders
    from streamload.fetch.fetched_listing import Fetching
    from streamload.index.listing import Listing
    from streamload.order.options import OrderOptions
    from streamload.totals import Totals
    from streamload.trace import Event

Send = Callable[[Any, Sequence[int]], None]
"""Sends the trainer a message, with descriptors."""


class PipelineSettings(NamedTuple):
    """The settings of every epoch of a loader.

    Attributes:
        order: the order and its division into batches.
        fields: the wanted fields, or None for all.
        verify: check the bytes against the index's checksums.
        whole_batches: every batch is made by one task, as a `collate_fn` needs it.
        prefetch_batches: at least so many batches may be in flight or waiting for the loop.
        fills_up: another batch replaces one in which every sample has failed.
        expansion_room_bytes: what one worker may hold of values that have expanded; None without a bound.
    """

    order: OrderOptions
    fields: tuple[str, ...] | None
    verify: bool
    whole_batches: bool
    prefetch_batches: int
    fills_up: bool = False
    expansion_room_bytes: int | None = None


class FailedRow(NamedTuple):
    """A failed row, and the sample it was made of."""

    failure: RowFailure
    url: str
    key: str


class Part(NamedTuple):
    """Rows of a batch that one task made, and their values of unlike sizes; see `PieceDone`."""

    rows: int
    values: StoredValues | None


class ReadyBatch(NamedTuple):
    """A batch for the trainer.

    Attributes:
        slot: where it lies.
        size_bytes: how much of the slot it uses.
        layout: a cloudpickle of its layout.
        rows: how many rows it has; None where a `collate_fn` made it and its layout has none.
        parts: in the order of their rows.
        failed: the rows that failed, in order. In a batch of rows their places hold copies of other rows.
        dropped_already: the failed rows have been removed from the batch.
        end: the position in the epoch's order after its last sample.
        extra: it only replaces empty batches before it; its samples are delivered at their own turn as well.
    """

    slot: int
    size_bytes: int
    layout: bytes | None
    rows: int | None
    parts: tuple[Part, ...]
    failed: tuple[FailedRow, ...]
    dropped_already: bool
    end: int
    extra: bool = False

    @property
    def nothing_left(self) -> bool:
        """Whether every sample of it has failed."""
        return len(self.failed) >= sum(part.rows for part in self.parts)


class Call(NamedTuple):
    """The trainer wants the result of a function.

    Attributes:
        number: no other call has it.
        function: its name in `Calls.functions`, or `COUNT_SAMPLES`.
        arguments: of it.
    """

    number: int
    function: str
    arguments: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """What a call has returned, or what it has raised.

    Attributes:
        number: the call's.
        value: what it returned.
        failure: what it raised, or None.
    """

    number: int
    value: Any = None
    failure: Failure | None = None


class Configure(NamedTuple):
    """Everything that holds for all epochs; calls may come before it, epochs may not.

    Attributes:
        listing: the shards; None for those that this feeder has listed last.
        settings: the pipeline's.
        job: the pickled `Job`, see `job_pickle`.
        workers: how many; 0 where the trainer makes the rows itself.
        fetching: how shards that are not files of this machine, or are compressed, are fetched.
        import_path: the trainer's `sys.path`.
        ends_at_failure: whether the first sample that fails, in the epoch's order, ends the pass.
        log_levels: of the trainer's loggers, for the workers.
        descriptors: how many the trainer may have open where it makes the rows, else 0.
    """

    listing: Listing | None
    settings: PipelineSettings
    job: bytes
    workers: int
    fetching: Fetching
    import_path: tuple[str, ...]
    ends_at_failure: bool = False
    log_levels: tuple[tuple[str, int], ...] = ()
    descriptors: int = 0


class Acknowledge(NamedTuple):
    """The trainer has taken batches, and nobody there views these slots any more.

    Attributes:
        batches: how many.
        released: the slots.
    """

    batches: int
    released: tuple[int, ...]


class AbandonEpoch(NamedTuple):
    """The loop has left a pass, so nothing more is wanted of its epoch.

    Attributes:
        number: of the pass.
    """

    number: int


class Tracing(NamedTuple):
    """The trainer records a trace, or does so no more.

    Attributes:
        on: whether it does.
    """

    on: bool


class Ready(NamedTuple):
    """Batches for the loop.

    Attributes:
        start: `EpochStart.identity` of what they are batches of: those of an epoch that was begun before it was
            requested, or of one that was abandoned, may turn out not to be wanted.
        batches: in order.
        opened: slots that are new to the trainer, or have grown; their descriptors come with the message.
        retired: slots that are to be dropped.
        last: whether all batches of the epoch have been sent now. Of an epoch that has not been requested yet, a later
            message says so.
        acknowledge_after: how many batches may be taken before they are acknowledged.
        totals: what the feeder has added up so far; None where that has been sent a moment ago.
        skipped_members: so far, by reason.
        events: for a trace, since the last message.
    """

    start: tuple[int, int, int]
    batches: tuple[ReadyBatch, ...]
    opened: tuple[int, ...]
    retired: tuple[int, ...]
    last: bool
    acknowledge_after: int
    totals: Totals | None = None
    skipped_members: Mapping[str, int] = {}
    events: tuple[Event, ...] = ()


class Scanning(NamedTuple):
    """What is waited for waits for scans; sent now and then.

    Attributes:
        scanned: how many shards' counts are known.
        shards: how many there are.
    """

    scanned: int
    shards: int


class Failed(NamedTuple):
    """The feeder cannot go on, and does nothing more.

    Attributes:
        failure: why.
        start: `EpochStart.identity` of the epoch that it has failed for; None where it has failed as a whole.
    """

    failure: Failure
    start: tuple[int, int, int] | None = None
