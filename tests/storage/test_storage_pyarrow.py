"""Filesystems of pyarrow, which fsspec wraps, as its `hdfs://` does."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from make_shards import write_numbers
from pyarrow import fs

from streamload import StreamLoader

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


def test_shards_are_read_with_one(tmp_path: Path) -> None:
    write_numbers(tmp_path, [20, 10], index=False)
    filesystem = ArrowFSWrapper(fs.LocalFileSystem())
    with StreamLoader(f"{tmp_path}/*.tar", 5, shuffle=False, num_workers=1, filesystem=filesystem) as loader:
        assert [label for batch in loader for label in batch["cls"].tolist()] == list(range(30))
