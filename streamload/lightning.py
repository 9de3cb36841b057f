"""A loader for Lightning's Trainer. It needs nothing of Lightning's, so this imports nothing of it either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamload.loader import StreamLoader

__all__ = ["LightningLoader"]


@dataclass(frozen=True, slots=True)
class _BatchSampler:
    """What Lightning looks for a sampler in: before each epoch it sets that one's epoch."""

    sampler: StreamLoader


class LightningLoader(StreamLoader):
    """A `StreamLoader` whose epochs are those that Lightning's Trainer counts.

    So a run that is resumed from any of Lightning's checkpoints goes on with exactly the samples that it would have
    had: from one within an epoch, from one that was made behind an epoch's last batch, after which Lightning goes on
    with the next epoch, and from one between two epochs, of which Lightning loads no state into loaders. Arguments,
    and all else, are those of `StreamLoader`. With several processes it is to be made in a `train_dataloader` hook.
    """

    @property
    def batch_sampler(self) -> _BatchSampler:
        """Leads Lightning to `set_epoch`."""
        return _BatchSampler(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin a pass when its first batch is requested: Lightning makes iterators before it sets the epoch."""
        yield from self._begin()
