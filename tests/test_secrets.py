"""Logins and signatures in urls reach the storage, and nobody who looks at reprs, batches, errors or logs."""

from __future__ import annotations

import io
import logging
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from matrix import exhaustive
from servers.small_web_server import SmallWebServer
from streamload_tools.main import app
from typer.testing import CliRunner

from streamload import Mixture, Portion, StreamLoader, TarDataset
from streamload.errors import without_credentials, without_secrets

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SECRET = "told-secret"
SIGNED = f"v=1&X-Amz-Signature={SECRET}&token={SECRET}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = Path(write_numbers(tmp_path_factory.mktemp("web") / "set", [4]))
    return {f"/{path.relative_to(folder.parent)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[SmallWebServer]:
    with SmallWebServer(files) as server:
        yield server


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What all of our loggers say, down to DEBUG."""
    told, logger = io.StringIO(), logging.getLogger("streamload")
    handler, level = logging.StreamHandler(told), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield told
    logger.removeHandler(handler)
    logger.setLevel(level)


def fails(_: object) -> None:
    raise ValueError("by the test")


@pytest.mark.parametrize("query", [exhaustive(("",)), f"?{SIGNED}"])
def test_what_a_loader_shows(server: SmallWebServer, logged: io.StringIO, query: str) -> None:
    name = next(path for path in server.files if path.endswith(".tar"))
    url = f"http://me:{SECRET}@{server.address}{name}{query}"
    shown = f"http://{server.address}{name}" + ("?v=1" if query else "")
    with StreamLoader(url, 2, fields=("__url__", "cls"), num_workers=0, timeout=60) as loader:
        assert [urls for urls, _ in loader] == [(shown, shown)] * 2
        said = [repr(loader), repr(loader.statistics())]
    with StreamLoader(url, 2, fields=("cls",), transform=fails, num_workers=0, timeout=60) as loader:
        with pytest.raises(Exception, match="by the test") as caught:
            next(iter(loader))
    missing = url.replace(".tar", "-not-there.tar")
    for urls in (missing, [url, url], Mixture({"a": (url, 1.0), "b": (url, 1.0)})):
        with pytest.raises((Exception,)) as refused, StreamLoader(urls, 2, True, num_workers=0, timeout=60) as loader:
            list(loader)
        said += traceback.format_exception(refused.value)
    said += [repr(Mixture({"a": (url, 1.0)}).portions), *traceback.format_exception(caught.value)]
    said += [repr(vars(pickle.loads(pickle.dumps(caught.value)))), logged.getvalue()]
    assert any(path.startswith(name) and SECRET in str(login) + path for path, login in server.requested) or not query
    assert [line for line in said if SECRET in line] == []


def test_what_a_dataset_shows(server: SmallWebServer) -> None:
    name = next(path for path in server.files if path.endswith(".tar"))
    dataset = TarDataset(f"http://me:{SECRET}@{server.address}{name}", fields=("__url__",))
    with dataset:
        assert dataset[0] == (f"http://{server.address}{name}",)
        assert SECRET not in repr(dataset)


URL = f"http://me:{SECRET}@host/a.tar"


@pytest.mark.parametrize(
    "datasets", [URL, [URL], {URL: 1.0}, {"a": URL}, {URL: (URL, -1.0)}, {URL: (URL, URL)}, {(URL,): (URL, 1.0)}]
)
def test_what_a_mixture_is_refused_with(datasets: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        Mixture(datasets)
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_what_a_portion_shows() -> None:
    portion = Portion(URL, 1.0, index=f"http://me:{SECRET}@host/index")
    assert SECRET not in repr(portion)
    assert SECRET not in repr(Mixture({"a": portion}))


def test_a_mixture_named_by_urls() -> None:
    mixture = Mixture({URL: (URL, 1.0)})
    assert SECRET not in repr(mixture)
    with pytest.raises(ValueError, match="index=") as refused:
        StreamLoader(mixture, 2, index=URL)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("command", [["ls"], ["ls", "--samples"], ["verify"], ["stats"]])
def test_what_commands_print(server: SmallWebServer, command: list[str]) -> None:
    name = next(path for path in server.files if path.endswith(".tar"))
    for end in (f"?{SIGNED}", "-not-there"):
        told = CliRunner().invoke(app, [*command, f"http://me:{SECRET}@{server.address}{name}{end}"])
        assert SECRET not in told.output


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://token@h/a.tar", "http://h/a.tar"),
        ("https://u:p@w@h/a@b.tar?file=1", "https://h/a@b.tar?file=1"),
        ("s3://KEY:se/cret@bucket/a.tar", "s3://bucket/a.tar"),
        ("sftp://me@h/a.tar", "sftp://me@h/a.tar"),
        ("sftp://me:p@h/a.tar", "sftp://h/a.tar"),
        ("abfs://container@account.dfs.core.windows.net/a.tar", None),
        ("simplecache::http://u:p@h/a.tar", "simplecache::http://h/a.tar"),
        ("zip://a.tar::http://u:p@h/z.zip?sig=1", "zip://a.tar::http://h/z.zip"),
        ("http://h:80/a@b.tar", None),
        ("http://[::1]:80/a@b.tar", None),
        ("http://h/download?file=a.tar&api_key=k&author=x", "http://h/download?file=a.tar&author=x"),
        ("s3://b/a.tar?token=1", None),
        ("/d/a:b@c.tar", None),
    ],
)
def test_what_names_a_shard_stays(url: str, kept: str | None) -> None:
    assert without_credentials(url) == (url if kept is None else kept)
    if kept is None and "?" not in url:
        assert without_secrets(url) == url
