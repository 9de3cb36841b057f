"""Filesystems of pyarrow, which fsspec wraps, as its `hdfs://` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.dirfs import DirFileSystem
from make_shards import write_numbers
from pyarrow import fs

from streamload import StreamLoader

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


@pytest.mark.parametrize("wrapped", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_shards_are_read_with_one(tmp_path: Path, wrapped: bool) -> None:
    write_numbers(tmp_path, [20, 10], index=False)
    filesystem: AbstractFileSystem = ArrowFSWrapper(fs.LocalFileSystem())
    pattern = f"{tmp_path}/*.tar"
    if wrapped:
        filesystem, pattern = DirFileSystem(str(tmp_path), filesystem), "*.tar"
    with StreamLoader(pattern, 5, shuffle=False, num_workers=1, filesystem=filesystem) as loader:
        assert [label for batch in loader for label in batch["cls"].tolist()] == list(range(30))
