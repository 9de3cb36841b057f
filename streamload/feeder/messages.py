"""What the trainer and its feeder say to each other, as frozen types (without slots, like those of `decode.tasks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamload.decode.tasks import Failure
from streamload.fetch.fetch_options import Fetching
from streamload.index.listing import Listing
from streamload.order.epoch_start import EpochStart
from streamload.schedule.epoch import ReadyBatch
from streamload.schedule.scheduler import PipelineSettings
from streamload.statistics import FeederTotals
from streamload.storage.storages import Storages

__all__ = [
    "AbandonEpoch",
    "Acknowledge",
    "Answer",
    "Call",
    "Configure",
    "CountSamples",
    "Counted",
    "EpochStart",
    "Failed",
    "ReadFrom",
    "Ready",
    "Taken",
]


@dataclass(frozen=True)
class Call:
    """The trainer wants the result of a function that may read remotely; the `Answer` to each comes before the next.

    Attributes:
        function: of a module of ours; or a method of `RangeReader`, of the one that `ReadFrom` has made.
        arguments: of it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """What a `Call` has returned, or what it has raised."""

    result: Any
    failure: Failure | None = None


@dataclass(frozen=True)
class ReadFrom:
    """What calls of `RangeReader` read from, for somebody who reads at random and never sends `Configure`."""

    listing: Listing
    storages: Storages


@dataclass(frozen=True)
class Configure:
    """Everything that holds for all epochs; the trainer may ask for things before, and begins none without it.

    Attributes:
        listing: the shards; None for those that this feeder has found last.
        settings: the pipeline's.
        job: the pickled `Job`, see `job_pickle`.
        workers: how many.
        fetching: how shards that are not files of this machine, or are compressed, are fetched.
        import_path: the trainer's `sys.path`.
        ends_at_failure: whether the first sample that fails, in the epoch's order, ends the pass.
        log_levels: of the trainer's loggers, for the workers.
    """

    listing: Listing | None
    settings: PipelineSettings
    job: bytes
    workers: int
    fetching: Fetching
    import_path: tuple[str, ...]
    ends_at_failure: bool = False
    log_levels: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Taken:
    """The trainer has taken batches, and nobody there views these slots any more.

    Attributes:
        answers: the number of the `Acknowledge` that made it say so, if one did.
    """

    batches: int
    released: tuple[int, ...]
    answers: int | None = None


@dataclass(frozen=True)
class AbandonEpoch:
    """The loop has left this pass, so nothing more is wanted of its epoch.

    Attributes:
        number: of the pass.
    """

    number: int


@dataclass(frozen=True)
class CountSamples:
    """The trainer wants to know how many samples each shard has."""


@dataclass(frozen=True)
class Counted:
    """The samples of each shard."""

    counts: tuple[int, ...]


@dataclass(frozen=True)
class Ready:
    """Batches for the loop.

    Attributes:
        start: `EpochStart.identity` of what they are batches of: those of an epoch that was begun before it was asked
            for, or of one that was abandoned, may turn out not to be wanted.
        batches: in order.
        opened: slots that are new to the trainer, or have grown; their descriptors come with the message.
        retired: slots that are to be dropped.
        last: whether all batches of the epoch have been sent now. Of an epoch that has not been asked for yet, that is
            said with a later message.
        acknowledge_after: how many batches may be taken before the feeder is told of them.
        totals: so far.
    """

    start: tuple[int, int, int]
    batches: tuple[ReadyBatch, ...]
    opened: tuple[int, ...]
    retired: tuple[int, ...]
    last: bool
    acknowledge_after: int
    totals: FeederTotals


@dataclass(frozen=True)
class Acknowledge:
    """Nothing goes on here: say now, and not later together, which batches have been taken.

    Attributes:
        number: no other one has it, so that an answer is not taken for one to a later question.
    """

    number: int


@dataclass(frozen=True)
class Failed:
    """The feeder cannot go on, and does nothing more.

    Attributes:
        failure: why.
        start: `EpochStart.identity` of what it has failed for; None where that is everything.
    """

    failure: Failure
    start: tuple[int, int, int] | None = None
