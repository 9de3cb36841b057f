"""Compare a run that was killed and resumed with one that was not: the same steps, in order, and the same result."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["Comparison", "compare", "read_steps"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found out about two runs.

    Attributes:
        steps: how many steps the uninterrupted run took.
        redone: the steps that the other one took twice, since they came after its last checkpoint.
        same_order: it took the same steps, each with the same samples in the same order, augmented the same; the
            steps that it took twice were the same both times.
        same_accuracy: the accuracy after each epoch is the same.
        same_weights: the trained weights are the same, bit for bit.
        accuracy: of the uninterrupted run at its end.
    """

    steps: int
    redone: tuple[int, ...]
    same_order: bool
    same_accuracy: bool
    same_weights: bool
    accuracy: float

    @property
    def all_the_same(self) -> bool:
        """Whether nothing tells the two runs apart."""
        return self.same_order and self.same_accuracy and self.same_weights


def read_steps(run: str) -> list[tuple[int, str]]:
    """The number of each step that a run has done and the hash of its batch, in the order in which they were done."""
    with open(os.path.join(run, "steps.jsonl"), encoding="utf-8") as file:
        lines: list[Mapping[str, Any]] = [json.loads(line) for line in file]
    return [(line["step"], line["batch_sha256"]) for line in lines]


def compare(uninterrupted: str, resumed: str) -> Comparison:
    """Compare the folders of two finished runs.

    Args:
        uninterrupted: of the run that was left alone.
        resumed: of the run that was killed and went on.
    """
    expected, done = read_steps(uninterrupted), read_steps(resumed)
    results = [_read_result(run) for run in (uninterrupted, resumed)]
    return Comparison(
        steps=len(expected),
        redone=_redone(done),
        same_order=_goes_on_where_it_went_back(done) and sorted(set(done)) == expected,
        same_accuracy=results[0]["accuracies"] == results[1]["accuracies"],
        same_weights=results[0]["weights_sha256"] == results[1]["weights_sha256"],
        accuracy=results[0]["accuracies"][-1],
    )


def _read_result(run: str) -> Mapping[str, Any]:
    with open(os.path.join(run, "result.json"), encoding="utf-8") as file:
        result: Mapping[str, Any] = json.load(file)
    return result


def _redone(done: Sequence[tuple[int, str]]) -> tuple[int, ...]:
    numbers = [step for step, _ in done]
    return tuple(sorted({step for step in numbers if numbers.count(step) > 1}))


def _goes_on_where_it_went_back(done: Sequence[tuple[int, str]]) -> bool:
    """Whether each step follows the one before it, or goes back to one that was done already."""
    return all(after <= before + 1 for (before, _), (after, _) in pairwise(done))
