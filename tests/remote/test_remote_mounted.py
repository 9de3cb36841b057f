"""Shards of a network file system: read with a filesystem they are fetched in whole parts, not read where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from feeder_in_thread import use_feeders_in_threads
from fsspec.implementations.local import LocalFileSystem
from matrix import exhaustive
from places import local, steps
from preloaded import Preloaded

from streamload import StreamLoader

PART_BYTES = 8 << 20
SIZES = [[300_000] * 40, [300_000] * 30, [300_000] * 10]


class WatchedFiles(LocalFileSystem):
    """Local files, with a record of what is read of shards."""

    cachable = False
    read: ClassVar[list[tuple[str, int, int]]] = []

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if path.endswith(".tar"):
            self.read.append((path, start, end))
        return super().cat_file(path, start, end, **kwargs)


SCRIPT = """
import sys
from fsspec.implementations.local import LocalFileSystem
from streamload import StreamLoader

class Mine(LocalFileSystem):
    cachable = False

options = dict(batch_size=40, fields=("cls",), num_workers=eval(sys.argv[2]), filesystem=Mine())
with StreamLoader(sys.argv[1], **options) as loader:
    print([len(labels) for (labels,) in loader])
"""


@pytest.mark.parametrize("form", ["indexed", "plain"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_batches_are_the_same_and_reads_are_of_whole_parts(
    form: str, shuffle: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_feeders_in_threads(monkeypatch)
    urls = local(folder).urls(form, range(len(SIZES)))
    options: dict[str, Any] = {"batch_size": 5, "fields": ("npy", "cls"), "num_workers": 0, "shuffle": shuffle and 20}
    with StreamLoader(urls, seed=1, **options) as loader:
        expected = steps(loader)
    WatchedFiles.read.clear()
    with StreamLoader(urls, seed=1, filesystem=WatchedFiles(), **options) as loader:
        assert steps(loader) == expected
    parts = [
        (url, start, min(start + PART_BYTES, Path(url).stat().st_size))
        for url in urls
        for start in range(0, Path(url).stat().st_size, PART_BYTES)
    ]
    assert len(parts) > len(urls)
    assert set(WatchedFiles.read) == set(parts), "all parts, and nothing but whole ones"


@pytest.mark.parametrize("workers", ["0", exhaustive(("'auto'",))])
def test_the_filesystem_may_be_of_a_class_of_the_script(preloaded: Preloaded, folder: Path, workers: str) -> None:
    """No other process could make one."""
    (url,) = local(folder).urls("indexed", range(1))
    ended = preloaded.run(SCRIPT, url, workers)
    assert (ended.status, ended.output) == (0, "[40]\n")
