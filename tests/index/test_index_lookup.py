"""The indexes of folders, as several threads look them up."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make_shards import write_numbers

from streamload.index.index_lookup import IndexLookup
from streamload.storage.storages import Storages


def test_an_index_is_read_once_and_those_of_several_folders_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write_numbers(tmp_path / name, [3]) for name in ("a", "b")]
    read: list[str] = []
    both = threading.Barrier(2)
    find = Storages.for_url

    def slow(storages: Storages, url: str) -> object:
        read.append(url)
        both.wait(20)
        time.sleep(0.05)
        return find(storages, url)

    monkeypatch.setattr(Storages, "for_url", slow)
    lookup = IndexLookup()
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lookup.of_folder, folders * 3))
    assert all(found[:2])
    assert found[:2] * 3 == found
    assert len(read) == 2
