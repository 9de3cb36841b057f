"""The names of the classes: read from beside the shards, wherever these lie."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from servers.rclone import S3Server

from streamload import StreamLoader, TarDataset
from streamload.errors import DatasetIndexError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_numbers(folder, [5, 5])
    return folder


def name_classes(folder: Path, *names: str) -> None:
    numbers = {name: number for number, name in enumerate(names)}
    (folder / "classes.json").write_text(json.dumps({"classes": names, "class_to_idx": numbers}))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_names_are_those_beside_the_shards(source: Path, workers: int) -> None:
    name_classes(source, "bee", "cat")
    with StreamLoader(f"{source}/*.tar", num_workers=workers) as loader, TarDataset(source) as dataset:
        assert loader.classes == dataset.classes == ["bee", "cat"]
        name_classes(source, "other")
        assert loader.classes == ["bee", "cat"]
        assert pickle.loads(pickle.dumps(dataset)).classes == ["bee", "cat"]


def test_there_may_be_none(source: Path) -> None:
    with StreamLoader(source, num_workers=0) as loader, TarDataset(source) as dataset:
        assert loader.classes is None
        assert dataset.classes is None


@pytest.mark.parametrize("workers", [0, 1])
def test_they_are_read_from_a_bucket(source: Path, tmp_path: Path, rclone_s3: S3Server, workers: int) -> None:
    bucket = f"c{abs(hash(str(tmp_path))) % 10**10}"
    shutil.copytree(source, rclone_s3.folder / bucket / "without")
    name_classes(source, "bee", "cat")
    shutil.copytree(source, rclone_s3.folder / bucket / "data")
    options: dict[str, Any] = {"storage_options": rclone_s3.options}
    with StreamLoader(f"s3://{bucket}/data", num_workers=workers, **options) as loader:
        assert loader.classes == ["bee", "cat"]
    with TarDataset(f"s3://{bucket}/data", **options) as dataset:
        assert dataset.classes == ["bee", "cat"]
    with StreamLoader(f"s3://{bucket}/without", num_workers=workers, **options) as loader:
        assert loader.classes is None


def test_folders_that_agree_are_one_and_others_are_refused(source: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "more", [3])
    name_classes(source, "bee", "cat")
    name_classes(tmp_path / "more", "bee", "cat")
    with StreamLoader([source, tmp_path / "more"], num_workers=0) as loader:
        assert loader.classes == ["bee", "cat"]
    name_classes(tmp_path / "more", "cat", "bee")
    with StreamLoader([source, tmp_path / "more"], num_workers=0) as loader:
        with pytest.raises(DatasetIndexError, match="more/classes.json"):
            assert loader.classes


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"classes": "bee"}', '{"classes": [1]}'])
def test_a_file_that_is_something_else_is_an_error(source: Path, content: str) -> None:
    (source / "classes.json").write_text(content)
    with StreamLoader(source, num_workers=0) as loader:
        with pytest.raises(DatasetIndexError, match="as shardify writes it"):
            assert loader.classes
