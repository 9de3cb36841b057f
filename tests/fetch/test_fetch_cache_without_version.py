"""Shards of which the storage states no version: a later run could not tell that they were rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from make_shards import write_numbers
from servers.small_web_server import SmallWebServer
from servers.threaded_server import Answer

from streamload import ShardWriter, StreamLoader

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


class Undated(MemoryFileSystem):
    """A filesystem under a protocol of its own whose `info` holds neither an ETag nor a date."""

    protocol = ("undated",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("undated://")))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return _undated(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        found = super().ls(path, detail=True, **options)
        return [_undated(entry) if detail else entry["name"] for entry in found]


def _undated(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("name", "size", "type")}


class UndatedServer(SmallWebServer):
    """A web server that sends neither an ETag nor Last-Modified."""

    def answer(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        status, known, content = super().answer(method, address, headers, body)
        return status, {name: value for name, value in known.items() if name not in ("ETag", "Last-Modified")}, content


def shard(folder: Path, first: int) -> bytes:
    """Two shards with other labels have the same size."""
    with ShardWriter(folder / f"{first}-%06d.tar") as writer:
        for number in range(5):
            writer.write({"__key__": f"{number}", "cls": first + number})
    return (folder / f"{first}-000000.tar").read_bytes()


def read_labels(url: str, cache: Path, filesystem: object = None) -> list[int]:
    options: dict[str, Any] = {"num_workers": 0, "cache_dir": cache, "filesystem": filesystem}
    with StreamLoader([f"{url}/a.tar", f"{url}/b.tar"], 10, fields=("cls",), **options) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


def check_two_versions(
    files: dict[str, bytes],
    read: Callable[[], list[int]],
    tmp_path: Path,
    cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for first in (10, 50):
        caplog.clear()
        files["a.tar"], files["b.tar"] = shard(tmp_path, first), shard(tmp_path, first + 10)
        assert read() == [*range(first, first + 5), *range(first + 10, first + 15)]
        assert not [path for path in cache.rglob("*.tar*") if path.is_file()]
        assert caplog.text.count("is not kept in cache_dir") == len(caplog.records) == 1
        assert "copy the shards to a local folder" in caplog.text


def test_a_rewritten_shard_of_an_undated_filesystem_is_read_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filesystem, cache, files = Undated(), tmp_path / "cache", dict[str, bytes]()

    def read() -> list[int]:
        for name, content in files.items():
            filesystem.pipe_file(f"/undated/{name}", content)
        return read_labels("undated://undated", cache, filesystem)

    try:
        check_two_versions(files, read, tmp_path, cache, caplog)
    finally:
        filesystem.rm("/undated", recursive=True)


def test_a_rewritten_shard_of_an_undated_web_server_is_read_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, served, files = tmp_path / "cache", dict[str, bytes](), dict[str, bytes]()
    with UndatedServer(served) as server:

        def read() -> list[int]:
            served.update((f"/data/{name}", content) for name, content in files.items())
            return read_labels(f"http://{server.address}/data", cache)

        check_two_versions(files, read, tmp_path, cache, caplog)


def test_an_index_without_etags_does_not_keep_shards_from_the_cache(tmp_path: Path) -> None:
    """The index was made of local shards, which have no ETags; the answers of the server have."""
    folder, cache = Path(write_numbers(tmp_path / "made", [5, 5])), tmp_path / "cache"
    files = {f"/data/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with SmallWebServer(files) as server:
        names = [f"http://{server.address}/data/part00{number}-000000.tar" for number in range(2)]
        with StreamLoader(names, 10, fields=("cls",), num_workers=0, cache_dir=cache) as loader:
            assert [labels.tolist() for (labels,) in loader] == [list(range(10))]
    assert len([path for path in cache.rglob("*.tar") if path.is_file()]) == 2
