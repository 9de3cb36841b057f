"""Which batches of a rank one of several feeders makes: each so many-th one."""

from __future__ import annotations

from dataclasses import dataclass

from streamload.order.slices import rank_bounds


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
