"""The shard that the feeder's tests have fetched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from feeder_by_hand import SAMPLE_BYTES
from servers.faults import FaultServer

from streamload import ShardWriter


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shard of four samples and three parts."""
    folder = tmp_path_factory.mktemp("feeder")
    with ShardWriter(folder) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "bin": bytes(SAMPLE_BYTES)})
    with FaultServer(folder) as server:
        yield f"{server.url}/shard-000000.tar"
