"""Caches of fsspec that were given no folder: the copies of shards are gone when nobody reads them any more."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from make_shards import write_numbers
from servers.faults import FaultServer

from streamload import StreamLoader


def test_copies_of_shards_are_removed_with_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbers(tmp_path / "data", [20, 10], index=False)
    copies = tmp_path / "tmp"
    copies.mkdir()
    monkeypatch.setenv("TMPDIR", str(copies))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with FaultServer(tmp_path / "data") as server:
        urls = f"simplecache::{server.url}/part{{000..001}}-000000.tar"
        with StreamLoader(urls, 5, shuffle=False, fields=("cls",), num_workers=1) as loader:
            for _ in range(2):
                assert [label for (labels,) in loader for label in labels.tolist()] == list(range(30))
            assert any(len(list(each.iterdir())) >= 2 for each in copies.glob("streamload-*"))
    assert list(copies.iterdir()) == []
