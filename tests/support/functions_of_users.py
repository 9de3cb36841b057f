"""What users give a loader; workers import this module, so it imports little."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np


def stacked(rows: list[Any]) -> dict[str, Any]:
    return {"sum": sum(int(row[0].sum()) for row in rows), "ragged": [np.zeros(row[1]) for row in rows]}


def noisy(sample: tuple[Any, ...], rng: np.random.Generator) -> tuple[Any, ...]:
    return (*sample, rng.random())


def int_or_float(value: int) -> float:
    return value if value != 3 else 3.5


def uneven(sample: tuple[Any, ...]) -> Any:
    return sample[0][: 1 + (sample[1] == 3)]


def fails_at_the_end(sample: tuple[int, str]) -> tuple[int, str]:
    if int(sample[1]) >= 50:
        raise ValueError(sample[1])
    return sample


def slow(sample: Any) -> Any:
    time.sleep(0.002)
    return sample


def mistaken(value: int) -> int:
    if value == 5:
        raise TypeError("a mistake")
    return value


def note_process(folder: str, _worker: int) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()
