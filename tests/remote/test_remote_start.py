"""A storage that fails from the first request on, also for the index: a loader starts, and gives what it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
from indexed_shards import read_index
from places import Place
from servers.faults import FaultServer, Script

from streamload import ShardWriter, StreamLoader
from streamload.order.randomness import permutation

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SIZES = [[2_000] * 30] * 3
LABELS = list(range(90))


def labels_from(server: FaultServer, *, through_fsspec: bool) -> list[int]:
    urls = Place(server.url).urls("indexed", range(3))
    how: dict[str, Any] = {"filesystem": fsspec.filesystem("http")} if through_fsspec else {}
    with StreamLoader(urls, 8, fields=("cls",), num_workers=0, **how) as loader:
        assert len(loader) == 12  # which needs the index
        return [label for (labels,) in loader for label in labels.tolist()]


@pytest.mark.parametrize(
    ("faults", "through_fsspec"),
    [
        ({"cut_share": 0.4}, False),
        ({"reset_share": 0.4}, True),
        ({"status": 503, "status_share": 0.4}, False),
        ({"status": 500, "status_share": 0.4}, True),
    ],
    ids=["cut", "reset", "503", "500"],
)
def test_an_epoch_begins_and_ends(server: FaultServer, faults: dict[str, Any], through_fsspec: bool) -> None:
    server.play(Script(seed=1, **faults))
    assert labels_from(server, through_fsspec=through_fsspec) == LABELS


def test_without_an_index_shards_are_fetched_concurrently_from_the_start(server: FaultServer) -> None:
    server.play(Script(first_byte_s=0.3))
    with StreamLoader(Place(server.url).urls("plain", range(3)), 8, fields=("cls",), num_workers=0) as loader:
        assert [label for (labels,) in loader for label in labels.tolist()] == LABELS
    assert server.report().most_beside == 3


def test_a_rank_loads_the_tables_of_its_own_shards_alone(tmp_path: Path) -> None:
    """A table is larger here than what is read at once, so that each is a request."""
    shards, samples, ranks = 12, 1_700, 4
    with ShardWriter(tmp_path / "data", max_count=samples) as writer:
        for number in range(shards * samples):
            writer.write({"__key__": f"{number:08d}", "cls": number})
    index = read_index(tmp_path / "data" / ".streamload")
    starts = {entry.start: number for number, entry in enumerate(index.shards)}
    with FaultServer(tmp_path) as server:
        for rank in (0, 3):
            server.play(Script())
            urls = f"{server.url}/data"
            with StreamLoader(
                urls, 5, shuffle=500, fields=("cls",), seed=0, rank=rank, world_size=ranks, num_workers=0
            ) as loader:
                next(iter(loader))
                spans = [of for _, path, of in server.report().log if path.endswith(".bin")]
            requested = [starts[int(str(of).removeprefix("bytes=").split("-")[0])] for of in spans]
            own = permutation(0, 0, shards).tolist()[rank * shards // ranks : (rank + 1) * shards // ranks]
            assert sorted(requested) == sorted(own)
