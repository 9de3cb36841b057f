"""The dataset of a module, and a server that has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from places import write_datasets
from servers.faults import FaultServer, Script


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of the module's `SIZES`, see `write_datasets`; also in the compressions that its `COMPRESSED` names."""
    found = tmp_path_factory.mktemp("data")
    write_datasets(found, request.module.SIZES, getattr(request.module, "COMPRESSED", []))
    return found


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[FaultServer]:
    with FaultServer(folder) as server:
        yield server


@pytest.fixture
def server(running: FaultServer) -> FaultServer:
    """The module's server, which has no faults and an empty record when a test begins."""
    running.play(Script())
    return running
