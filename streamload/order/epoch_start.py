"""Where a pass begins: which epoch, from which position of its order, for which rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from streamload.order.share import WHOLE, Share


@dataclass(frozen=True, slots=True)
class EpochStart:
    """Which epoch, and from which position of its order, for which rank.

    Attributes:
        numbers: int64[M], the epoch's samples, where a sampler names them.
        number: of the pass, counted through a loader's life: an epoch may be started several times.
        share: what part of the rank's batches is wanted.
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
        """What identifies a start among those requested or prepared: the pass, the epoch, and the position."""
        return self.number, self.epoch, self.position
