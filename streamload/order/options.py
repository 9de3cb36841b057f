"""Hold an order's options, and compute how many batches and rows each rank gets."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.errors import LoaderStateError
from streamload.order.sampling import Sampling
from streamload.order.share import slice_of_rank
from streamload.text import counted

MAX_LANES = 1 << 20
"""Maximum number of lanes; each costs memory in every process, and lanes beyond the number of ranks gain nothing."""

MAX_SAMPLES = 1 << 48
"""Maximum number of samples; keeps sums of thousands of counts within 63 bits."""


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Options that determine an order and its division into batches, besides the epoch and the dataset.

    Attributes:
        shuffle: permute the shards and shuffle within the window.
        window: how far, in samples, the shuffle may move a sample within its lane.
        batch_size: rows in one rank's batch.
        drop_last: drop the last samples that do not fill a global batch.
        pad: fill a short last global batch up to a multiple of the world size with the first samples of the order.
        sampling: None to deliver every sample once.
    """

    seed: int
    shuffle: bool
    window: int
    lanes: int
    batch_size: int
    drop_last: bool
    pad: bool
    sampling: Sampling | None = None

    @property
    def radius(self) -> int:
        """Return the window, or 0 if no sample moves within its lane."""
        return self.window if self.shuffle and self.window > 1 else 0


def full_batches_and_last_rows(
    options: OrderOptions, n_samples: int, rank: int, world_size: int, start: int
) -> tuple[int, int]:
    """Return how many full batches each rank has from `start` on, and how many rows `rank` has in a short last one.

    Raises:
        LoaderStateError: `start` lies outside the epoch.
    """
    if not 0 <= start <= n_samples:
        raise LoaderStateError(
            f"position {start} lies outside the epoch's {counted(n_samples, 'sample')}; pass a state as state_dict() "
            "returned it, or start without one"
        )
    full, left = divmod(n_samples - start, options.batch_size * world_size)
    return full, 0 if options.drop_last else len(slice_of_rank(left, rank, world_size, pad=options.pad))


def batches_per_rank(options: OrderOptions, n_samples: int, rank: int, world_size: int, start: int = 0) -> int:
    """Return the number of a rank's batches from `start` on.

    Raises:
        LoaderStateError: `start` lies outside the epoch.
    """
    full, last_rows = full_batches_and_last_rows(options, n_samples, rank, world_size, start)
    return full + (last_rows > 0)
