"""torch's DataLoader over one file for each sample in a folder for each class, as torchvision's ImageFolder has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from decoding import decoders
from sample_table import MappedShards, read_positions
from torch.utils.data import DataLoader, Dataset
from workloads import Workload

from peers import WORKERS


class FolderDataset(Dataset[Any]):
    """Files below folders whose names are the labels. They are listed when it is made."""

    def __init__(self, root: Path, field: str, labelled: bool) -> None:
        self._files: list[tuple[str, int]] = []
        for label in sorted(os.listdir(root)):
            with os.scandir(root / label) as entries:
                self._files += [(entry.path, int(label)) for entry in entries]
        (self._decode,) = decoders([field])
        self._labelled = labelled

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> Any:
        path, label = self._files[number]
        with open(path, "rb") as file:
            value = torch.from_numpy(self._decode(file.read()))
        return (value, label) if self._labelled else (value,)


def _copy_files(workload: Workload) -> Path:
    def make(folder: Path) -> None:
        field = workload.fields[0]
        positions = [rows.tolist() for rows in read_positions(workload)]
        with MappedShards(workload) as shards:
            for number, rows in enumerate(zip(*positions, strict=True)):
                label = bytes(shards.field(rows[1])).decode() if len(rows) > 1 else "0"
                (folder / label).mkdir(exist_ok=True)
                (folder / label / f"{number:08d}.{field}").write_bytes(shards.field(rows[0]))

    return workload.made_once("files", make)


class Files:
    """Workers that live as long as the loader; each epoch a permutation of all samples."""

    processes = 1

    def __init__(self, workload: Workload, *, pin_memory: bool = False) -> None:
        dataset = FolderDataset(_copy_files(workload), workload.fields[0], "cls" in workload.fields)
        self._loader = DataLoader(
            dataset,
            workload.batch_size,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
            pin_memory=pin_memory,
        )

    @staticmethod
    def prepare(workload: Workload) -> None:
        _copy_files(workload)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        del self._loader  # its workers end with it
