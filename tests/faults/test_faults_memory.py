"""Memory: it does not grow from epoch to epoch, and a batch that the user keeps is never written to again."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from make_shards import write_numbers
from matrix import exhaustive
from transforms import wait_a_little

from streamload import ShardWriter, StreamLoader
from streamload.memory import slots


def tree_bytes() -> int:
    """What this process and all that it has started hold for themselves, and the slots between them.

    Not their proportional share of libraries: that grows when another program on this machine ends.
    """
    found, slots = 0, {}
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        found += 1024 * next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous:"))
        for number in os.listdir(f"/proc/{process.pid}/fd"):
            if _is_slot(f"/proc/{process.pid}/fd/{number}"):
                slot = os.stat(f"/proc/{process.pid}/fd/{number}")
                slots[slot.st_ino] = slot.st_blocks * 512
    return found + sum(slots.values())


def test_twenty_epochs_do_not_grow(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [2500] * 4, width=100)
    sizes = []
    with StreamLoader(source, 100, True, fields=("npy", "cls"), num_workers=2) as loader:
        for _ in range(20):
            assert sum(len(labels) for _, labels in loader) == 10_000
            sizes.append(tree_bytes())
    growth = np.polyfit(range(18), np.array(sizes[2:]) / 1e6, 1)[0]
    assert growth < 0.5, f"grows by {growth:.2f} MB an epoch: {sizes}"


def test_kept_batches_are_never_overwritten(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [1500, 1500])
    kept = []
    with StreamLoader(source, 2, True, fields=("npy", "cls"), num_workers=2) as loader:
        for _ in range(2):
            kept += list(loader)
    assert len(kept) == 3000
    for values, labels in kept:
        assert torch.equal(values[:, 0].long(), labels)
    assert sorted(int(label) for _, labels in kept[:1500] for label in labels) == list(range(3000))


def test_kept_batches_hold_no_descriptors(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [1000])
    with StreamLoader(source, 1, fields=("cls",), num_workers=1) as loader:
        kept = list(loader)
        assert len(os.listdir("/proc/self/fd")) < 200
    assert [int(batch[0]) for batch in kept] == list(range(1000))


def test_a_part_of_a_batch_keeps_the_whole_alive(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [400])
    with StreamLoader(source, 4, fields=("npy",), num_workers=1) as loader:
        rows = [batch[0][1] for batch in loader]
    assert [int(row[0]) for row in rows] == list(range(1, 400, 4))


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


def test_memory_that_cannot_be_mapped_is_said_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_numbers(tmp_path / "shards", [40])
    before = len(os.listdir("/proc/self/fd"))

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "cannot map 4096 bytes: Cannot allocate memory")

    with StreamLoader(source, 4, fields=("cls",), num_workers=1) as loader:
        monkeypatch.setattr(slots, "map_memory", refuse)
        with pytest.raises(OSError, match="cannot map"):
            list(loader)
        assert len(os.listdir("/proc/self/fd")) <= before
        monkeypatch.undo()
        assert sum(len(labels) for (labels,) in loader) == 40


def slots_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:streamload")


def _is_slot(path: str) -> bool:
    try:
        return os.readlink(path).startswith("/memfd:streamload")
    except FileNotFoundError:  # the descriptor that listed them
        return False
