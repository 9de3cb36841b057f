"""The warning that `drop_last=True` has dropped a whole epoch, at the line of the user's loop."""

from __future__ import annotations

from streamload.decode.dealing import EpochStart
from streamload.users_line import warn_at_users_line
from streamload.wording import counted

__all__ = ["NothingLeft"]


class NothingLeft:
    """Says once in a loader's life that an epoch has no batch because `drop_last` drops all of its samples.

    Args:
        drop_last: whether the samples are dropped that fill no batch on every rank; else nothing is ever said.
        batch_size: samples of a batch, on each rank.
    """

    def __init__(self, drop_last: bool, batch_size: int) -> None:
        self._may_say = drop_last
        self._batch_size = batch_size

    def is_possible(self, start: EpochStart) -> bool:
        """Whether a pass that begins there could have no batch for this reason, and that is still to be said."""
        return self._may_say and start.position == 0

    def look_at(self, start: EpochStart, samples: int | None) -> None:
        """Warn where an epoch of so many samples, among the ranks of the pass, has no batch.

        Nothing is said where the number is None, for not known yet, or 0: an empty dataset has lost nothing.
        """
        world_size = start.world_size
        block = self._batch_size * world_size
        if not self.is_possible(start) or samples is None or not 0 < samples < block:
            return
        self._may_say = False
        ranks = f" on each of {counted(world_size, 'rank')}" if world_size > 1 else ""
        have, need = f"has {counted(samples, 'sample')}", f"batch_size={self._batch_size}{ranks} takes {block:,}"
        warn_at_users_line(
            f"drop_last=True drops the whole epoch, so there is no batch: it {have}, and one batch of {need}; "
            "give a smaller batch_size, or drop_last=False"
        )
