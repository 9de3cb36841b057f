"""Warnings of members that belong to no sample, where somebody may miss them, at the line of the user's loop."""

from __future__ import annotations

from collections.abc import Mapping

from streamload.dataset.chain import LINK, MISSING_END
from streamload.users_line import warn_at_users_line
from streamload.wording import counted

__all__ = ["PassedOver"]


class PassedOver:
    """Says once each in a loader's life that links were passed over, and that no sample is in the shards.

    Attributes:
        emptiness_told: whether the latter has been said.
    """

    def __init__(self) -> None:
        self._skipped: Mapping[str, int] = {}
        self._links_told = False
        self.emptiness_told = False

    def look_at(self, skipped: Mapping[str, int]) -> None:
        """Take in how many members the scans have passed over so far, by reason, and warn of links among them."""
        self._skipped = skipped
        links = skipped.get(LINK, 0)
        if not links or self._links_told:
            return
        self._links_told = True
        warn_at_users_line(
            f"{counted(links, 'link')} passed over in the shards read so far: a link in an archive has no bytes of its "
            "own, and `tar` makes links of symbolic links and of files that have several names; if they belong to "
            "samples, pack the shards with `tar --hard-dereference -h`",
        )

    def explain_emptiness(self) -> None:
        """Warn that no sample is in the shards, all of which have been scanned."""
        if self.emptiness_told:
            return
        self.emptiness_told = True
        reasons = [f"{count:,} {reason}" for reason, count in self._skipped.items() if reason != MISSING_END]
        if reasons:
            warn_at_users_line(
                f"no sample is in the shards: all their members were passed over ({', '.join(reasons)}); "
                "the files of a sample are regular ones named KEY.FIELD, such as 0001.jpg and 0001.cls",
            )
        else:
            warn_at_users_line(
                "no sample is in the shards, so there is nothing to give; see that they are the right ones, and that "
                "what packed them had something to pack"
            )
