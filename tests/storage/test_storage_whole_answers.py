"""Servers that answer a request for a part with the whole file, always or now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from servers.faults import FaultServer, Script
from through_fsspec import through_fsspec

from streamload import StreamLoader
from streamload.errors import StorageError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

ADVICE = r"does not serve parts of files .*nginx, caddy, rclone serve.*copy the shards"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_numbers(tmp_path_factory.mktemp("whole") / "set", [30, 20], index=False))


def labels_of(root: str, **options: Any) -> list[int]:
    urls = [f"{root}/part00{number}-000000.tar" for number in range(2)]
    with StreamLoader(urls, 7, fields=("cls",), num_workers=0, **options) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


def test_a_server_that_never_serves_parts_is_given_up(folder: Path) -> None:
    with FaultServer(folder, Script(whole_share=1.0)) as server:
        with pytest.raises(StorageError, match=f"{ADVICE}.*part00") as caught:
            labels_of(f"http://user:told@{server.url.removeprefix('http://')}")
        assert "told" not in str(caught.value)
        requested = [path for method, path, _ in server.report().log if method == "GET"]
        assert max(requested.count(path) for path in requested) <= 6, "five times, and once to look at it"


@pytest.mark.parametrize("options", [{}, {"filesystem": through_fsspec("http")}], ids=["obstore", "fsspec"])
def test_a_proxy_that_now_and_then_does_not_serve_parts_is_read(options: dict[str, Any], folder: Path) -> None:
    with FaultServer(folder, Script(seed=4, whole_share=0.3)) as server:
        assert labels_of(server.url, **options) == list(range(50))
