"""Addresses as people write them: with an IPv6 host, with a user and a password, of a server with its own authority."""

from __future__ import annotations

import base64
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from servers.small_web_server import SmallWebServer
from servers.threaded_server import Answer, ThreadedServer

from streamload import StreamLoader
from streamload.errors import StorageError
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

LOGIN = "us%40er:p%3Aw%2F"
BASIC = "Basic " + base64.b64encode(b"us@er:p:w/").decode()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two shards, without an index."""
    folder = Path(write_numbers(tmp_path_factory.mktemp("web") / "set", [3, 2], index=False))
    return {f"/set/{number}.tar": path.read_bytes() for number, path in enumerate(sorted(folder.glob("*.tar")))}


def labels_of(urls: str | list[str]) -> list[int]:
    with StreamLoader(urls, 2, fields=("cls",), num_workers=0) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


def test_an_ipv6_host_with_braces_and_lists(files: dict[str, bytes]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("needs IPv6")
    with SmallWebServer(files, host="::1") as server:
        root = f"http://{server.address}/set"
        for urls in (f"{root}/{{0,1}}.tar", f"{root}/0.tar::{root}/1.tar", [f"{root}/0.tar", f"{root}/1.tar"]):
            assert labels_of(urls) == list(range(5))


def test_user_and_password_of_a_url_log_in(files: dict[str, bytes]) -> None:
    with SmallWebServer(files, authorization=BASIC) as server:
        assert labels_of(f"http://{LOGIN}@{server.address}/set/{{0,1}}.tar") == list(range(5))
        with pytest.raises(StorageError, match=r"access is denied .*as in https://USER:PASSWORD@HOST/"):
            labels_of(f"http://{server.address}/set/0.tar")


def test_another_host_to_which_a_server_redirects_does_not_get_them(
    files: dict[str, bytes],
) -> None:
    with SmallWebServer(files) as other, SmallWebServer(files, moved_to=f"http://{other.address}") as server:
        url = f"http://{LOGIN}@{server.address}/set/0.tar"
        assert Storages().for_url(url).read_bytes(url, most_bytes=1 << 20) == files["/set/0.tar"]
    assert {*server.requested} == {("/set/0.tar", BASIC)}
    assert {*other.requested} == {("/set/0.tar", None)}


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_the_advice_for_a_certificate_that_is_not_trusted_helps(
    kind: str, files: dict[str, bytes], authority: tuple[Path, Path]
) -> None:
    own, certificate = authority
    with SmallWebServer(files, certificate=certificate) as server:
        address = f"https://{server.address}"
        url = f"{address}/set/0.tar" if kind == "http" else "s3://set/0.tar"
        options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": address} if kind == "s3" else {}
        advice = r"or name the file of your own .*storage_options=\{'client_kwargs': \{'verify': PEM_FILE\}\}"
        with pytest.raises(StorageError, match=advice):
            Storages(options).for_url(url).info(url)
        for verify in (str(own), False):
            storage = Storages(options | {"client_kwargs": {"verify": verify}}).for_url(url)
            assert storage.info(url).bytes == len(files["/set/0.tar"])
            assert storage.read_bytes(url, most_bytes=1 << 20) == files["/set/0.tar"]


class PartsAs200(ThreadedServer):
    """Sends parts with status 200, as `rclone serve s3` does."""

    def answer(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        return 200, {"ETag": '"v"', "Content-Range": "bytes 2-4/9"}, b"234"


async def test_a_certificate_counts_for_parts_with_status_200(authority: tuple[Path, Path]) -> None:
    own, certificate = authority
    with PartsAs200(certificate=certificate) as server:
        options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": f"https://{server.address}"}
        for verify in (str(own), False):
            storage = Storages(options | {"client_kwargs": {"verify": verify}}).for_url("s3://set/0.tar")
            body = await storage.open_range("s3://set/0.tar", 2, 5)
            assert [piece async for piece in body.pieces] == [b"234"]
            await storage.aclose()


@pytest.mark.parametrize("path", ["/set/0.tar", "/set"])
def test_https_to_a_server_that_does_not_speak_tls_is_said_once(
    files: dict[str, bytes], caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with SmallWebServer(files) as server:
        with pytest.raises(StorageError, match=r"^the server's certificate is not trusted, or ") as caught:
            labels_of(f"https://{server.address}{path}")
    assert str(caught.value.url).startswith(f"https://{server.address}/set")
    assert caught.value.__cause__ is None
    assert not caplog.records
