"""A run that nobody has a thousand nodes for, by arithmetic: what it asks for, what links carry, what a loss costs.

What it is fed with was measured on one machine (`Measured`) or is assumed of a cluster (`Cluster`); what is fetched is
read off the real plan. Nothing is random: the same input gives the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scale_traffic import Reader, Traffic

from streamload.fetch.parts import PART_BYTES

PARTS_AT_ONCE = 32
TABLES_AHEAD = 8


@dataclass(frozen=True)
class Cluster:
    """What is assumed of the machines; change it to yours.

    Attributes:
        ranks_of_node: GPUs of a node.
        samples_per_s: that one GPU takes.
        sample_bytes: in the bucket.
        slot_bytes: of a finished sample: 224 x 224 pixels of three bytes, and a label.
        link_bytes_per_s: of a node, in and out each: 100 Gbit/s.
        first_byte_s: until a bucket answers.
        connection_bytes_per_s: of one request.
        node_lost_s: until it is noticed that a machine has vanished; Ray asks every 3 s and gives up after 5 times.
        process_lost_s: until the death of a process is noticed, of which its node tells.
        batches_ahead: finished batches of a rank, `prefetch_batches`.
        steps_between_states: how often the job saves its state.
        restart_s: until a job that has lost a rank trains again: new processes, models, communicators.
    """

    ranks_of_node: int = 8
    samples_per_s: float = 2_500.0
    sample_bytes: int = 64_000
    slot_bytes: int = 224 * 224 * 3 + 8
    link_bytes_per_s: float = 12.5e9
    first_byte_s: float = 0.05
    connection_bytes_per_s: float = 80e6
    node_lost_s: float = 15.0
    process_lost_s: float = 0.1
    batches_ahead: int = 4
    steps_between_states: int = 1_000
    restart_s: float = 120.0


@dataclass(frozen=True)
class Measured:
    """What was measured on one machine.

    Attributes:
        start_s: from a loader's constructor to its first batch, from a server on the same machine.
        index_bytes: of `index.json`.
        table_bytes: of one shard's table.
        decode_s: processor seconds for a sample: `make bench` on images.
        fetch_s_of_byte: processor seconds of a feeder for a fetched byte: docs/performance.md, what fetching costs.
        receive_s_of_byte: processor seconds for a byte that comes from another node, on both sides: a fetched byte's.
    """

    start_s: float
    index_bytes: int
    table_bytes: int
    decode_s: float = 0.802e-3
    fetch_s_of_byte: float = 1.8e-9
    receive_s_of_byte: float = 1.8e-9


@dataclass(frozen=True)
class Layout:
    """Who makes the batches.

    Attributes:
        name: in the tables.
        reader: one of those that make them.
        remote: they are on other nodes.
        shared: those of a node are one process.
    """

    name: str
    reader: Reader
    remote: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Start:
    """Until the first batch of every rank.

    Attributes:
        requests_of_node: of a node with feeders.
        requests: of all.
        index_requests: of these, for `index.json`.
        bytes_of_node: that a node with feeders fetches.
        seconds: from the constructor to the first batch.
    """

    requests_of_node: int
    requests: int
    index_requests: int
    bytes_of_node: float
    seconds: float


@dataclass(frozen=True)
class Links:
    """While a run is under way, a second.

    Attributes:
        bucket_bytes: of a whole epoch, from the bucket, over all readers.
        into_feeder_node: bytes from the bucket to a node with feeders.
        into_trainer_node: bytes from feeders elsewhere to a node with trainers.
        copied: bytes that a trainer's node writes to slots.
        feeder_cores: processors, for a node with trainers, that fetch and decode, wherever they are.
        trainer_cores: processors of a node with trainers that its loaders take.
    """

    bucket_bytes: float
    into_feeder_node: float
    into_trainer_node: float
    copied: float
    feeder_cores: float
    trainer_cores: float


@dataclass(frozen=True)
class Loss:
    """What the death of a feeder, or of its node, costs.

    Attributes:
        stalled_s: how long every rank waits, since all wait for one.
        made_again: batches that are made a second time, over all ranks.
        full_again_s: from the death until as many batches are ahead as before.
    """

    stalled_s: float
    made_again: int
    full_again_s: float


def layouts(ranks: int, batch_size: int, window: int, feeders: int) -> list[Layout]:
    """Those that are compared."""
    wide = ranks * feeders
    return [
        Layout("a feeder for each rank", Reader(ranks, batch_size, ranks, window)),
        Layout("a feeder for each node", Reader(ranks, batch_size, ranks, window), shared=True),
        Layout(f"{feeders} remote feeders, {ranks:,} lanes", Reader(ranks, batch_size, ranks, window, feeders), True),
        Layout(f"{feeders} remote feeders, {wide:,} lanes", Reader(ranks, batch_size, wide, window, feeders), True),
        Layout(
            f"{feeders} remote feeders, batches in turn",
            Reader(ranks, batch_size, wide, window, feeders, in_turn=True),
            remote=True,
        ),
        Layout("a feeder for each rank, 1 lane", Reader(ranks, batch_size, 1, window)),
    ]


def start(layout: Layout, cluster: Cluster, measured: Measured, first: Traffic) -> Start:
    """The start of a run, where the first batch of one reader needs what `first` says."""
    readers_of_node = cluster.ranks_of_node
    lists_of_node = 1 if layout.shared else readers_of_node
    nodes = -(-layout.reader.ranks * layout.reader.feeders // readers_of_node)
    tables = first.shards + TABLES_AHEAD
    of_node = lists_of_node + readers_of_node * (tables + first.parts)
    table_bytes = tables * measured.table_bytes
    part_bytes = min(first.fetched_bytes, first.parts * PART_BYTES)
    bytes_of_node = lists_of_node * measured.index_bytes + readers_of_node * (table_bytes + part_bytes)

    def transfer_s(size: float, at_once: int) -> float:
        carried = min(at_once * cluster.connection_bytes_per_s, cluster.link_bytes_per_s / readers_of_node)
        return cluster.first_byte_s + size / carried

    waves = math.ceil(first.parts / PARTS_AT_ONCE)
    seconds = measured.start_s + transfer_s(measured.index_bytes, 1) + transfer_s(table_bytes, tables)
    seconds += (waves - 1) * cluster.first_byte_s + transfer_s(part_bytes, min(first.parts, PARTS_AT_ONCE))
    return Start(of_node, nodes * of_node, nodes * lists_of_node, bytes_of_node, seconds)


def links(layout: Layout, cluster: Cluster, measured: Measured, samples: int, times: float) -> Links:
    """What flows where so many bytes are fetched for each that is wanted."""
    samples_per_s = cluster.ranks_of_node * cluster.samples_per_s
    wanted, finished = samples_per_s * cluster.sample_bytes, samples_per_s * cluster.slot_bytes
    make = samples_per_s * measured.decode_s + wanted * times * measured.fetch_s_of_byte
    return Links(
        bucket_bytes=samples * cluster.sample_bytes * times,
        into_feeder_node=wanted * times / (layout.reader.feeders if layout.remote else 1),
        into_trainer_node=finished if layout.remote else 0.0,
        copied=finished,
        feeder_cores=make,
        trainer_cores=finished * measured.receive_s_of_byte if layout.remote else make,
    )


def loss(cluster: Cluster, reader: Reader, restart_s: float, *, spare: float = 1.25, lost: int = 1) -> Loss:
    """One reader dies: an event for each batch of a rank, of which each of its feeders makes a share.

    A feeder makes `batches_ahead` batches ahead, and then one as often as the rank takes one. What it has sent stays;
    the batch that it was making is made again, by the feeder that takes its place.

    Args:
        cluster: what is assumed.
        reader: what dies.
        restart_s: until another one makes batches.
        spare: how much faster feeders are than the ranks need, above 1.
        lost: how many readers die at once, each of another rank.
    """
    step_s = reader.batch_size / cluster.samples_per_s
    make_s = step_s / spare
    hidden_s = cluster.batches_ahead * step_s
    died_s = 60.0 + 2 * hidden_s / (spare - 1)  # when all that may be ahead is
    batches = int((died_s + restart_s) / step_s) + 10
    taken = _taken(batches, step_s, make_s, reader.feeders, cluster.batches_ahead, None)
    with_loss = _taken(batches, step_s, make_s, reader.feeders, cluster.batches_ahead, (died_s, died_s + restart_s))
    late = [after - before for before, after in zip(taken, with_loss, strict=True)]
    stalled_s = late[-1]
    return Loss(max(0.0, stalled_s), lost, restart_s + min(restart_s, hidden_s) / (spare - 1))


def _taken(
    batches: int, step_s: float, make_s: float, feeders: int, ahead: int, down: tuple[float, float] | None
) -> Sequence[float]:
    """When the rank takes each batch; the first feeder is down for a while."""
    taken: list[float] = []
    free = [0.0] * feeders
    for batch in range(batches):
        room = taken[batch - ahead] if batch >= ahead else 0.0
        for feeder in range(feeders):
            begin = max(free[feeder], room)
            if feeder == 0 and down is not None and begin + make_s > down[0] and begin < down[1]:
                begin = down[1]
            free[feeder] = begin + make_s
        before = taken[-1] + step_s if taken else 0.0
        taken.append(max(before, *free))
    return taken
