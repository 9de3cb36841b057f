"""Which shard is closed for another one, and that finding it costs the same however many are open."""

from __future__ import annotations

from lines_run import lines_of

from streamload.fetch.fetched_shards import FetchedShards
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.window import PartWindow
from streamload.index.listing import Listing, Shard


def opened(count: int) -> tuple[FetchedShards, PartWindow]:
    """As many shards as may be open, of each of which nobody needs its two parts any more."""
    folder = "http://127.0.0.1:9"
    listed = tuple(Shard(f"{folder}/{n}.tar", f"{n}.tar", 2 * PART_BYTES, 0, folder) for n in range(count + 1))
    shards = FetchedShards(Listing(listed, None, (None,) * (count + 1), ()), most_open=count)
    window = PartWindow(1 << 50)
    for shard in range(count):
        for number in range(2):
            window.admit(part_key(shard, number), PART_BYTES)
            window.arrive(part_key(shard, number), PART_BYTES)
        shards.opened(shard)
    return shards, window


def test_the_shard_of_which_nothing_is_there_is_closed_and_else_the_one_that_is_needed_last() -> None:
    shards, window = opened(5)
    assert shards.to_close(2, window) == [], "it is open"
    window.hold([part_key(0, 1)])
    assert shards.to_close(5, window) == [1], "the first one whose parts may all go"
    for number in range(2):
        window.drop(part_key(3, number))
    assert shards.to_close(5, window) == [3], "nothing is lost with it"
    shards, window = opened(1)
    window.hold([part_key(0, 0)])
    assert shards.to_close(1, window) is None


def test_finding_the_shard_to_close_costs_the_same_however_many_are_open() -> None:
    few, many = opened(100), opened(5000)
    opened(2)[0].to_close(2, opened(2)[1])  # what is done once
    assert lines_of(lambda: many[0].to_close(5000, many[1])) == lines_of(lambda: few[0].to_close(100, few[1]))
