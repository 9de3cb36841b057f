"""Assign rows to processes: a rank's slice of each batch, and a share of its batches.

The order takes one sample of each of L lanes in turn. In the *full rounds*, while all lanes last, position g is number
`g // L` of lane `g % L`; the remaining positions, fewer than L, are the last samples of the lanes that are longer by
one. A global batch is sorted lane-major (by lane, then by number) and cut into one slice for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamload.order.lanes import lane_bounds

IntArray = NDArray[np.int64]


def lanes_and_numbers(positions: IntArray, n_samples: int, n_lanes: int) -> tuple[IntArray, IntArray]:
    """Return the lane and the number in the lane at each position of the epoch's order, int64 each."""
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
    """Return the same slice of several full batches within the full rounds, without building whole batches.

    A batch of B positions from s on holds `B // L` numbers of each lane, and one more of each of the `B % L` lanes from
    `s % L` on, cyclically. So lanes form three runs; the lanes of a run have equal counts, and one division gives a
    row's lane and number.

    Args:
        starts: int64[m], the position at which each global batch starts.
        n_lanes: the number of lanes, L.
        slice_of_batch: the rows to return of each batch.
        global_batch: rows per global batch, B.

    Returns:
        Lanes, and numbers in the lane, int64[m * len(slice)] each, batch by batch, lane-major.
    """
    if not len(starts):  # a batch may be far larger than the dataset
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = np.arange(slice_of_batch.start, slice_of_batch.stop, dtype=np.int64)[np.newaxis, :]
    share, extra = divmod(global_batch, n_lanes)
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
    """Batches `number`, `number + n_shares`, ... of a rank, counted from the start of the pass."""

    number: int = 0
    n_shares: int = 1

    def batches(self, full: int, last_rows: int, before: int) -> tuple[int, int]:
        """Return how many of the rank's next `full` batches this share gets, and its rows of a short last batch.

        `before` batches of other shares precede the next batch of this share.
        """
        has_last = full >= before and (full - before) % self.n_shares == 0
        return max(0, -(-(full - before) // self.n_shares)), last_rows if has_last else 0


WHOLE = Share()
"""All batches of a rank."""


def slice_of_rank(n_samples: int, rank: int, world_size: int, *, pad: bool) -> range:
    """Return a rank's rows of a global batch; the first ranks may get one row more than the others.

    With `pad`, filler rows extend the batch's `n_samples` to a multiple of the world size.
    """
    share, extra = divmod(n_samples + (-n_samples % world_size if pad else 0), world_size)
    start = rank * share + min(rank, extra)
    return range(start, start + share + (rank < extra))


@dataclass(frozen=True, slots=True)
class EpochStart:
    """An epoch, a position in its order, and the rank that reads from it.

    Attributes:
        numbers: int64[M], the epoch's samples, if there is a sampler.
        number: the pass's number among the loader's passes, since an epoch can be started several times.
        share: the rank's batches to read.
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
        """Return the values that distinguish two starts: pass, epoch and position."""
        return self.number, self.epoch, self.position
