"""The warning that an epoch has no batch, because `drop_last=True` drops all of it or no sample is in the shards."""

from __future__ import annotations

from streamload.decode.dealing import EpochStart
from streamload.trainer.passed_over import PassedOver
from streamload.users_line import warn_at_users_line
from streamload.wording import counted

__all__ = ["NothingLeft"]


class NothingLeft:
    """Says once in a loader's life that an epoch has no batch because all of its samples are dropped, or there is none.

    Args:
        drop_last: whether the samples are dropped that fill no batch on every rank.
        batch_size: samples of a batch, on each rank.
        passed_over: knows the members that belong to no sample.
    """

    def __init__(self, drop_last: bool, batch_size: int, passed_over: PassedOver) -> None:
        self._may_say = drop_last
        self._batch_size = batch_size
        self._passed_over = passed_over

    def is_possible(self, start: EpochStart) -> bool:
        """Whether a pass that begins there could have no batch for such a reason, and that is still to be said."""
        return start.position == 0 and (self._may_say or not self._passed_over.emptiness_told)

    def look_at(self, start: EpochStart, samples: int | None, *, scanned: bool = False) -> None:
        """Warn where an epoch of so many samples, among the ranks of the pass, has no batch.

        Nothing is said where the number is None, for not known yet; and of 0 only when all shards have been scanned,
        as it is known then whether there were members that belong to no sample.
        """
        if samples == 0 and start.position == 0:
            if scanned:
                self._passed_over.explain_emptiness()
            return
        world_size = start.world_size
        block = self._batch_size * world_size
        if not self._may_say or start.position or samples is None or samples >= block:
            return
        self._may_say = False
        ranks = f" on each of {counted(world_size, 'rank')}" if world_size > 1 else ""
        have, need = f"has {counted(samples, 'sample')}", f"batch_size={self._batch_size}{ranks} takes {block:,}"
        warn_at_users_line(
            f"drop_last=True drops the whole epoch, so there is no batch: it {have}, and one batch of {need}; "
            "give a smaller batch_size, or drop_last=False"
        )
