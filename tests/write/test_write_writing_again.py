"""Writes that fail in passing: they are made again, are whole in the end, and leave nothing beside what they wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from servers.upload_server import UploadServer

from streamload.errors import StorageError, TransientStorageError
from streamload.storage import object_storage
from streamload.storage.download import Retries, RetryPolicy
from streamload.storage.object_storage import RETRY
from streamload.storage.storages import Storages

SOON = RetryPolicy(tries=10, first_backoff_s=0.0, warn_after_s=0.0)
CONTENT = os.urandom(1 << 16) * 176
"""More than two of the parts in which large objects are written, of 5 MiB."""


class BreakingFilesystem(LocalFileSystem):
    """Writes half of a file and then breaks off, as often as it is told to; its names show as they are written.

    Args:
        breaks: how often.
        keeps: files cannot be removed.
    """

    cachable = False

    def __init__(self, breaks: int, *, keeps: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.keeps = keeps
        self.written: list[str] = []

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._write(path, value)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._write(rpath, Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        if self.keeps:
            raise ConnectionResetError
        super().rm_file(path)

    def _write(self, path: str, content: bytes) -> None:
        self.written.append(path)
        breaks = len(self.written) <= self.breaks
        Path(path).write_bytes(content[: len(content) // 2] if breaks else content)
        if breaks:
            raise ConnectionResetError


def given_as_bytes(content: bytes, _: Path) -> bytes | str:
    return content


def given_as_file(content: bytes, folder: Path) -> bytes | str:
    (folder / "source").write_bytes(content)
    return str(folder / "source")


Given = Callable[[bytes, Path], bytes | str]


@pytest.mark.parametrize("given", [given_as_bytes, given_as_file])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_filesystem_that_breaks_twice(tmp_path: Path, given: Given, keeps: bool) -> None:
    filesystem, target = BreakingFilesystem(2, keeps=keeps), tmp_path / "out" / "a.tar"
    Storages(filesystem=filesystem, retries=Retries(SOON)).for_url(str(target)).write(
        str(target), given(CONTENT[:1000], tmp_path)
    )
    assert target.read_bytes() == CONTENT[:1000]
    assert os.listdir(target.parent) == ["a.tar"]
    assert len(filesystem.written) == 3


def test_a_filesystem_that_always_breaks_keeps_nothing_half_written(tmp_path: Path) -> None:
    filesystem, target = BreakingFilesystem(100), tmp_path / "out" / "a.tar"
    target.parent.mkdir()
    target.write_bytes(b"as it was")
    with pytest.raises(TransientStorageError):
        Storages(filesystem=filesystem, retries=Retries(SOON)).for_url(str(target)).write(str(target), b"new")
    assert target.read_bytes() == b"as it was"
    assert os.listdir(target.parent) == ["a.tar"]
    assert len(filesystem.written) == 10


@pytest.fixture
def uploads() -> Iterator[UploadServer]:
    with UploadServer() as server:
        yield server


def storages_for(server: UploadServer) -> Storages:
    return Storages(
        {"key": "k", "secret": "s", "endpoint_url": server.url, "client_kwargs": {"region_name": "us-east-1"}},
        retries=Retries(SOON),
    )


@pytest.mark.parametrize("given", [given_as_bytes, given_as_file])
def test_an_object_store_that_refuses_twice(uploads: UploadServer, tmp_path: Path, given: Given) -> None:
    uploads.refusals = 2
    storages_for(uploads).for_url("s3://b/a.json").write("s3://b/a.json", given(b"small", tmp_path))
    assert uploads.objects == {"/b/a.json": b"small"}
    assert uploads.taken == ["PUT /b/a.json"]
    assert len(uploads.refused) == 2


@pytest.mark.parametrize("given", [given_as_bytes, given_as_file])
def test_of_a_large_object_only_the_refused_part_is_sent_again(
    uploads: UploadServer, tmp_path: Path, given: Given
) -> None:
    uploads.refusals, uploads.refuses = 2, "partNumber=2"
    storages_for(uploads).for_url("s3://b/a.tar").write("s3://b/a.tar", given(CONTENT, tmp_path))
    assert uploads.objects == {"/b/a.tar": CONTENT}
    parts = sorted(request.partition("partNumber=")[2][:1] for request in uploads.taken if "partNumber" in request)
    assert parts == ["1", "2", "3"]
    assert len(uploads.refused) == 2


@pytest.mark.parametrize("given", [given_as_bytes, given_as_file])
def test_what_obstore_gives_up_is_begun_again_and_the_outage_reported_once(
    uploads: UploadServer,
    tmp_path: Path,
    given: Given,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Uploads are given up no sooner than reading is."""
    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=1), "base": 2}
    monkeypatch.setattr(object_storage, "RETRY", RETRY | {"max_retries": 1, "backoff": backoff})
    uploads.refusals = 7
    storages_for(uploads).for_url("s3://b/a.json").write("s3://b/a.json", given(b"small", tmp_path))
    assert uploads.objects == {"/b/a.json": b"small"}
    assert len(uploads.refused) == 7
    (record,) = caplog.records
    assert "s3://b/a.json: the storage asks for fewer requests" in record.getMessage()
    uploads.refused.clear()
    uploads.refusals = 100
    with pytest.raises(TransientStorageError):
        storages_for(uploads).for_url("s3://b/a.json").write("s3://b/a.json", b"small")
    puts = [request for request in uploads.refused if request.startswith("PUT ")]  # a HEAD asks for Retry-After
    assert len(puts) == 2 * 10


def test_an_object_store_that_denies_is_tried_once(uploads: UploadServer) -> None:
    uploads.refusals, uploads.status = 100, 403
    with pytest.raises(StorageError, match="access is denied"):
        storages_for(uploads).for_url("s3://b/a.json").write("s3://b/a.json", b"small")
    assert len(uploads.refused) == 1
    assert uploads.objects == {}
