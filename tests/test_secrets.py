"""Logins, signatures and storage options reach the storage, and nothing that a run shows or leaves behind."""

from __future__ import annotations

import json
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_samples
from servers.small_web_server import SmallWebServer
from typer.testing import CliRunner

from streamload import Mixture, Portion, ShardWriter, StreamLoader, TarDataset
from streamload.cli.main import app
from streamload.cli.shardify import app as shardify
from streamload.errors import without_secrets

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SECRET = "planted-secret"
QUERY = "&".join(
    ["v=1&X-Amz-Date=1&sv=2024&se=2030"]
    + [f"{name}={SECRET}" for name in ("X-Amz-Credential", "X-Amz-Security-Token", "X-Amz-Signature", "sig", "token")]
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("web") / "set"
    write_samples(folder, [{"cls": number, "png": np.full((9, 9, 3), number, np.uint8)} for number in range(4)])
    return {f"/{path.relative_to(folder.parent)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[SmallWebServer]:
    with SmallWebServer(files) as server:
        yield server


def fails(_: object) -> None:
    raise ValueError("by the test")


def shown_error(function: Callable[[], Any]) -> str:
    """An error as it is printed and as it is pickled."""
    with pytest.raises((Exception,)) as caught:
        function()
    told = traceback.format_exception(caught.value)
    return "".join(told) + repr(vars(pickle.loads(pickle.dumps(caught.value))))


def read(urls: Any, **options: Any) -> list[Any]:
    with StreamLoader(urls, 2, **{"fields": ("cls",), "num_workers": 0, **options}) as loader:
        return list(loader)


def run_loaders(url: str, shown_url: str, folder: Path) -> list[str]:
    """Read a shard, and fail to, in several ways; return what was shown."""
    given: dict[str, Any] = {"storage_options": {"headers": {"X-Api-Key": SECRET}}}
    with StreamLoader(url, 2, fields=("__url__", "cls"), num_workers=1, cache_dir=folder / "cache", **given) as loader:
        with loader.trace(folder / "trace.json"):
            assert [urls for urls, _ in loader] == [(shown_url, shown_url)] * 2
        shown = [repr(loader), repr(loader.statistics()), json.dumps(loader.state_dict())]
    with TarDataset(url, fields=("__url__",), **given) as dataset:
        assert dataset[0] == (shown_url,)
        shown.append(repr(dataset))
    missing = url.replace(".tar", "-not-there.tar")
    shown += [
        shown_error(lambda: read(url, transform=fails, **given)),
        shown_error(lambda: read(url, fields=("jpg",), **given)),
        shown_error(lambda: read(url, storage_options={"no_such_option": SECRET})),
        shown_error(lambda: read(url, storage_options={"headers": SECRET})),
        shown_error(lambda: read(missing, **given)),
        shown_error(lambda: read([url, url], **given)),
        shown_error(lambda: read(Mixture({"a": (url, 1.0), "b": (url, 1.0)}), **given)),
        shown_error(lambda: ShardWriter(url, **given)),
    ]
    mixture = Mixture({url: Portion(url, 1.0, index=url)})
    shown += [
        repr(mixture),
        repr([*mixture.portions.values()]),
        shown_error(lambda: StreamLoader(mixture, 2, index=url)),
    ]
    for wrong in (url, {"a": url}, {url: (url, -1.0)}, {(url,): (url, 1.0)}):
        shown.append(shown_error(lambda wrong=wrong: Mixture(wrong)))  # type: ignore[misc]
    return shown


def run_commands(url: str, folder: Path) -> list[str]:
    """Run each command with a shard, with one that is not there, and with options that are wrong."""
    option = f'--storage-option=headers={{"X-Api-Key": "{SECRET}"}}'
    shown = []
    for each in (url, url.replace(".tar", "-not-there.tar")):
        for command in (
            ["ls", each],
            ["ls", "--samples", "--json", each],
            ["verify", "--decode", each],
            ["stats", each],
            ["index", each, "--output", f"{folder}/index"],
            ["map", "builtins:dict", each, f"{folder}/mapped"],
            ["show", each, "--output", f"{folder}/sheet.png"],
        ):
            shown.append(CliRunner().invoke(app, [*command, option]).output)
    for wrong in (SECRET, f"={SECRET}", f"headers={{{SECRET}", f"no_such_option={SECRET}"):
        shown.append(CliRunner().invoke(app, ["ls", url, f"--storage-option={wrong}"]).output)
    return [*shown, CliRunner().invoke(shardify, [f"{folder}/mapped", url, option]).output]


def test_nothing_that_a_run_shows_or_writes_holds_a_secret(
    server: SmallWebServer, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG", "streamload")
    for name in ("XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "TMPDIR").mkdir()
    name = next(path for path in server.files if path.endswith(".tar"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        url, public = f"http://me:{SECRET}@{server.address}{name}?{QUERY}", f"http://{server.address}{name}?v=1"
        shown = run_loaders(url, public, tmp_path) + run_commands(url, tmp_path)
    shown += [caplog.text, *(str(each.message) for each in warned)]
    assert [each for each in shown if SECRET in each] == []
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"trace.json", "sheet.png", "index.json"} <= {path.name for path in written}
    assert any(path.name.endswith(".tar") and "cache" in path.parts for path in written)
    assert [path for path in written if SECRET in str(path) or SECRET.encode() in path.read_bytes()] == []
    assert all(SECRET in address and login for address, login in server.requested if name in address)


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://u:p@w@h/a@b.tar?file=1", "https://h/a@b.tar?file=1"),
        ("s3://KEY:se/cret@bucket/a.tar", "s3://bucket/a.tar"),
        ("sftp://me@h/a.tar", "sftp://me@h/a.tar"),
        ("abfs://container@account.dfs.core.windows.net/a.tar", None),
        ("simplecache::http://u:p@h/a.tar", "simplecache::http://h/a.tar"),
        ("zip://a.tar::http://u:p@h/z.zip?sig=1", "zip://a.tar::http://h/z.zip"),
        ("http://[::1]:80/a@b.tar", None),
        ("http://h/download?file=a.tar&api_key=k&author=x", "http://h/download?file=a.tar&author=x"),
        ("http://h/a.tar?author=x&significance=2&st=1&se=2&expires=3", None),
        ("http://h/a.tar?expires=3&Signature=x&policy=1&versionId=5", "http://h/a.tar?versionId=5"),
        ("s3://b/part-?.tar", None),
        ("'http://u:p@h/a.tar?v=1' and http://h/b.tar?sig=1 differ", "'http://h/a.tar?v=1' and http://h/b.tar differ"),
        ("/data/a?token=1&c=2@x.tar", None),
        ("sftp://me:p@w@h/a@b.tar", "sftp://h/a@b.tar"),
    ],
)
def test_what_names_a_shard_stays(url: str, kept: str | None) -> None:
    assert without_secrets(url) == (url if kept is None else kept)
