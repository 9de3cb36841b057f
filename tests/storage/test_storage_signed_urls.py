"""Urls that are signed again for every run are the same shards to the disk cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from make_shards import write_numbers
from servers.faults import FaultServer, Script
from servers.small_web_server import SmallWebServer
from servers.threaded_server import Answer

from streamload import StreamLoader
from streamload.errors import StorageError, without_secrets
from streamload.fetch.disk_cache import ShardIdentity, url_key
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

AT = "https://host/b/a.tar"
SIGNATURES = [
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=a%2Fb&X-Amz-Date=2&X-Amz-Expires=9&X-Amz-Security-Token=t&"
    "X-Amz-SignedHeaders=host&X-Amz-Signature=00ff",
    "AWSAccessKeyId=k&Signature=vjby%3D&Expires=1175139620",
    "GoogleAccessId=me%40b&Expires=14&Signature=ab",
    "X-Goog-Algorithm=G&X-Goog-Credential=c&X-Goog-Date=d&X-Goog-Expires=9&X-Goog-SignedHeaders=h&X-Goog-Signature=1",
    "sv=2024-11-04&st=2026-01-01T00%3A00Z&se=2026-01-02T00%3A00Z&sr=b&sp=r&spr=https&skoid=1&sktid=2&skt=3&ske=4&sks=b"
    "&skv=5&sip=10.0.0.1&sig=abc%3D",
    "Policy=p&Signature=s&Key-Pair-Id=K",
]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_what_signs_a_url_is_left_out_and_nothing_else(signature: str) -> None:
    assert without_secrets(f"{AT}?{signature}") == AT
    assert without_secrets(f"{AT}?versionId=3&{signature}&partNumber=1") == f"{AT}?versionId=3&partNumber=1"
    assert without_secrets(f"simplecache::{AT}?{signature.upper()}") == f"simplecache::{AT}"
    assert without_secrets(f"zip://x.tar::{AT}?{signature}") == f"zip://x.tar::{AT}"


@pytest.mark.parametrize(
    "url",
    [
        AT,
        "/a?sig=1",
        *(f"{AT}?{query}" for query in ("st=1&se=2", "Expires=1&Policy=2", "v=a&v=b", "")),
    ],
)
def test_what_may_select_the_object_stays(url: str) -> None:
    assert without_secrets(url).rstrip("?") == url.rstrip("?")


def test_two_objects_never_share_a_key() -> None:
    one, other = f"{AT}?st=1&sig=2", f"{AT}?st=2&sig=2"
    assert url_key(one) == url_key(other)
    assert ShardIdentity(one, '"e"', 5).file_name == ShardIdentity(other, '"e"', 5).file_name
    assert ShardIdentity(one, '"e"', 5).file_name != ShardIdentity(other, '"f"', 5).file_name
    assert ShardIdentity(one, '"e"', 5).file_name != ShardIdentity(other, '"e"', 6).file_name
    assert ShardIdentity(f"{AT}?v=1", '"e"', 5).file_name != ShardIdentity(f"{AT}?v=2", '"e"', 5).file_name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    folder = tmp_path_factory.mktemp("signed")
    write_numbers(folder / "set", [30, 20], index=False)
    with FaultServer(folder) as server:
        yield server


def read(server: FaultServer, signature: str, cache: Path | None) -> tuple[list[int], int]:
    """The labels of one run, and how many bytes of shards it fetched."""
    server.play(Script())
    urls = [f"{server.url}/set/part00{number}-000000.tar?{signature}" for number in range(2)]
    with StreamLoader(urls, 7, fields=("cls",), num_workers=0, cache_dir=cache) as loader:
        labels = [label for (labels,) in loader for label in labels.tolist()]
    return labels, server.report().sent_bytes


def test_the_disk_cache_is_hit_however_a_url_is_signed(server: FaultServer, tmp_path: Path) -> None:
    labels, fetched_bytes = read(server, SIGNATURES[0], tmp_path)
    kept = sorted(name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".tar"))
    assert labels == list(range(50))
    assert (fetched_bytes > 0, len(kept)) == (True, 2)
    assert read(server, SIGNATURES[1], tmp_path)[0] == labels
    assert read(server, SIGNATURES[0].replace("Date=2", "Date=3"), tmp_path)[1] < 1000, "all but looking at it"
    assert sorted(name for _, _, names in os.walk(tmp_path) for name in names if name.endswith(".tar")) == kept


class SignedForGet(SmallWebServer):
    """Refuses every request without the signature, and a HEAD too, as S3 does for urls that are signed for GET."""

    def answer(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if method != "GET" or not address.endswith("?X-Amz-Signature=a%2Fb&versionId=3"):
            return 403, {}, b""
        return super().answer(method, address, headers, body)


def test_a_url_that_is_signed_for_get_alone_is_read(tmp_path: Path) -> None:
    folder = Path(write_numbers(tmp_path / "set", [30, 20], index=False))
    with SignedForGet({f"/a b/{path.name}": path.read_bytes() for path in folder.glob("*.tar")}) as server:
        root, query = f"http://{server.address}/a%20b", "X-Amz-Signature=a%2Fb&versionId=3"
        urls = [f"{root}/part00{number}-000000.tar?{query}" for number in range(2)]
        with StreamLoader(urls, 7, fields=("cls",), num_workers=0) as loader:
            assert [label for (labels,) in loader for label in labels.tolist()] == list(range(50))
        assert Storages().for_url(root).info(urls[0]).bytes == (folder / "part000-000000.tar").stat().st_size
        with pytest.raises(StorageError, match="sign the url anew: its signature is wrong or has expired") as caught:
            Storages().for_url(root).info(f"{root}/part000-000000.tar?X-Amz-Signature=told")
        assert "told" not in str(caught.value)
