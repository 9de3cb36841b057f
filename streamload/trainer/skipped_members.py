"""Warnings of members that belong to no sample, and of epochs without a batch, at the line of the user's loop."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.tar.header_chain import LINK, MISSING_END
from streamload.text import counted
from streamload.warn_at_caller import warn_at_caller


class SkippedMembers:
    """Warn once of skipped links, of shards without an end-of-archive marker, and of epochs without a batch."""

    def __init__(self) -> None:
        self._skipped: Mapping[str, int] = {}
        self._reported: set[str] = set()

    def look_at(self, skipped: Mapping[str, int]) -> None:
        """Take in how many members the scans have skipped so far, by reason, and warn of those that may be missed."""
        self._skipped = skipped
        if links := skipped.get(LINK, 0):
            self._warn_once(
                "links",
                f"{counted(links, 'link')} skipped in the shards read so far: a link in an archive has no bytes of its "
                "own, and `tar` makes links of symbolic links and of files that have several names; if they belong to "
                "samples, pack the shards with `tar --hard-dereference -h`",
            )
        if cut := skipped.get(MISSING_END, 0):
            self._warn_once(
                "cut",
                f"{counted(cut, 'shard')} without an end-of-archive marker among those read so far, so it may have "
                "been cut after a member; `streamload verify` names each: fetch or pack it again",
            )

    def explain_emptiness(self) -> None:
        """Warn that no sample is in the shards, all of which have been scanned."""
        reasons = [f"{count:,} {reason}" for reason, count in self._skipped.items() if reason != MISSING_END]
        if reasons:
            why = (
                f"no sample is in the shards: all their members were skipped ({', '.join(reasons)}); "
                "the files of a sample are regular ones named KEY.FIELD, such as 0001.jpg and 0001.cls"
            )
        else:
            why = (
                "no sample is in the shards, so there is nothing to give; see that they are the right ones, and that "
                "what packed them had something to pack"
            )
        self._warn_once("empty", why)

    def explain_dropped_epoch(self, samples: int, batch_size: int, world_size: int) -> None:
        """Warn that `drop_last` leaves no batch of an epoch."""
        ranks = f" on each of {counted(world_size, 'rank')}" if world_size > 1 else ""
        self._warn_once(
            "dropped",
            f"drop_last=True drops the whole epoch, so there is no batch: it has {counted(samples, 'sample')}, and one "
            f"batch of batch_size={batch_size}{ranks} takes {batch_size * world_size:,}; give a smaller batch_size, or "
            "drop_last=False",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            warn_at_caller(message)
