"""Warnings of members that belong to no sample, and of epochs without a batch, at the line of the user's loop."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.order.share import EpochStart
from streamload.tar.header_chain import LINK, MISSING_END
from streamload.text import counted
from streamload.warn_at_caller import warn_at_caller


class NothingLeft:
    """Warn once of an epoch that has no batch, because all of its samples are dropped or there is none."""

    def __init__(self, drop_last: bool, batch_size: int, skipped_members: SkippedMembers) -> None:
        self._may_say = drop_last
        self._batch_size = batch_size
        self._skipped_members = skipped_members

    def is_possible(self, start: EpochStart) -> bool:
        """Return True if a pass that begins there could have no batch for such a reason, and that was not reported."""
        return start.position == 0 and (self._may_say or not self._skipped_members.emptiness_reported)

    def explain_resumed_end(self, epoch: int) -> None:
        """Warn that a pass has no batch because it goes on after the last one of its epoch."""
        warn_at_caller(
            f"this pass has no batch: it goes on where a state was saved behind the last batch of epoch {epoch}, and "
            f"the next pass is epoch {epoch + 1}; a loop with its own count calls set_epoch({epoch + 1}) first"
        )

    def look_at(self, start: EpochStart, samples: int | None, in_shards: int | None = None) -> None:
        """Warn if an epoch has no batch."""
        if in_shards == 0:
            self._skipped_members.explain_emptiness()
        if samples == 0 or in_shards == 0:
            return
        world_size = start.world_size
        block = self._batch_size * world_size
        if not self._may_say or start.position or samples is None or samples >= block:
            return
        self._may_say = False
        ranks = f" on each of {counted(world_size, 'rank')}" if world_size > 1 else ""
        have, need = f"has {counted(samples, 'sample')}", f"batch_size={self._batch_size}{ranks} takes {block:,}"
        warn_at_caller(
            f"drop_last=True drops the whole epoch, so there is no batch: it {have}, and one batch of {need}; "
            "give a smaller batch_size, or drop_last=False"
        )


class SkippedMembers:
    """Warn once each of skipped links, of shards without an end-of-archive marker, and if there is no sample at all.

    Attributes:
        emptiness_reported: the last has been reported.
    """

    def __init__(self) -> None:
        self._skipped: Mapping[str, int] = {}
        self._reported: set[str] = set()
        self.emptiness_reported = False

    def look_at(self, skipped: Mapping[str, int]) -> None:
        """Take in how many members the scans have skipped so far, by reason, and warn of those that may be missed."""
        self._skipped = skipped
        links, cut = skipped.get(LINK, 0), skipped.get(MISSING_END, 0)
        if links and LINK not in self._reported:
            self._reported.add(LINK)
            warn_at_caller(
                f"{counted(links, 'link')} skipped in the shards read so far: a link in an archive has no bytes of its "
                "own, and `tar` makes links of symbolic links and of files that have several names; if they belong to "
                "samples, pack the shards with `tar --hard-dereference -h`",
            )
        if cut and MISSING_END not in self._reported:
            self._reported.add(MISSING_END)
            warn_at_caller(
                f"{counted(cut, 'shard')} without an end-of-archive marker among those read so far, so it may have "
                "been cut after a member; `streamload verify` names each: fetch or pack it again",
            )

    def explain_emptiness(self) -> None:
        """Warn that no sample is in the shards, all of which have been scanned."""
        if self.emptiness_reported:
            return
        self.emptiness_reported = True
        reasons = [f"{count:,} {reason}" for reason, count in self._skipped.items() if reason != MISSING_END]
        if reasons:
            warn_at_caller(
                f"no sample is in the shards: all their members were skipped ({', '.join(reasons)}); "
                "the files of a sample are regular ones named KEY.FIELD, such as 0001.jpg and 0001.cls",
            )
        else:
            warn_at_caller(
                "no sample is in the shards, so there is nothing to give; see that they are the right ones, and that "
                "what packed them had something to pack"
            )
