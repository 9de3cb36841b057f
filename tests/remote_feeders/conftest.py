"""The dataset of the tests of remote feeders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from streamload import ShardWriter


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """333 samples in seven shards, with fields of all kinds; two of them have an `npy` that is none."""
    folder = tmp_path_factory.mktemp("ray") / "shards"
    rng = np.random.default_rng(0)
    with ShardWriter(folder, max_count=50) as writer:
        for number in range(333):
            writer.write(
                {
                    "__key__": f"{number:05d}",
                    "npy": rng.integers(0, 255, (8, 9)).astype(np.uint8),
                    "cls": number % 7,
                    "txt": "t" * (number % 13),
                    "bin": rng.bytes(number % 50),
                    "bad.npy": b"no array" if number in (40, 41, 200) else np.full(3, number),
                }
            )
    assert len(os.listdir(folder)) == 8
    return folder
