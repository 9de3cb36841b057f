"""Listing datasets that lie remotely: what is found, and how few requests it takes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import fsspec
import fsspec.asyn
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from indexed_shards import index_shards, read_index, table_in, write_index
from servers.faults import FaultServer, Script
from servers.nginx import WebServer
from servers.rclone import S3Server
from test_index_listing import write
from through_fsspec import through_fsspec

from streamload import ShardWriter, StreamLoader
from streamload.errors import DatasetIndexError, ShardChangedError, ShardNotFoundError, StorageError
from streamload.index.dataset_index import IndexedShard
from streamload.index.listing import list_shards
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.storage.storages import Storages

PATTERN = "/shard{0..11}-000000.tar"


@pytest.fixture
def bucket(rclone_s3: S3Server, tmp_path: Path) -> Path:
    folder = rclone_s3.folder / f"b{abs(hash(str(tmp_path))) % 10**10}"
    folder.mkdir()
    return folder


@pytest.fixture
async def s3(rclone_s3: S3Server) -> AsyncIterator[Storages]:
    storages = Storages(rclone_s3.options)
    yield storages
    await storages.aclose()


async def test_few_requests_list_a_folder_with_an_index_and_one_without(tmp_path: Path) -> None:
    write(tmp_path / "bucket" / "train", [3, 1, 2])
    write(tmp_path / "bucket" / "plain", [1] * 12, index=False)
    with FaultServer(tmp_path) as server:
        storages = Storages({"key": "k", "secret": "s", "endpoint_url": server.url})
        for name, pattern, requests in (("train", "", 1), ("train", "/", 1), ("plain", "", 3), ("plain", PATTERN, 3)):
            server.play(Script())
            listing = list_shards(f"s3://bucket/{name}{pattern}", storages=storages)
            assert server.report().requests == requests
            shards = {path.name: path.stat().st_size for path in (tmp_path / "bucket" / name).glob("*.tar")}
            assert {shard.name: shard.bytes for shard in listing.shards} == shards
            assert listing.counts == ((3, 1, 2) if name == "train" else None)
            index_folder = f"s3://bucket/{name}/.streamload" if name == "train" else None
            assert {shard.index_folder for shard in listing.shards} == {index_folder}
            assert all(shard.etag for shard in listing.shards) == (name == "plain")
        await storages.aclose()


def test_what_is_not_there_is_named(bucket: Path, s3: Storages) -> None:
    write(bucket, [1, 1], index=False)
    for urls, says in (
        (
            [f"s3://{bucket.name}/shard0-000000.tar", f"s3://{bucket.name}/shard1-00000.tar"],
            "did you mean 'shard1-000000.tar'",
        ),
        (f"s3://{bucket.name}/x*.tar", "no file matches"),
        (f"s3://{bucket.name}/missing", "no such shard or folder: nothing in"),
        ("s3://no-such-bucket/train/*.tar", "no such bucket"),
    ):
        with pytest.raises(ShardNotFoundError, match=says):
            list_shards(urls, storages=s3)


@pytest.fixture(params=["obstore", pytest.param("s3fs", marks=pytest.mark.exhaustive)])
async def either(request: pytest.FixtureRequest, rclone_s3: S3Server) -> AsyncIterator[Storages]:
    """The bucket by either library."""
    by_fsspec = request.param == "s3fs"
    storages = (
        Storages(filesystem=through_fsspec("s3", **rclone_s3.options)) if by_fsspec else Storages(rclone_s3.options)
    )
    yield storages
    await storages.aclose()


def refusal(url: str, storages: Storages) -> str:
    with pytest.raises(ShardNotFoundError) as caught:
        list_shards(url, storages=storages)
    return str(caught.value)


def test_a_bucket_whose_shards_lie_in_folders_says_which(bucket: Path, either: Storages) -> None:
    write(bucket / "train", [1], index=False)
    (bucket / "a" / "cat").mkdir(parents=True)
    (bucket / "a" / "cat" / "1.jpg").write_bytes(b"x")
    for url in (f"s3://{bucket.name}", f"s3://{bucket.name}/"):
        assert f"name one of them, such as train (at 's3://{bucket.name}')" in refusal(url, either)
    write(bucket / "below" / "val", [1], index=False)
    assert "name one of them, such as val" in refusal(f"s3://{bucket.name}/below", either)
    assert "pack it first: shardify LOCAL_COPY DESTINATION" in refusal(f"s3://{bucket.name}/a", either)
    assert "no such shard or folder" in refusal(f"s3://{bucket.name}/a/nothing", either)


def test_the_name_of_a_folder_may_be_mistyped(bucket: Path, either: Storages) -> None:
    write(bucket / "train", [1], index=False)
    for url in (f"s3://{bucket.name}/trian", f"s3://{bucket.name}/trian/"):
        said = refusal(url, either)
        assert said == f"no such shard or folder: did you mean 'train'? (at 's3://{bucket.name}/trian')"
    said = refusal(f"s3://{bucket.name}/trian/shard0-000000.tar", either)
    assert f"there is nothing in 's3://{bucket.name}/trian'" in said


@pytest.mark.parametrize(
    "named", ["", "/train", "/train/shard0-000000.tar", "/train/shard{0..3}-000000.tar", "/train/*.tar"]
)
async def test_a_wrong_secret_is_said_once(
    bucket: Path, rclone_s3: S3Server, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    write(bucket / "train", [1] * 4)
    storages = Storages({**rclone_s3.options, "secret": "wrong"})
    with pytest.raises(StorageError, match="SignatureDoesNotMatch"):
        list_shards(f"s3://{bucket.name}{named}", storages=storages)
    assert caplog.messages == []
    await storages.aclose()


@pytest.mark.parametrize("named", ["", "/shard0-000000.tar", "/shard{0..1}-000000.tar", "/*.tar"])
async def test_a_bucket_whose_index_alone_is_denied_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    write(tmp_path / "bucket", [1, 1])
    with FaultServer(tmp_path, Script(status=403, status_share=1.0, only="index.json")) as server:
        storages = Storages({"key": "k", "secret": "s", "endpoint_url": server.url})
        listing = list_shards(f"s3://bucket{named}", storages=storages)
        await storages.aclose()
    assert listing.counts is None
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "continuing without an index that cannot be read"
    ]


BRACES = r"name the shards, with braces: train-\{000000\.\.000099\}\.tar"


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_web_folder_whose_index_is_refused_may_have_none(tmp_path: Path, slash: str) -> None:
    write(tmp_path / "data", [1, 1])
    with FaultServer(tmp_path, Script(status=403, status_share=1.0)) as server:
        says = rf"holds no index that can be read \(access is denied \(403 .*; {BRACES}"
        with pytest.raises(ShardNotFoundError, match=says) as caught:
            list_shards(f"{server.url}/data{slash}")
    assert caught.value.url == f"{server.url}/data"
    assert isinstance(caught.value.__cause__, StorageError)
    assert caught.value.__cause__.url == f"{server.url}/data/.streamload/index.json"


def test_a_server_that_sends_a_page_for_a_missing_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [2, 3], index=False)
    missing = (".streamload/index.json", ".streamload/columns.npz", ".streamload-unfinished.json", "classes.json")
    files = {f"data/{path.name}": path.read_bytes() for path in tmp_path.glob("*.tar")}
    files |= dict.fromkeys((f"data/{name}" for name in missing), b"<!doctype html><title>Not found</title>")
    with FaultServer(files) as server:
        with StreamLoader(f"{server.url}/data/shard{{0,1}}-000000.tar", 1, num_workers=0) as loader:
            assert len(list(loader)) == 5
            assert loader.classes is None
        assert caplog.messages == []
        with pytest.raises(ShardNotFoundError, match=f"holds no index, .*{BRACES}"):
            list_shards(f"{server.url}/data")


def test_braces_that_name_too_much_name_the_first_that_is_missing(bucket: Path, either: Storages) -> None:
    write(bucket / "train", [1] * 4, index=False)
    for folder, storages in ((f"s3://{bucket.name}/train", either), (f"{bucket}/train", Storages())):
        said = refusal(f"{folder}/shard{{0..9}}-000000.tar", storages)
        assert "did you mean 's" in said
        assert f"check the range (at '{folder}/shard4-000000.tar')" in said


def test_an_index_of_another_etag_or_size_is_stale(bucket: Path, s3: Storages) -> None:
    write(bucket, [1])
    url = f"s3://{bucket.name}/*.tar"
    etag = list_shards(url, storages=s3).shards[0].etag
    folder = str(bucket / ".streamload")
    index = read_index(folder)
    table, entry = table_in(index, "shard0-000000.tar"), index.shards[0]
    for known, stale in ((etag, False), ('"other"', True), (None, False)):
        write_index(folder, [(IndexedShard(entry.name, entry.bytes, entry.samples, known), table)])
        assert read_index(folder).shards[0].etag == known
        if stale:
            with pytest.raises(ShardChangedError, match='the version "other"'):
                list_shards(url, storages=s3)
        else:
            assert list_shards(url, storages=s3).counts == (1,)
    (bucket / "shard0-000000.tar").write_bytes(bytes(10))
    with pytest.raises(ShardChangedError, match="has 10 bytes"):
        list_shards(url, storages=s3)


def test_an_index_elsewhere_may_be_remote_or_local(bucket: Path, s3: Storages, tmp_path: Path) -> None:
    write(bucket / "with", [2])
    (bucket / "without").mkdir()
    (bucket / "without" / "shard0-000000.tar").write_bytes((bucket / "with" / "shard0-000000.tar").read_bytes())
    for index in (f"s3://{bucket.name}/with", f"s3://{bucket.name}/with/.streamload/", bucket / "with"):
        assert list_shards(f"s3://{bucket.name}/without", index, s3).counts == (2,)
    with pytest.raises(DatasetIndexError, match=r"holds no index\.json"):
        list_shards(f"s3://{bucket.name}/without", f"s3://{bucket.name}/without", s3)


async def test_a_web_server_is_not_requested_before_reading(nginx: WebServer, tmp_path: Path) -> None:
    folder = nginx.folder / tmp_path.name
    write(folder, [1, 2], index=False)
    url = f"{nginx.url}/{tmp_path.name}"
    storages = Storages()
    listing = list_shards(f"{url}/shard{{0,1}}-000000.tar?v=1", storages=storages)
    assert [(shard.name, shard.bytes) for shard in listing.shards] == [
        ("shard0-000000.tar", UNKNOWN_BYTES),
        ("shard1-000000.tar", UNKNOWN_BYTES),
    ]
    with pytest.raises(ShardNotFoundError, match=f"holds no index, .*{BRACES}"):
        list_shards(url, storages=storages)
    index_shards([str(folder / "shard0-000000.tar"), str(folder / "shard1-000000.tar")])
    listing = list_shards(url, storages=storages)
    assert listing.counts == (1, 2)
    assert [shard.bytes for shard in listing.shards] == [
        (folder / name).stat().st_size for name in ("shard0-000000.tar", "shard1-000000.tar")
    ]
    assert list_shards(f"{url}/shard1-000000.tar", storages=storages).counts == (2,)
    await storages.aclose()


def test_memory_is_of_one_process(tmp_path: Path) -> None:
    assert Storages().is_process_local("memory://a.tar")
    assert Storages(filesystem=fsspec.filesystem("memory")).is_process_local("a.tar")
    assert not Storages().is_process_local("s3://memory/a.tar")
    assert not Storages(filesystem=fsspec.filesystem("file")).is_process_local("/a.tar")


def test_a_filesystem_of_the_users_takes_its_paths_and_its_own_urls(tmp_path: Path) -> None:
    memory, local = fsspec.filesystem("memory"), fsspec.filesystem("file")
    memory.pipe_file("/taken/a.tar", b"12345")
    (tmp_path / "a.tar").write_bytes(b"12345")
    for filesystem, urls in (
        (memory, ["/taken/a.tar", "taken/*.tar", "memory://taken/a.tar", "memory://taken"]),
        (local, [f"{tmp_path}/a.tar", f"file://{tmp_path}/*.tar", f"file:{tmp_path}/a.tar", f"local://{tmp_path}"]),
        (DirFileSystem(str(tmp_path), fs=local), ["a.tar", "/a.tar", "dir://a.tar", "*.tar"]),
        (DirFileSystem("/taken", fs=memory), ["a.tar", "*.tar"]),
    ):
        for url in urls:
            listing = list_shards(url, storages=Storages(filesystem=filesystem))
            assert [(shard.name, shard.bytes) for shard in listing.shards] == [("a.tar", 5)], url
    memory.rm("/taken", recursive=True)


@pytest.mark.parametrize("url", ["s3://b/a.tar", "file:///d/a.tar", "file:/d/a.tar", "http://h/a.tar"])
def test_a_filesystem_of_the_users_is_given_no_url_of_another_protocol(url: str) -> None:
    memory = fsspec.filesystem("memory")
    with pytest.raises(ValueError, match=r"filesystem=MemoryFileSystem: .* memory://; give such a path"):
        list_shards(url, storages=Storages(filesystem=memory))
    with pytest.raises(ValueError, match="filesystem=MemoryFileSystem"):
        list_shards("a.tar", url.rpartition("/")[0], storages=Storages(filesystem=memory))
    with pytest.raises(ValueError, match=r"filesystem=DirFileSystem: .* dir://; give such a path"):
        list_shards(url, storages=Storages(filesystem=DirFileSystem("/", fs=fsspec.filesystem("file"))))
    with pytest.raises(ValueError, match="filesystem=MemoryFileSystem"):
        ShardWriter("file:///d/train", filesystem=memory)


def test_a_filesystem_takes_urls_of_what_fsspec_has_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "protocol", "abfs")
    storages = Storages(filesystem=memory)
    assert storages.for_url("az://b/a.tar") is storages.for_url("b/a.tar")
    with pytest.raises(ValueError, match="abfs://"):
        storages.for_url("s3://b/a.tar")
