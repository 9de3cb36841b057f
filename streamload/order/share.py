"""What part of a rank's batches one of several feeders makes: some rows of each, or each so many-th batch."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.order.slices import rank_bounds

__all__ = ["WHOLE", "Share", "slice_of_rank"]


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows, or which batches, of a rank; by default all of them.

    The rows of a batch of the rank are the concatenation of the shares `number = 0, 1, ..., of - 1` of it, whatever
    there is of it: of a short one some shares have no row, and then no batch. With `whole_batches` the share has batch
    `number`, `number + of`, ..., counted from the position at which the pass begins.

    Attributes:
        number: of the share.
        of: how many shares there are.
        whole_batches: shares are made of batches, not of rows.

    Raises:
        ValueError: there is no such share.
    """

    number: int = 0
    of: int = 1
    whole_batches: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"number={self.number} is not one of {self.of} shares, which are counted from 0")

    def rows(self, n_rows: int) -> tuple[int, int]:
        """The first row of a batch of `n_rows` of the rank that belongs to the share, and the end of its rows."""
        return (0, n_rows) if self.whole_batches else rank_bounds(n_rows, self.number, self.of)

    @property
    def step(self) -> int:
        """The share has one of so many consecutive batches."""
        return self.of if self.whole_batches else 1

    @property
    def batches_before(self) -> int:
        """How many batches of the rank come before the first of the share."""
        return self.number if self.whole_batches else 0

    def batches(self, full: int, last_rows: int, before: int) -> tuple[int, int]:
        """The batches of the share among the next ones of the rank.

        Args:
            full: how many of the next batches are whole.
            last_rows: of the rank in the short batch behind them; 0 if there is none.
            before: how many come before the next one of the share.

        Returns:
            How many whole ones, and the rows of the share in the short one.
        """
        first, end = self.rows(last_rows)
        has_last = full >= before and (full - before) % self.step == 0
        return max(0, -(-(full - before) // self.step)), end - first if has_last else 0


WHOLE = Share()
"""All that a rank has."""


def slice_of_rank(n_samples: int, rank: int, world_size: int, share: Share, *, pad: bool) -> range:
    """The rows of a global batch of `n_samples` that a share of a rank has.

    Args:
        n_samples: the batch's own; it may be short.
        rank: the rank.
        world_size: the number of ranks.
        share: of the rank's rows.
        pad: rows follow that fill up to a multiple of the world size.
    """
    n_rows = n_samples + (-n_samples % world_size if pad else 0)
    first_row, end_row = rank_bounds(n_rows, rank, world_size)
    first, end = share.rows(end_row - first_row)
    return range(first_row + first, first_row + end)
