"""Caches of fsspec that were given no folder: the copies of shards are gone when nobody reads them any more."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from make_shards import write_numbers
from servers.faults import FaultServer

from streamload import StreamLoader


def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder for this process and those that it starts."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


def test_copies_of_shards_are_removed_with_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbers(tmp_path / "data", [20, 10], index=False)
    copies = temporary_folder(tmp_path, monkeypatch)
    with FaultServer(tmp_path / "data") as server:
        urls = f"simplecache::{server.url}/part{{000..001}}-000000.tar"
        with StreamLoader(urls, 5, shuffle=False, fields=("cls",), num_workers=1) as loader:
            for _ in range(2):
                assert [label for (labels,) in loader for label in labels.tolist()] == list(range(30))
            assert any(len(list(each.iterdir())) >= 2 for each in copies.glob("streamload-*/*"))
    assert list(copies.iterdir()) == []


@pytest.mark.parametrize("by_protocol", [False, True])
def test_a_folder_of_the_users_is_used_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_protocol: bool
) -> None:
    write_numbers(tmp_path / "data", [20, 10], index=False)
    copies, kept = temporary_folder(tmp_path, monkeypatch), {"cache_storage": str(tmp_path / "kept")}
    with FaultServer(tmp_path / "data") as server:
        urls = f"simplecache::{server.url}/part{{000..001}}-000000.tar"
        options = {"simplecache": kept} if by_protocol else kept
        with StreamLoader(urls, 5, shuffle=False, fields=("cls",), num_workers=0, storage_options=options) as loader:
            assert [label for (labels,) in loader for label in labels.tolist()] == list(range(30))
    assert len(list((tmp_path / "kept").iterdir())) >= 2
    assert list(copies.iterdir()) == []
