"""Local shards that somebody cuts while they are read: an error that says so, and no process that must live dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from make_shards import write_numbers

from streamload import StreamLoader, TarDataset
from streamload.errors import ShardChangedError
from streamload.tar.scan import scan_file


def mapped_here(folder: str) -> list[str]:
    """The files below a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines() if os.path.exists("/proc/self/maps") else []
    return [line for line in lines if folder in line]


@pytest.fixture
def source(tmp_path: Path) -> str:
    """One shard of 400 samples, which takes several tasks."""
    return write_numbers(tmp_path / "s", [400], width=2000)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("fields", [("npy",), ("cls",)])
def test_a_shard_that_is_cut_in_use_ends_the_pass(source: str, fields: tuple[str, ...], shuffle: bool) -> None:
    (shard,) = Path(source).glob("*.tar")
    with StreamLoader(source, 40, fields=fields, shuffle=shuffle, on_error="skip", num_workers=0) as loader:
        batches = iter(loader)
        next(batches)
        assert mapped_here(source) == []
        os.truncate(shard, 4096)
        with pytest.raises(ShardChangedError, match="truncated while it was in use.*create a new loader") as caught:
            list(batches)
        assert caught.value.url == str(shard)
        assert caught.value.key is not None


def test_a_dataset_maps_no_shard_and_says_that_one_was_cut(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [50], index=False)
    (shard,) = Path(source).glob("*.tar")
    with TarDataset(source, fields=("npy", "cls")) as dataset:
        assert dataset.labels.tolist() == list(range(50))
        assert int(dataset[49][1]) == 49
        assert mapped_here(source) == []
        os.truncate(shard, 4096)
        with pytest.raises(ShardChangedError, match="truncated while it was in use"):
            dataset[49]
        del dataset.labels
        with pytest.raises(ShardChangedError, match="was cut or changed"):
            print(dataset.labels)


@pytest.mark.parametrize("cut", [0, 512, 5000])
def test_a_shard_that_is_cut_while_it_is_scanned(source: str, cut: int) -> None:
    (shard,) = Path(source).glob("*.tar")
    size = shard.stat().st_size
    os.truncate(shard, cut)
    descriptor = os.open(shard, os.O_RDONLY)
    try:
        with pytest.raises(ShardChangedError, match="shorter while it was read"):
            scan_file(descriptor, size, str(shard))
    finally:
        os.close(descriptor)
