"""Memory: it does not grow from epoch to epoch, and a batch that the user keeps is never written to again."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_shards import write_numbers
from matrix import exhaustive
from transforms import wait_a_little
from tree_memory import tree_bytes

from streamload import ShardWriter, StreamLoader


def test_twenty_epochs_do_not_grow(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [2500] * 4, width=100)
    sizes = []
    with StreamLoader(source, 100, True, fields=("npy", "cls"), num_workers=2) as loader:
        for _ in range(20):
            assert sum(len(labels) for _, labels in loader) == 10_000
            sizes.append(tree_bytes())
    growth = np.polyfit(range(18), np.array(sizes[2:]) / 1e6, 1)[0]
    assert growth < 0.5, f"grows by {growth:.2f} MB an epoch: {sizes}"


def test_kept_batches_are_never_overwritten_and_hold_no_descriptors(tmp_path: Path) -> None:
    """Also where the loop keeps only a part of each."""
    source = write_numbers(tmp_path / "shards", [1500, 1500])
    with StreamLoader(source, 2, True, fields=("npy", "cls"), num_workers=2) as loader:
        kept = list(loader)
        rows = [(values[1], labels[1]) for values, labels in loader]
        assert len(os.listdir("/proc/self/fd")) < 200
    assert len(kept) == len(rows) == 1500
    for values, labels in kept:
        assert torch.equal(values[:, 0].long(), labels)
    assert all(int(value[0]) == int(label) for value, label in rows)
    assert sorted(int(label) for _, labels in kept for label in labels) == list(range(3000))


def test_larger_batches_than_before_fit(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shards") as writer:
        for number in range(60):
            writer.write({"__key__": f"{number:03d}", "npy": np.full(number // 10 * 1000 + 1, number)})
    with StreamLoader(tmp_path / "shards", 10, fields=("npy",), num_workers=2, prefetch_batches=1) as loader:
        for _ in range(2):
            assert [(len(batch[0][0]), int(batch[0][0, -1])) for batch in loader] == [
                (number * 1000 + 1, number * 10) for number in range(6)
            ]


@pytest.mark.parametrize("fields", [("npy", "cls"), exhaustive((None,))])
def test_slots_come_back_as_soon_as_their_batch_is_gone(tmp_path: Path, fields: Any) -> None:
    source = write_numbers(tmp_path / "shards", [2000], width=2000)
    seen = 0
    gc.collect()
    gc.disable()  # a cycle that holds a batch would keep its slot until the next collection
    try:
        with StreamLoader(source, 20, fields=fields, transform=wait_a_little, num_workers=2) as loader:
            for batch in loader:
                seen = max(seen, slots_mapped())
                del batch
    finally:
        gc.enable()
    assert 1 < seen < 30, "a hundred batches go round in a few slots"


def slots_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:streamload")
