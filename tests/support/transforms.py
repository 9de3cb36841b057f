"""Transforms for tests, in a module that imports little: workers import it, and importing torch takes them seconds."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np


def slow(value: int) -> int:
    """Takes two milliseconds."""
    time.sleep(0.002)
    return value


def negative(value: int) -> int:
    """With the other sign."""
    return -value


class PickyError(Exception):
    """An exception that does not unpickle by itself."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"{what}: {number}")
        self.number = number


def raise_on_33(value: int) -> int:
    """Refuses one value."""
    if value == 33:
        raise PickyError(value, "no")
    return value


def wait_a_little(sample: Any) -> Any:
    """Keeps batches from being so quick to make that many are in flight."""
    time.sleep(0.001)
    return sample


def as_list(samples: list[Any]) -> list[Any]:
    """A `collate_fn` that leaves the samples as they are."""
    return samples


def first_bytes(samples: list[tuple[bytes]]) -> list[int]:
    """A `collate_fn` for data that its first byte tells."""
    return [content[0] for (content,) in samples]


def draw(label: int) -> np.ndarray:
    """A label with two random numbers."""
    return np.array([label, random.getrandbits(30), np.random.randint(2**30)])


def talkative(label: int) -> int:
    """Logs on each level, by a logger and by the root's."""
    log = logging.getLogger("mine.deep")
    log.debug("debug of %d", label)
    log.info("info of %d", label)
    logging.info("root's info of %d", label)
    if label == 1:
        try:
            raise ValueError("caught")
        except ValueError:
            log.exception("went on")
    return label


class Noting:
    """A transform that notes every sample that it is called with, in a file that all workers append to."""

    def __init__(self, path: Path, pause_s: float = 0.0) -> None:
        self.path = os.fspath(path)
        self.pause_s = pause_s

    def __call__(self, value: int) -> int:
        time.sleep(self.pause_s)
        with open(self.path, "ab") as file:
            file.write(f"{value}\n".encode())
        return value

    def made(self) -> int:
        return len(Path(self.path).read_bytes().splitlines())


def is_bad(value: int) -> bool:
    """Whether a number is one of the three in ten on which `raise_on_bad` raises."""
    return zlib.crc32(b"%d" % value) % 10 < 3


class Scaled:
    """A transform that can be changed in place."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: int) -> int:
        return value * self.factor


class NeverTwiceTheSame:
    """Pickles differ although nothing has changed."""

    pickled = itertools.count()

    def __reduce__(self) -> Any:
        return NeverTwiceTheSame, (), {"number": next(NeverTwiceTheSame.pickled)}

    def __call__(self, value: int) -> int:
        return os.getpid()


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


def mistaken(value: int) -> int:
    if value == 5:
        raise TypeError("a mistake")
    return value


def note_process(folder: str, _worker: int) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()


def labels_of(samples: list[Any]) -> list[int]:
    """Checks a batch, and keeps only its labels, so that little is written to slots."""
    for array, label in samples:
        assert int(array[0]) == label % 251
        assert int(array[-2]) == (len(array) // 4 - 1 >> 16) & 255 ^ (label % 251)
    return [label for _, label in samples]


def large_result(samples: Any) -> Any:
    """20 MiB for each sample."""
    return np.zeros((len(samples), 20 << 20), np.uint8)
