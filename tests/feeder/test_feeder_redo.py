"""Tasks that are done again get all bytes that they need, and none is done for nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from feeder_by_hand import FeederByHand, with_feeder
from servers.faults import FaultServer

from streamload import ShardWriter
from streamload.fetch.parts import parts_of_rows

BUDGET_BYTES = 50_000_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A shard of eight small samples."""
    folder = tmp_path_factory.mktemp("redo")
    with ShardWriter(folder) as writer:
        for number in range(8):
            writer.write({"__key__": f"{number}", "bin": bytes(1000)})
    with FaultServer(folder) as server:
        yield f"{server.url}/shard-000000.tar"


def leave_cache(by_hand: FeederByHand) -> None:
    """The disk is full: what was there of the shard comes once more, into memory."""
    state = by_hand.fetcher.state_of(0)
    assert state.cached is not None
    state.cached.close()
    state.cached = None
    by_hand.fetcher.left_cache(state)


def test_a_task_whose_shard_has_left_the_cache_waits_until_all_is_there_again(url: str, tmp_path: Path) -> None:
    async def body(by_hand: FeederByHand) -> None:
        (task,) = await by_hand.begin(1)
        keys = parts_of_rows(task.table.shards, task.table.places())
        assert by_hand.fetcher.there(keys)
        leave_cache(by_hand)
        assert not task.moves
        by_hand.pool.returned.append(task)  # a worker dies with it
        by_hand.pool.resume()
        assert by_hand.pool.again == []
        await by_hand.until(lambda: by_hand.pool.again == [task])
        assert by_hand.fetcher.there(keys)

    with_feeder(url, body, batch_size=4, budget_bytes=BUDGET_BYTES, cache_folder=str(tmp_path))
