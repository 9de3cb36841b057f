"""Where each sample's fields lie in the shards, for the loaders that read them by position."""

from __future__ import annotations

import mmap
import tarfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from decoding import decoders
from workloads import Workload


def make_table(workload: Workload) -> Path:
    """Write the table beside the shards, once, by reading every header; the folder that it is in."""

    def make(folder: Path) -> None:
        positions: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for number, path in enumerate(workload.shards()):
            with tarfile.open(path, "r:") as shard:
                for member in shard:
                    field = member.name.rpartition(".")[2]
                    positions[field].append((number, member.offset_data, member.offset_data + member.size))
        arrays = {field: np.array(positions[field], np.int64) for field in workload.fields}
        np.savez(folder / "positions.npz", **arrays)
        checked = workload.fields[-1] if "cls" in workload.fields else workload.fields[0]
        (decode,) = decoders([checked])
        with MappedShards(workload) as shards:
            total = sum(int(np.sum(decode(shards.field(row)), dtype=np.int64)) for row in arrays[checked].tolist())
        (folder / "sum.txt").write_text(str(total))

    return workload.made_once("table", make)


class MappedShards:
    """All shards, mapped into memory; a field is a view on them."""

    def __init__(self, workload: Workload) -> None:
        self._maps = []
        for path in workload.shards():
            with open(path, "rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.views = [memoryview(mapped) for mapped in self._maps]

    def field(self, row: list[int]) -> memoryview:
        """The bytes at (shard's number, start, end)."""
        shard, start, end = row
        return self.views[shard][start:end]

    def __enter__(self) -> MappedShards:
        return self

    def __exit__(self, *_: object) -> None:
        for view in self.views:
            view.release()
        for mapped in self._maps:
            mapped.close()


def read_positions(workload: Workload) -> list[np.ndarray]:
    """For each field an array of (shard's number, start, end), a row for each sample, int64."""
    with np.load(make_table(workload) / "positions.npz") as arrays:
        return [arrays[field] for field in workload.fields]


def expected_sum(workload: Workload) -> int:
    """The sum of all labels, or where there are none of all elements: a loader that gives every sample once has it."""
    return int((make_table(workload) / "sum.txt").read_text())
