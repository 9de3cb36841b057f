"""Where a pass begins, and which rows of a global batch are whose: a rank's slice, and a share of a rank's batches.

The order takes the lanes in turn. While all lanes last (the *full rounds*), position g is number `g // L` of lane
`g % L`; the fewer than L positions after that are the last samples of the lanes that are longer by one. A global
batch is sorted lane-major, that is by lane and then by number, and cut into one slice for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamload.order.lanes import lane_bounds

IntArray = NDArray[np.int64]


def rank_bounds(n_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where a rank's slice of `n_rows` rows lies. Slices differ by at most one row, and the first ranks get more."""
    share, extra = divmod(n_rows, world_size)
    start = rank * share + min(rank, extra)
    return start, start + share + (rank < extra)


def least_lanes_of_rank(n_lanes: int, world_size: int, batch_size: int) -> int:
    """How many lanes any rank reads at least in the course of an epoch, whose windows it then needs side by side.

    A state may be resumed by ranks that do not divide its lanes: then a rank's slice of a batch covers the same few
    lanes each time, unless batches are so small that not every lane has a row in each.
    """
    if n_lanes % world_size and batch_size * world_size < n_lanes:
        return n_lanes
    return -(-n_lanes // world_size)


def lanes_and_numbers(positions: IntArray, n_samples: int, n_lanes: int) -> tuple[IntArray, IntArray]:
    """For each position of the epoch's order its lane and its number in the lane, int64 each."""
    rounds = n_samples // n_lanes
    lanes, numbers = positions % n_lanes, positions // n_lanes
    beyond = positions >= rounds * n_lanes
    if bool(beyond.any()):
        longer = np.flatnonzero(np.diff(lane_bounds(n_samples, n_lanes)) > rounds)
        lanes[beyond] = longer[positions[beyond] - rounds * n_lanes]
        numbers[beyond] = rounds
    return lanes, numbers


def slices_of_full_batches(
    starts: IntArray, n_lanes: int, slice_of_batch: range, global_batch: int
) -> tuple[IntArray, IntArray]:
    """The same slice of whole global batches that lie within the full rounds, without making the rest of them.

    A batch of B positions from s on holds `B // L` numbers of each lane, and one more of the `B % L` lanes from
    `s % L` on, cyclically. So the lanes fall into three runs of equal counts, and which lane and number a row is
    follows by one division.

    Args:
        starts: int64[m], the position at which each of the global batches starts.
        n_lanes: the number of lanes, L.
        slice_of_batch: the rows that are wanted of each batch: those of a rank, or a share of them.
        global_batch: rows of a global batch, B.

    Returns:
        Lanes and numbers in the lane of the rows, int64[m * len(slice)] each, batch by batch, each lane-major.
    """
    if not len(starts):  # a batch may be far larger than the dataset
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = np.arange(slice_of_batch.start, slice_of_batch.stop, dtype=np.int64)[np.newaxis, :]
    share, extra = divmod(global_batch, n_lanes)
    if n_lanes == 1:
        numbers = starts[:, np.newaxis] + rows
        return np.zeros(numbers.size, np.int64), numbers.ravel()
    if extra == 0 and len(starts) > 1:
        lanes, numbers = slices_of_full_batches(starts[:1], n_lanes, slice_of_batch, global_batch)
        rounds = (starts - starts[0]) // n_lanes
        return np.tile(lanes, len(starts)), (numbers[np.newaxis, :] + rounds[:, np.newaxis]).ravel()
    first_lane = (starts % n_lanes)[:, np.newaxis]
    cyclic = first_lane + extra > n_lanes
    middle_lane = np.where(cyclic, first_lane + extra - n_lanes, first_lane)
    last_lane = np.where(cyclic, first_lane, first_lane + extra)
    outer, inner = share + cyclic, share + ~cyclic
    middle_row = middle_lane * outer
    last_row = middle_row + (last_lane - middle_lane) * inner
    in_last = rows >= last_row
    in_middle = (rows >= middle_row) & ~in_last
    per_lane = np.maximum(np.where(in_middle, inner, outer), 1)
    run_row = np.where(in_last, last_row, np.where(in_middle, middle_row, 0))
    run_lane = np.where(in_last, last_lane, np.where(in_middle, middle_lane, 0))
    steps, turn = np.divmod(rows - run_row, per_lane)
    lanes = run_lane + steps
    numbers = (starts // n_lanes)[:, np.newaxis] + (lanes < first_lane) + turn
    return lanes.ravel(), numbers.ravel()


def slice_of_any_batch(
    batch: range, n_samples: int, n_lanes: int, slice_of_batch: range
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """A slice of the global batch of some positions, wherever it lies and however short it is.

    Args:
        batch: the positions of the batch in the epoch's order, all below `n_samples`.
        n_samples: the samples of the epoch.
        n_lanes: the number of lanes.
        slice_of_batch: the rows that are wanted; those behind its own are the first positions of the order.

    Returns:
        Lanes and numbers of the batch's own rows, then lanes and numbers of the rows that fill up, int64 each.
    """
    positions = np.arange(batch.start, batch.stop, dtype=np.int64)
    lanes, numbers = lanes_and_numbers(positions, n_samples, n_lanes)
    lane_major = np.argsort(lanes, kind="stable")
    n_own, first_row, end_row = len(batch), slice_of_batch.start, slice_of_batch.stop
    own = lane_major[first_row : min(end_row, n_own)]
    wrapped = np.arange(max(first_row, n_own), max(end_row, n_own), dtype=np.int64) - n_own
    return lanes[own], numbers[own], *lanes_and_numbers(wrapped % n_samples, n_samples, n_lanes)


@dataclass(frozen=True, slots=True)
class Share:
    """Which batches of a rank: `number`, `number + of`, ..., counted from the position at which the pass begins.

    Attributes:
        number: of the share.
        of: how many shares there are.

    Raises:
        ValueError: there is no such share.
    """

    number: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"number={self.number} is not one of {self.of} shares, which are counted from 0")

    def batches(self, full: int, last_rows: int, before: int) -> tuple[int, int]:
        """The batches of the share among the next ones of the rank.

        Args:
            full: how many of the next batches are whole.
            last_rows: of the rank in the short batch behind them; 0 if there is none.
            before: how many come before the next one of the share.

        Returns:
            How many whole ones, and the rows of the share in the short one.
        """
        has_last = full >= before and (full - before) % self.of == 0
        return max(0, -(-(full - before) // self.of)), last_rows if has_last else 0


WHOLE = Share()
"""All that a rank has."""


def slice_of_rank(n_samples: int, rank: int, world_size: int, *, pad: bool) -> range:
    """The rows of a global batch of `n_samples` that a rank has.

    Args:
        n_samples: the batch's own; it may be short.
        rank: the rank.
        world_size: the number of ranks.
        pad: rows follow that fill up to a multiple of the world size.
    """
    n_rows = n_samples + (-n_samples % world_size if pad else 0)
    return range(*rank_bounds(n_rows, rank, world_size))


@dataclass(frozen=True, slots=True)
class EpochStart:
    """Which epoch, and from which position of its order, for which rank.

    Attributes:
        numbers: int64[M], the epoch's samples, where a sampler names them.
        number: of the pass, counted through a loader's life: an epoch may be started several times.
        share: what part of the rank's batches is wanted.
    """

    epoch: int
    position: int
    rank: int
    world_size: int
    numbers: NDArray[np.int64] | None = field(default=None, compare=False)
    number: int = 0
    share: Share = WHOLE

    @property
    def identity(self) -> tuple[int, int, int]:
        """What identifies a start among those requested or prepared: the pass, the epoch, and the position."""
        return self.number, self.epoch, self.position
