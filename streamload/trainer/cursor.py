"""Where the loop stands in its epochs, and where its next pass begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Cursor"]


@dataclass(slots=True)
class Cursor:
    """Shared by a pass, which moves it on, and its loader.

    Attributes:
        epoch: the epoch.
        position: samples of its order that the loop has been given, over all ranks.
        state: "ready" to begin or go on from here; "running"; or "left" by the user before the end.
        epoch_to_come: the epoch of the next pass, if the user has named one.
        finished: the epoch before this one was given to its end by this loader.
    """

    epoch: int = 0
    position: int = 0
    state: Literal["ready", "running", "left"] = "ready"
    epoch_to_come: int | None = None
    finished: bool = False

    def next_start(self) -> tuple[int, int]:
        """The epoch and the position at which the next pass begins."""
        if self.state == "ready" and self.epoch_to_come in (None, self.epoch):
            return self.epoch, self.position
        return (self.epoch + 1 if self.epoch_to_come is None else self.epoch_to_come), 0

    def to_save(self) -> tuple[int, int]:
        """The epoch and the position to resume from: here, unless the user has named another epoch since a pass."""
        if self.state != "running" and self.epoch_to_come is not None:
            return self.next_start()
        return self.epoch, self.position

    def finish_epoch(self) -> None:
        """All of the epoch was given; the next one begins at its start."""
        self.epoch += 1
        self.position = 0
        self.state = "ready"
        self.finished = True

    def goes_on_at(self, epoch: int, position: int) -> bool:
        """Whether a pass that begins there follows one that was finished: the feeder has begun it by itself."""
        return self.finished and (epoch, position) == (self.epoch, 0)
