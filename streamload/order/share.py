"""Where a pass begins, and which rows a process makes: a rank's slice of each batch, and a share of its batches.

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


def lanes_and_numbers(positions: IntArray, n_samples: int, n_lanes: int) -> tuple[IntArray, IntArray]:
    """Return for each position of the epoch's order its lane and its number in the lane, int64 each."""
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
    """Cut the same slice from whole global batches within the full rounds, without making the rest of them.

    A batch of B positions from s on holds `B // L` numbers of each lane, and one more of the `B % L` lanes from
    `s % L` on, cyclically. So the lanes fall into three runs of equal counts, and one division gives the lane and the
    number of a row.

    Args:
        starts: int64[m], the position at which each global batch starts.
        n_lanes: the number of lanes, L.
        slice_of_batch: the rows to cut from each batch.
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


@dataclass(frozen=True, slots=True)
class Share:
    """Batches `number`, `number + of`, ... of a rank, counted from the position at which the pass begins.

    Attributes:
        number: the share's, below `of`.
        of: the number of shares.
    """

    number: int = 0
    of: int = 1

    def batches(self, full: int, last_rows: int, before: int) -> tuple[int, int]:
        """Return the share's whole batches among the next `full` ones of the rank, and its rows in the short last one.

        The next batch of the share comes after `before` others.
        """
        has_last = full >= before and (full - before) % self.of == 0
        return max(0, -(-(full - before) // self.of)), last_rows if has_last else 0


WHOLE = Share()
"""All batches of a rank."""


def slice_of_rank(n_samples: int, rank: int, world_size: int, *, pad: bool) -> range:
    """Return a rank's rows of a global batch. Slices differ by at most one row, and the first ranks get more.

    With `pad`, rows that fill up to a multiple of the world size follow the `n_samples` of the batch.
    """
    share, extra = divmod(n_samples + (-n_samples % world_size if pad else 0), world_size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


@dataclass(frozen=True, slots=True)
class EpochStart:
    """Which epoch, and from which position of its order, for which rank.

    Attributes:
        numbers: int64[M], the epoch's samples, if there is a sampler.
        number: of the pass, counted through a loader's life: an epoch may be started several times.
        share: the wanted batches of the rank.
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
        """What tells starts apart: the pass, the epoch, and the position."""
        return self.number, self.epoch, self.position
