"""Datasets and buckets for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_folders import images, pack
from remote_places import Place, new_place
from servers.rclone import S3Server


@pytest.fixture
def bucket(rclone_s3: S3Server, tmp_path: Path) -> Place:
    return new_place(rclone_s3, tmp_path)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Three shards of twelve images."""
    assert pack(images(tmp_path), tmp_path / "data", "--max-count", 5, "--no-shuffle")[0] == 0
    return tmp_path / "data"
