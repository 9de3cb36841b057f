"""The Hugging Face hub through its own filesystem class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from servers.hub import Hub

from streamload import StreamLoader
from streamload.errors import ShardNotFoundError
from streamload.storage.storages import Storages

hub_files = pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.usefixtures("feeders_in_threads")


@pytest.fixture(params=["indexed", "plain"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    folder = Path(write_numbers(tmp_path / "set", [30, 20], index=request.param == "indexed"))
    files = {f"train/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Hub(files | {"README.md": b"# numbers"}) as server:
        yield server


def options_for(hub: Hub, given_as: str) -> dict[str, Any]:
    options: dict[str, Any] = {"endpoint": hub.url, "token": False}
    if given_as == "filesystem":
        return {"filesystem": hub_files.HfFileSystem(**options, skip_instance_cache=True)}
    return {"storage_options": {"hf": {**options, "skip_instance_cache": True}}}


@pytest.mark.parametrize("given_as", ["filesystem", "storage_options"])
@pytest.mark.parametrize("pattern", ["train", "train/*.tar", "**/*.tar"])
def test_a_dataset_is_read(hub: Hub, given_as: str, pattern: str) -> None:
    url = f"hf://datasets/me/numbers/{pattern}"
    with StreamLoader(url, 10, shuffle=False, num_workers=0, **options_for(hub, given_as)) as loader:
        labels = [label for batch in loader for label in batch["cls"].tolist()]
    assert labels == list(range(50))
    assert any(requested is not None for path, requested in hub.ranges if path.endswith(".tar"))


def test_what_is_missing_is_named(hub: Hub) -> None:
    storages = Storages(**options_for(hub, "storage_options"))
    url = "hf://datasets/me/numbers/train/part000-00000.tar"
    with pytest.raises(ShardNotFoundError, match="did you mean 'part000-000000.tar'") as caught:
        storages.for_url(url).info(url)
    assert caught.value.url == url
