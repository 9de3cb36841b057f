"""A local shard that was rewritten with the size that it had: found by some of its fields."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from indexed_shards import index_shards

from streamload import ShardWriter, StreamLoader, TarDataset
from streamload.errors import DatasetIndexError

LATER_NS = 1_000_000_000


def write(folder: Path, name: str, labels: list[int]) -> Path:
    """A shard whose size does not depend on the labels, with its index beside it."""
    with ShardWriter(folder / f"{name}-%06d.tar", overwrite=True) as writer:
        for number, label in enumerate(labels):
            writer.write({"__key__": f"{name}{number:03d}", "npy": np.zeros(3), "cls": label})
    return folder / f"{name}-000000.tar"


def touched(shard: Path) -> None:
    status = shard.stat()
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + LATER_NS))


def labels_of(folder: Path) -> list[int]:
    with StreamLoader(folder, 10, fields=("cls",), num_workers=0) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


@pytest.fixture
def stale(tmp_path: Path) -> Path:
    """The index is of labels that were corrected since."""
    shard = write(tmp_path / "set", "a", [1] * 10 + [0] * 90)
    other = write(tmp_path / "new", "a", [1] * 50 + [0] * 50)
    assert shard.stat().st_size == other.stat().st_size
    shutil.copy(other, shard)
    touched(shard)
    return tmp_path / "set"


def test_another_shard_of_the_same_size_is_refused_with_what_to_do(stale: Path) -> None:
    with pytest.raises(DatasetIndexError, match=r"field 'cls' of this sample is another; rebuild the index") as caught:
        labels_of(stale)
    assert caught.value.url == str(stale / "a-000000.tar")
    assert caught.value.key is not None
    assert caught.value.offset is not None


def test_labels_of_the_index_are_not_those_of_a_shard_that_was_changed(stale: Path) -> None:
    with TarDataset(stale, fields=("cls",)) as dataset, pytest.raises(DatasetIndexError, match="changed since it was"):
        print(dataset.labels)
    with pytest.raises(DatasetIndexError, match="changed since it was indexed"):
        StreamLoader(stale, 10, fields=("cls",), shuffle=True, weights="balanced", num_workers=0)


def test_a_shard_in_the_place_of_another_is_found(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", [1] * 20), write(tmp_path, "b", [2] * 20)
    shutil.copy(second, first)
    with pytest.raises(DatasetIndexError, match="changed since it was indexed"):
        labels_of(tmp_path)


def test_other_values_under_the_same_labels_are_found(tmp_path: Path) -> None:
    shard = write(tmp_path / "set", "a", [1] * 20)
    with ShardWriter(tmp_path / "new") as writer:
        for number in range(20):
            writer.write({"__key__": f"b{number:03d}", "npy": np.ones(3), "cls": 1})
    os.utime(tmp_path / "new" / "shard-000000.tar", ns=(shard.stat().st_atime_ns, shard.stat().st_mtime_ns))
    shutil.copy2(tmp_path / "new" / "shard-000000.tar", shard)
    with pytest.raises(DatasetIndexError, match="field 'npy' of this sample is another"):
        labels_of(tmp_path / "set")


def test_with_the_times_of_another_index_too(stale: Path) -> None:
    shard = stale / "a-000000.tar"
    index_shards([os.fspath(shard)])
    assert labels_of(stale) == [1] * 50 + [0] * 50
    status = shard.stat()
    shutil.copy(write(stale.parent / "third", "a", [0] * 100), shard)
    with pytest.raises(DatasetIndexError, match="changed since it was indexed"):
        labels_of(stale)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` and `rsync -t` do
    with pytest.raises(DatasetIndexError, match="changed since it was indexed"):
        labels_of(stale)


def test_a_copy_with_another_time_is_read(tmp_path: Path) -> None:
    shard = write(tmp_path, "a", list(range(30)))
    touched(shard)
    assert labels_of(tmp_path) == list(range(30))


@pytest.mark.parametrize("samples", [1, 2, 15, 16, 17])
def test_any_number_of_samples_and_the_last_one_too(tmp_path: Path, samples: int) -> None:
    shard = write(tmp_path / "set", "a", [1] * samples)
    touched(shard)
    assert labels_of(tmp_path / "set") == [1] * samples
    shutil.copy(write(tmp_path / "new", "a", [1] * (samples - 1) + [2]), shard)
    touched(shard)
    with pytest.raises(DatasetIndexError, match=rf"a{samples - 1:03d}"):
        labels_of(tmp_path / "set")
