"""With little room a loader gives every sample, or says what is too small; it never waits forever."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import tight_runs
from matrix import exhaustive
from places import write_datasets
from preloaded import Preloaded
from servers.faults import FaultServer, Script

SEEDS = [0, *(exhaustive((seed,)) for seed in range(1, 100))]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """The datasets that the chosen runs read: all of them take seconds to compress."""
    needed: dict[str, set[str]] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            run = tight_runs.draw_run(item.callspec.params["seed"])
            needed.setdefault(run.dataset, set()).add(run.form)
    folder = tmp_path_factory.mktemp("tight")
    for name, forms in needed.items():
        write_datasets(folder / name, tight_runs.SHARDS[name], {"gz"} & forms)
    with FaultServer(folder) as running:
        yield running


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_with_little_room_ends(preloaded: Preloaded, server: FaultServer, seed: int) -> None:
    server.play(Script(seed=seed, first_byte_s=random.Random(seed).choice([0.0, 0.002, 0.02])))
    ended = preloaded.run("import tight_runs; tight_runs.main()", seed, server.url)
    assert ended.status == 0, (tight_runs.draw_run(seed), ended.output)
    assert json.loads(ended.output.splitlines()[-1]) in ("all", "too small"), tight_runs.draw_run(seed)
