"""Runs of a loader whose options, storage and faults are drawn: combinations meet of which nobody thought."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from servers.faults import Script

SHARDS: dict[str, list[list[int]]] = {
    "even": [[400] * count for count in (40, 17, 33, 1, 60)],
    "uneven": [[8 * (number % 5) for number in range(7)]] * 9,
    "large": [[40_000] * 60, [40_000] * 40],
    "lopsided": [[16]] * 3 + [[16] * 200] + [[16]] * 2,
}
"""For each dataset the lengths in bytes of the arrays in each shard."""

FORMS = ["indexed", "indexed", "plain", "gz", "zst"]

FAULTS: list[dict[str, Any]] = [
    {},
    {"first_byte_s": 0.01},
    {"cut_share": 0.3},
    {"cut_share": 1.0, "only": ".tar"},  # small files are read whole, and so is each range by fsspec
    {"reset_share": 0.3},
    {"status": 503, "status_share": 0.3},
    {"first_byte_s": 0.005, "sleep_share": 0.02, "sleep_s": 10.0},
]


@dataclass(frozen=True, slots=True)
class RandomRun:
    """What is asked of a loader, and how it has to make do.

    Attributes:
        dataset: a name in `SHARDS`.
        form: how the dataset is stored.
        requested: options that say what comes.
        means: options that must not change it.
        epochs: how many, one after the other.
        script: what goes wrong where the dataset is remote; None reads it from the disk.
        through_fsspec: read with `filesystem=`.
        cached: with a disk cache.
        kills: the modules of which a process is killed on the way, if one runs.
        place: of a stop on the way, from 0 to 1, after which another loader goes on.
        moves: the other loader reads from the disk, without workers.
    """

    dataset: str
    form: str
    requested: dict[str, Any]
    means: dict[str, Any]
    epochs: int
    script: Script | None
    through_fsspec: bool
    cached: bool
    kills: tuple[str, ...]
    place: float
    moves: bool


def draw_run(seed: int) -> RandomRun:
    """The run of this number, always the same one."""
    rng = random.Random(seed)
    dataset, form = rng.choice(list(SHARDS)), rng.choice(FORMS)
    requested = _draw_options(rng, dataset, has_index=form == "indexed")
    is_remote = rng.random() < 0.7
    means = _draw_means(rng)
    faults = rng.choice(FAULTS) if is_remote else {}
    return RandomRun(
        dataset=dataset,
        form=form,
        requested=requested,
        means=means,
        epochs=rng.choice([1, 1, 2]),
        script=Script(seed=seed, **faults) if is_remote else None,
        through_fsspec=is_remote and rng.random() < 0.2 and faults.get("cut_share") != 1.0,
        cached=is_remote and rng.random() < 0.3,
        place=rng.random(),
        moves=rng.random() < 0.5,
        kills=tuple(module for module in ("workers.worker", "streamload.feeder") if rng.random() < 0.4),
    )


def _draw_options(rng: random.Random, dataset: str, *, has_index: bool) -> dict[str, Any]:
    requested: dict[str, Any] = {
        "batch_size": rng.choice([1, 2, 7, 16, 64, 500]),
        "shuffle": rng.random() < 0.6 and rng.choice([1, 10, 1000]),
        "seed": rng.randrange(5),
        "drop_last": rng.random() < 0.3,
        "on_error": rng.choice(["raise", "skip", "replace"]),
    }
    if rng.random() < 0.5:
        world_size = rng.choice([2, 3])
        requested |= {"rank": rng.randrange(world_size), "world_size": world_size, "pad": rng.random() < 0.5}
    if rng.random() < 0.3:
        requested["lanes"] = rng.choice([1, 2, 3, 4])
    if has_index and rng.random() < 0.2:
        requested["epoch_size"] = rng.choice([10, 100, 1000])
    if has_index and requested["shuffle"] and rng.random() < 0.2:
        requested["weights"] = "balanced"
    if dataset == "uneven":
        requested["collate_fn"] = list
    if rng.random() < 0.4:
        requested["transform"] = _refuses(rng.choice([5, 11, 40]))
    return requested


def _draw_means(rng: random.Random) -> dict[str, Any]:
    workers = rng.choice([0, 1, 2, 2, 3])
    return {
        "num_workers": workers,
        "prefetch_batches": rng.choice([1, 2, 4, 8]),
        "memory_budget": rng.choice(["auto", "64MB"]),
    }


class RefusedError(ValueError):
    """What a transform raises in these runs."""


def _refuses(every: int) -> Callable[[tuple[Any, Any]], tuple[Any, Any]]:
    """A transform that fails on one of so many samples."""

    def transform(sample: tuple[Any, Any]) -> tuple[Any, Any]:
        if int(sample[1]) % every == 3:
            raise RefusedError(f"sample {sample[1]}")
        return sample

    return transform
