"""The shard that the feeder's tests have fetched."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterator

import pytest
from feeder_by_hand import SAMPLE_BYTES
from servers.faults import FaultServer

from streamload import ShardWriter


@pytest.fixture(scope="module")
def folder_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shard of four samples and three parts: beside its index, in `plain` without, and in `gz` compressed, twice."""
    folder = tmp_path_factory.mktemp("feeder")
    with ShardWriter(folder) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "bin": bytes(SAMPLE_BYTES)})
    (folder / "plain").mkdir()
    shutil.copy(folder / "shard-000000.tar", folder / "plain")
    (folder / "gz").mkdir()
    compressed = gzip.compress((folder / "shard-000000.tar").read_bytes(), 1)
    for number in range(2):
        (folder / "gz" / f"shard-{number}.tar.gz").write_bytes(compressed)
    with FaultServer(folder) as server:
        yield server.url


@pytest.fixture(scope="module")
def url(folder_url: str) -> str:
    """The shard with an index."""
    return f"{folder_url}/shard-000000.tar"


@pytest.fixture(scope="module")
def plain_url(folder_url: str) -> str:
    """The shard without."""
    return f"{folder_url}/plain/shard-000000.tar"


@pytest.fixture(scope="module")
def gz_url(folder_url: str) -> str:
    """Two compressed shards."""
    return f"{folder_url}/gz/shard-{{0..1}}.tar.gz"
