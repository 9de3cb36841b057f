"""What `weights="balanced"` is for: a small model that is trained on 95:5 data finds more of the rare class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from streamload import ShardWriter, StreamLoader


def points(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two clouds that overlap, the second of which has every twentieth point."""
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % 20 == 0).astype(np.int64)
    return (generator.normal(size=(count, 4)) + 1.1 * labels[:, np.newaxis]).astype(np.float32), labels


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("balance") / "shards"
    values, labels = points(2_000, seed=0)
    for shard in range(4):
        with ShardWriter(folder / f"part{shard}-%06d.tar") as writer:
            for number in range(shard * 500, (shard + 1) * 500):
                sample = {"__key__": f"{number:06d}", "npy": values[number], "cls": int(labels[number])}
                writer.write(sample)
    return os.fspath(folder)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A model as small as this one only waits for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recalls(source: str, weights: str | None) -> tuple[float, float]:
    """Train for three epochs; the parts of the common and of the rare class that are found in other points."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with StreamLoader(source, 50, shuffle=True, fields=("npy", "cls"), num_workers=0, weights=weights) as loader:
        for _ in range(3):
            for values, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(values), labels).backward()
                optimizer.step()
    values, labels = (torch.from_numpy(array) for array in points(4_000, seed=1))
    with torch.no_grad():
        found = model(values).argmax(dim=1)
    common, rare = (float((found[labels == label] == label).float().mean()) for label in (0, 1))
    return common, rare


@pytest.mark.exhaustive
def test_balanced_weights_find_more_of_the_rare_class(source: str) -> None:
    common, rare = recalls(source, None)
    balanced_common, balanced_rare = recalls(source, "balanced")
    assert common > 0.95
    assert balanced_rare > rare + 0.2
    assert balanced_rare > 0.8
    assert balanced_common > 0.8
