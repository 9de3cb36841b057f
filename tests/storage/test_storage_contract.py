"""What every storage promises, shown of each: local files, buckets, web servers and fsspec's filesystems."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.implementations.dirfs import DirFileSystem
from matrix import exhaustive
from pyarrow.fs import LocalFileSystem
from servers.nginx import WebServer
from servers.rclone import S3Server
from through_fsspec import through_fsspec

from streamload.errors import ShardChangedError, ShardNotFoundError, StorageError
from streamload.storage.download import Pin, Retries, read_range
from streamload.storage.protocol import RangeBody, Storage
from streamload.storage.storages import Storages

CONTENT = bytes(range(256)) * 4000
SMALL = b"small"


@dataclass
class Place:
    """A storage with a folder `set` in it that holds `a 0.tar`, `b-1.tar`, `note.txt`, `.hidden.tar`, `sub/c.tar`."""

    storages: Storages
    root: str
    write: Callable[[str, bytes], None]
    lists: bool = True
    writes: bool = True
    pins: bool = True

    @property
    def storage(self) -> Storage:
        return self.storages.for_url(self.url("b-1.tar"))

    def url(self, name: str) -> str:
        return f"{self.root}/set/{name}"


def writer(folder: Path) -> Callable[[str, bytes], None]:
    def write(name: str, content: bytes) -> None:
        path = folder / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return write


def local(folder: Path) -> Place:
    return Place(Storages(), str(folder), writer(folder), pins=False)


def filesystem_local(folder: Path) -> Place:
    return Place(Storages(filesystem=fsspec.filesystem("file")), f"file://{folder}", writer(folder))


def pyarrow_wrapped(folder: Path) -> Place:
    """As fsspec's own `hdfs://` is; it makes no folder to write to."""
    filesystem = DirFileSystem(str(folder), ArrowFSWrapper(LocalFileSystem()))
    return Place(Storages(filesystem=filesystem), "dir://", writer(folder), writes=False)


def memory(folder: Path) -> Place:
    fs = fsspec.filesystem("memory")
    root = f"memory://{folder.name}"
    return Place(Storages(), root, lambda name, content: fs.pipe_file(f"{root}/set/{name}", content))


def bucket(server: S3Server, folder: Path) -> tuple[str, Callable[[str, bytes], None]]:
    (server.folder / folder.name).mkdir()
    return f"s3://{folder.name}", writer(server.folder / folder.name)


def obstore_s3(server: S3Server, folder: Path) -> Place:
    return Place(Storages(server.options), *bucket(server, folder))


def s3fs_s3(server: S3Server, folder: Path) -> Place:
    return Place(Storages(filesystem=through_fsspec("s3", **server.options)), *bucket(server, folder))


def web(server: WebServer, folder: Path) -> tuple[str, Callable[[str, bytes], None]]:
    return f"{server.url}/{folder.name}", writer(server.folder / folder.name)


def obstore_http(server: WebServer, folder: Path) -> Place:
    return Place(Storages(), *web(server, folder), lists=False, writes=False)


def fsspec_http(server: WebServer, folder: Path) -> Place:
    return Place(Storages(filesystem=through_fsspec("http")), *web(server, folder), lists=False, writes=False)


PLACES = [
    local,
    filesystem_local,
    pyarrow_wrapped,
    memory,
    obstore_s3,
    exhaustive((s3fs_s3,)),
    obstore_http,
    fsspec_http,
]


@pytest.fixture(scope="module", autouse=True)
def servers(request: pytest.FixtureRequest) -> None:
    """Start what can be started before any test looks at what it leaves behind."""
    for name in ("rclone_s3", "nginx"):
        with contextlib.suppress(pytest.skip.Exception):
            request.getfixturevalue(name)


@pytest.fixture(params=PLACES, ids=lambda made: getattr(made, "__name__", None))
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    folder = tmp_path / f"p{os.getpid()}-{request.param.__name__.replace('_', '-')}"
    folder = folder.with_name(f"{folder.name}-{abs(hash(str(tmp_path))) % 10**8}")
    folder.mkdir()
    servers = {"s3": "rclone_s3", "http": "nginx"}
    kind = request.param.__name__.rpartition("_")[2]
    arguments = [request.getfixturevalue(servers[kind])] if kind in servers else []
    found = request.param(*arguments, folder)
    for name in ("a 0.tar", ".hidden.tar", "sub/c.tar", "note.txt"):
        found.write(name, SMALL)
    found.write("b-1.tar", CONTENT)
    yield found
    await found.storages.aclose()
    if request.param is memory:
        fsspec.filesystem("memory").rm(found.root, recursive=True)


async def read(place: Place, name: str, start: int, end: int | None) -> tuple[bytes, RangeBody]:
    body = await place.storage.open_range(place.url(name), start, end)
    return b"".join([bytes(chunk) async for chunk in body.pieces]), body


@pytest.mark.parametrize(("start", "end"), [(0, None), (0, 1), (5, 700_001), (1_023_999, 1_024_000), (1_000_000, None)])
async def test_a_range_is_its_bytes(place: Place, start: int, end: int | None) -> None:
    content, body = await read(place, "b-1.tar", start, end)
    assert content == CONTENT[start:end]
    assert body.total_bytes == len(CONTENT)


async def test_a_range_ends_with_the_object(place: Place) -> None:
    assert (await read(place, "b-1.tar", 1_000_000, 9_000_000))[0] == CONTENT[1_000_000:]


async def test_a_range_behind_the_end_is_a_changed_shard(place: Place) -> None:
    with pytest.raises(ShardChangedError):
        await read(place, "b-1.tar", len(CONTENT), len(CONTENT) + 10)


async def test_an_empty_object_is_read_as_nothing(place: Place) -> None:
    place.write("empty.tar", b"")
    content, body = await read(place, "empty.tar", 0, 10)
    assert (content, body.total_bytes) == (b"", 0)
    with pytest.raises(ShardChangedError):
        await read(place, "empty.tar", 1, 10)


async def test_info_agrees_with_what_is_read(place: Place) -> None:
    info = place.storage.info(place.url("b-1.tar"))
    assert (info.url, info.bytes) == (place.storage.absolute(place.url("b-1.tar")), len(CONTENT))
    assert place.storage.info(place.url("a 0.tar")).bytes == len(SMALL)
    content, body = await read(place, "b-1.tar", 0, 100)
    assert content == CONTENT[:100]
    if place.pins:
        assert info.etag is not None
        assert body.etag == info.etag


async def test_another_version_is_refused_and_both_are_named(place: Place) -> None:
    if not place.pins:
        pytest.skip("local files have no ETag; their time is looked at where they are opened")
    old = place.storage.info(place.url("b-1.tar"))
    place.write("b-1.tar", CONTENT[::-1] + b"x")
    new = place.storage.info(place.url("b-1.tar"))
    assert old.etag is not None
    assert new.etag is not None
    with pytest.raises(ShardChangedError) as caught:
        await read_range(place.storage, place.url("b-1.tar"), 0, 100, pin=Pin(etag=old.etag), retries=Retries())
    assert old.etag in str(caught.value)
    assert new.etag in str(caught.value)
    assert (await read(place, "b-1.tar", 0, 100))[0] == CONTENT[::-1][:100]


async def test_a_missing_shard_is_named_with_what_is_like_it(place: Place) -> None:
    with pytest.raises(ShardNotFoundError) as caught:
        place.storage.info(place.url("b-2.tar"))
    assert caught.value.url == place.url("b-2.tar")
    if place.lists:
        assert "did you mean 'b-1.tar'" in str(caught.value)
    with pytest.raises(ShardNotFoundError):
        await read(place, "b-2.tar", 0, 10)


def test_small_files_are_read_whole(place: Place) -> None:
    assert place.storage.read_bytes(place.url("note.txt"), most_bytes=5) == SMALL
    with pytest.raises(StorageError, match="more than 4 bytes"):
        place.storage.read_bytes(place.url("note.txt"), most_bytes=4)
    with pytest.raises(ShardNotFoundError):
        place.storage.read_bytes(place.url("none.txt"), most_bytes=5)


def test_globs_are_sorted_and_leave_out_what_is_hidden(place: Place) -> None:
    if not place.lists:
        with pytest.raises(StorageError):
            place.storage.list(place.url("*.tar"))
        return
    found = place.storage.list(place.url("*.tar"))
    assert [info.url for info in found] == [place.url("a 0.tar"), place.url("b-1.tar")]
    assert [info.bytes for info in found] == [len(SMALL), len(CONTENT)]
    assert found[1].etag == place.storage.info(place.url("b-1.tar")).etag
    assert [info.url for info in place.storage.list(place.url(".h*"))] == [place.url(".hidden.tar")]
    assert [info.url for info in place.storage.list(f"{place.root}/s?t/[s]*/*.tar")] == [place.url("sub/c.tar")]
    assert [info.url for info in place.storage.list(place.url("*"), folders=True)] == [place.url("sub")]
    assert place.storage.list(f"{place.root}/none/*.tar") == []


def test_two_asterisks_are_any_number_of_folders(place: Place) -> None:
    if not place.lists:
        return
    for name in ("sub/side/d.tar", "sub/.dot/e.tar", "sub-1/f.tar", ".secret/g.tar"):
        place.write(name, SMALL)

    def found(pattern: str, *, folders: bool = False) -> list[str]:
        return [
            info.url.removeprefix(place.url("")) for info in place.storage.list(place.url(pattern), folders=folders)
        ]

    every = ["a 0.tar", "b-1.tar", "sub-1/f.tar", "sub/c.tar", "sub/side/d.tar"]
    assert found("**/*.tar") == every
    assert found("**") == sorted([*every, "note.txt"])
    assert found("s*/**/[cdf].tar") == every[2:]
    assert found("**/.dot/*.tar") == ["sub/.dot/e.tar"]
    assert found(".s*/**/*.tar") == [".secret/g.tar"]
    assert found("**", folders=True) == ["sub", "sub-1", "sub/side"]
    listed, looked_at = place.storage.list(place.url("**/b-1.tar"))[0], place.storage.info(place.url("b-1.tar"))
    assert (listed.bytes, listed.etag) == (looked_at.bytes, looked_at.etag)


def test_folders_are_distinguished_from_files(place: Place) -> None:
    if place.lists:
        assert place.storage.is_folder(f"{place.root}/set")
        assert not place.storage.is_folder(place.url("b-1.tar"))
        assert not place.storage.is_folder(f"{place.root}/se")


async def test_what_is_written_can_be_read_and_deleted(place: Place, tmp_path: Path) -> None:
    url = place.url("new folder/w.bin")
    if not place.writes:
        with pytest.raises(StorageError):
            place.storage.write(url, b"x")
        return
    (tmp_path / "source").write_bytes(CONTENT * 8)
    place.storage.write(url, SMALL)
    assert place.storage.read_bytes(url, most_bytes=100) == SMALL
    place.storage.write(url, str(tmp_path / "source"))
    assert place.storage.info(url).bytes == 8 * len(CONTENT)
    assert (await read(place, "new folder/w.bin", 7 * len(CONTENT), None))[0] == CONTENT
    place.storage.delete(url)
    place.storage.delete(url)
    with pytest.raises(ShardNotFoundError):
        place.storage.info(url)


async def test_a_body_can_be_given_up(place: Place) -> None:
    body = await place.storage.open_range(place.url("b-1.tar"), 0, None)
    first = await anext(body.pieces)
    await body.aclose()
    await body.aclose()
    assert 0 < len(first) <= len(CONTENT)


async def test_many_ranges_at_once(place: Place) -> None:
    ranges = await asyncio.gather(
        *(read(place, "b-1.tar", start, start + 50_000) for start in range(0, 1_000_000, 50_000))
    )
    assert b"".join(content for content, _ in ranges) == CONTENT[:1_000_000]


def test_one_loop_after_another_may_read_many_ranges(place: Place) -> None:
    async def read_many() -> None:
        await asyncio.gather(*(read(place, "b-1.tar", start, start + 10) for start in range(60)))
        await place.storage.aclose()

    for _ in range(3):
        asyncio.run(read_many())


def test_storages_can_be_sent_to_another_process(place: Place) -> None:
    place.storage.info(place.url("b-1.tar"))
    sent = pickle.loads(pickle.dumps(place.storages))
    assert sent.for_url(place.url("b-1.tar")).info(place.url("b-1.tar")).bytes == len(CONTENT)
