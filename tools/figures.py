"""What a dataset is, in numbers: pure arithmetic on the tables of its shards."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.fetch.budget import check_budget
from streamload.tar.table import ShardTable

__all__ = ["DatasetFigures", "FieldFigures", "Labels", "Tally", "least_budget_bytes", "samples_of_a_rank"]

_BUDGET_MARGIN = 1.05


@dataclass(frozen=True, slots=True)
class FieldFigures:
    """One field: how many samples have it, and its members' sizes."""

    samples: int
    bytes: int
    mean_bytes: float
    min_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Labels:
    """The whole numbers in `cls`.

    Attributes:
        counts: samples of each label, the most frequent first.
        unknown: samples of shards of which some sample has no whole number as `cls`.
    """

    counts: tuple[tuple[int, int], ...]
    unknown: int

    @property
    def imbalance(self) -> float:
        """How many times as frequent as the rarest label the most frequent one is."""
        return self.counts[0][1] / self.counts[-1][1]


@dataclass(frozen=True, slots=True)
class DatasetFigures:
    """A dataset.

    Attributes:
        bytes: of the shards as they are stored.
        samples_per_shard: min, median and max.
        fields: by name, in the order of their first appearance.
        labels: None where no sample has a `cls`, or none of the shards has whole numbers there.
    """

    shards: int
    samples: int
    bytes: int
    samples_per_shard: tuple[int, float, int]
    fields: dict[str, FieldFigures]
    labels: Labels | None


class _FieldTally:
    """What is added up of one field."""

    def __init__(self) -> None:
        self.samples = self.bytes = self.max_bytes = 0
        self.min_bytes: int | None = None

    def add(self, sizes: NDArray[np.int64]) -> None:
        least = int(sizes.min())
        self.samples += len(sizes)
        self.bytes += int(sizes.sum())
        self.min_bytes = least if self.min_bytes is None else min(self.min_bytes, least)
        self.max_bytes = max(self.max_bytes, int(sizes.max()))

    def figures(self) -> FieldFigures:
        return FieldFigures(self.samples, self.bytes, self.bytes / self.samples, self.min_bytes or 0, self.max_bytes)


class Tally:
    """Adds up tables, of which none is kept."""

    def __init__(self) -> None:
        self._shard_samples: list[int] = []
        self._bytes = self._unlabelled = 0
        self._fields: dict[str, _FieldTally] = {}
        self._labels: Counter[int] = Counter()

    def add(self, shard_bytes: int, table: ShardTable) -> None:
        """Count one shard; `shard_bytes` is its size as it is stored."""
        self._shard_samples.append(len(table))
        self._bytes += shard_bytes
        for number, name in enumerate(table.fields):
            sizes = table.member_size[table.member_field == number]
            if len(sizes):
                self._fields.setdefault(name, _FieldTally()).add(sizes)
        if table.labels is None:
            self._unlabelled += len(table)
            return
        values, counts = np.unique(table.labels, return_counts=True)
        self._labels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def figures(self) -> DatasetFigures:
        """What it comes to; at least one shard has been added."""
        counts = sorted(self._labels.items(), key=lambda item: (-item[1], item[0]))
        shards = np.array(self._shard_samples)
        return DatasetFigures(
            shards=len(shards),
            samples=int(shards.sum()),
            bytes=self._bytes,
            samples_per_shard=(int(shards.min()), float(np.median(shards)), int(shards.max())),
            fields={name: tally.figures() for name, tally in self._fields.items()},
            labels=Labels(tuple(counts), self._unlabelled) if counts else None,
        )


def least_budget_bytes(figures: DatasetFigures, *, window: int, ranks: int) -> int:
    """The memory_budget of each rank that a StreamLoader asks for where the shards are remote and there is no cache.

    It is what its refusal of a smaller one says: the least that is accepted, and a twentieth more.

    Args:
        figures: the dataset; its shards are not compressed.
        window: the shuffle_window in samples.
        ranks: the world size, and so the number of lanes.
    """

    def fits(budget_bytes: int) -> bool:
        try:
            check_budget(
                budget_bytes,
                window=window,
                batch_size=1,
                samples=figures.samples,
                data_bytes=figures.bytes,
                lanes_read=1,
                lanes=ranks,
                shards=figures.shards,
            )
        except ValueError:
            return False
        return True

    too_small, enough = 0, 1
    while not fits(enough):
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return int(enough * _BUDGET_MARGIN)


def samples_of_a_rank(samples: int, ranks: int) -> tuple[int, int]:
    """Samples of each rank in an epoch, filled up (`pad=True`), and the fewest that one gets with `pad=False`."""
    return -(-samples // ranks), samples // ranks
