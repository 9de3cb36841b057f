"""Shards of which the storage states no version: a later run could not tell that they were rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from make_shards import write_numbers
from servers.small_web_server import SmallWebServer
from servers.threaded_server import Answer

from streamload import ShardWriter, StreamLoader
from streamload.storage.filesystem_storage import shard_info

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


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


def test_a_rewritten_shard_of_an_undated_server_is_read_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, served = tmp_path / "cache", dict[str, bytes]()
    with UndatedServer(served) as server:
        urls = [f"http://{server.address}/data/{name}.tar" for name in "ab"]
        for first in (10, 50):
            caplog.clear()
            served.update({"/data/a.tar": shard(tmp_path, first), "/data/b.tar": shard(tmp_path, first + 10)})
            with StreamLoader(urls, 10, fields=("cls",), num_workers=0, cache_dir=cache) as loader:
                labels = [label for (labels,) in loader for label in labels.tolist()]
            assert labels == [*range(first, first + 5), *range(first + 10, first + 15)]
            assert not [path for path in cache.rglob("*.tar*") if path.is_file()]
            assert caplog.text.count("does not keep http://") == len(caplog.records) == 1
            assert "Copy such shards to a local folder" in caplog.text


def test_a_file_of_an_undated_filesystem_has_no_version() -> None:
    assert shard_info("undated://a.tar", {"name": "a.tar", "size": 5, "type": "file"}).etag is None


def test_an_index_without_etags_does_not_keep_shards_from_the_cache(tmp_path: Path) -> None:
    """The index was made of local shards, which have no ETags; the answers of the server have."""
    folder, cache = Path(write_numbers(tmp_path / "made", [5, 5])), tmp_path / "cache"
    files = {f"/data/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with SmallWebServer(files) as server:
        names = [f"http://{server.address}/data/part00{number}-000000.tar" for number in range(2)]
        with StreamLoader(names, 10, fields=("cls",), num_workers=0, cache_dir=cache) as loader:
            assert [labels.tolist() for (labels,) in loader] == [list(range(10))]
    assert len([path for path in cache.rglob("*.tar") if path.is_file()]) == 2
