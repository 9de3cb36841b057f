"""`ShardWriter` to buckets: the same bytes as locally, whole objects or none, and nothing left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from image_folders import files_below
from remote_places import Place, new_place
from servers.nginx import WebServer
from servers.rclone import S3Server

from streamload import ShardWriter
from streamload.errors import StorageError
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import list_shards
from streamload.storage.filesystem_storage import FilesystemStorage
from streamload.storage.storages import Storages


@pytest.fixture
def bucket(rclone_s3: S3Server, tmp_path: Path) -> Place:
    """A folder in a bucket."""
    place = new_place(rclone_s3, tmp_path)
    return replace(place, url=f"{place.url}/train", folder=place.folder / "train")


def write(folder: str | Path, count: int = 10, first: int = 0, **options: Any) -> ShardWriter:
    with ShardWriter(folder, **{"max_count": 3, **options}) as writer:
        for number in range(first, first + count):
            writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "cls": number})
    return writer


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_same_bytes_as_in_a_local_folder(bucket: Place, tmp_path: Path) -> None:
    writer = write(bucket.url, storage_options=bucket.storage_options)
    local = write(tmp_path / "local")
    remote, expected = bucket.files(), files_below(tmp_path / "local")
    assert remote.keys() == expected.keys()
    for name in expected.keys() - {".streamload/index.json"}:
        assert remote[name] == expected[name]
    assert writer.shards == tuple(f"{bucket.url}/{os.path.basename(path)}" for path in local.shards)
    assert (writer.samples, writer.bytes) == (local.samples, local.bytes)
    listing = list_shards(bucket.url, storages=Storages(bucket.storage_options))
    assert listing.counts == (3, 3, 3, 1)
    assert [entry.etag for entry in DatasetIndex.from_json(remote[".streamload/index.json"], bucket.url).shards] == [
        found.etag for found in Storages(bucket.storage_options).for_url(bucket.url).list(f"{bucket.url}/*.tar")
    ]


def test_shards_of_the_same_name_are_refused_or_replaced(bucket: Place) -> None:
    write(bucket.url, storage_options=bucket.storage_options)
    write(bucket.url, 2, prefix="other", storage_options=bucket.storage_options)
    before = bucket.files()
    with pytest.raises(StorageError, match="already holds 4 shards"):
        write(bucket.url, storage_options=bucket.storage_options)
    assert bucket.files() == before
    write(bucket.url, 4, first=50, overwrite=True, storage_options=bucket.storage_options)
    after = bucket.files()
    assert sorted(name for name in after if name.endswith(".tar")) == [
        "other-000000.tar",
        "shard-000000.tar",
        "shard-000001.tar",
    ]
    assert len([name for name in after if name.startswith(".streamload/tables-")]) == 1
    assert list_shards(bucket.url, storages=Storages(bucket.storage_options)).counts == (2, 3, 1)


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_upload_that_fails_is_raised_and_leaves_no_object(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    memory = fsspec.filesystem("memory")
    real = FilesystemStorage.write

    def full(storage: FilesystemStorage, url: str, source: bytes | str) -> None:
        if url.endswith(f"shard-00000{failing}.tar"):
            raise StorageError("the bucket takes nothing more", url=url)
        real(storage, url, source)

    monkeypatch.setattr(FilesystemStorage, "write", full)
    writer = ShardWriter("memory://failing/x", max_count=2)
    try:
        with pytest.raises(StorageError, match="takes nothing more"):
            for number in range(8):
                writer.write({"__key__": str(number), "txt": ""})
            writer.close()
        with pytest.raises(ValueError, match="closed"):
            writer.write({"__key__": "later", "txt": ""})
        found = [name.rpartition("/")[2] for name in memory.find("/failing") if name.endswith((".tar", "index.json"))]
        assert found == [f"shard-00000{number}.tar" for number in range(failing)]
    finally:
        writer.close()
        if memory.exists("/failing"):
            memory.rm("/failing", recursive=True)


def test_an_upload_that_arrives_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FilesystemStorage.write

    def cut(storage: FilesystemStorage, url: str, source: bytes | str) -> None:
        content = Path(source).read_bytes() if isinstance(source, str) else source
        real(storage, url, content[:100] if url.endswith(".tar") else content)

    monkeypatch.setattr(FilesystemStorage, "write", cut)
    with pytest.raises(StorageError, match="has 100 bytes after the upload"):
        write("memory://cut/x", 1)
    memory = fsspec.filesystem("memory")
    assert memory.find("/cut") == ["/cut/x/.streamload-unfinished.json"]
    memory.rm("/cut", recursive=True)


def test_a_filesystem_of_the_users(tmp_path: Path) -> None:
    write(tmp_path / "train/x-%03d.tar", filesystem=fsspec.filesystem("file", skip_instance_cache=True))
    assert list_shards(tmp_path / "train").counts == (3, 3, 3, 1)
    write(f"file://{tmp_path}/local")
    assert list_shards(tmp_path / "local").counts == (3, 3, 3, 1)


@pytest.mark.parametrize("folder", ["s3://", "s3://train-%06d.tar", "memory://"])
def test_a_place_without_a_bucket_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="bucket or folder"):
        ShardWriter(folder)


def test_a_web_server_is_refused(nginx: WebServer) -> None:
    with pytest.raises(StorageError, match="web server cannot be written to"):
        ShardWriter(f"{nginx.url}/train")
