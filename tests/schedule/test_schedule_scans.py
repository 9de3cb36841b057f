"""Scans of shards whose bytes come bit by bit: what is given out when, and samples before their shard is whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines_run import lines_of
from make_shards import write_numbers

from streamload.decode.open_shards import OpenShards
from streamload.decode.tasks import ScanDone, ScanTask, ShardOpened
from streamload.errors import ShardFormatError, StorageError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.window import PartWindow
from streamload.index.listing import Listing, Shard, list_shards
from streamload.index.tables import Tables
from streamload.limits import SCANNED_PARTS
from streamload.order.plan import OrderOptions, RankPlan
from streamload.schedule.planned import locate
from streamload.schedule.scan_feed import ScanFeed
from streamload.schedule.scans import Scans
from streamload.storage.storages import Storages
from streamload.tar.scan import scan_shard
from streamload.workers.task_runner import scan

COUNTS = (40, 3, 25, 60)


def arriving(end: Callable[[int, int], int]) -> Fetcher:
    """A fetcher of all shards, of which so much is there."""
    fetcher = SimpleNamespace(
        fetched=range(len(COUNTS)),
        window=PartWindow(1 << 60),
        arrived_from=lambda shard, start: (end(shard, start), None),
        notify=lambda: None,
    )
    return cast("Fetcher", fetcher)


class Arrival:
    """Shards in unlinked files that are filled from the front, as a fetcher would fill them."""

    def __init__(self, listing: Listing, *, tables: Tables | None = None) -> None:
        self.contents = [Path(shard.url).read_bytes() for shard in listing.shards]
        self.listing = listing
        self.tables = tables or Tables(listing)
        self.ends = [0] * len(self.contents)
        self.scans = Scans(self.tables, fetcher=arriving(lambda shard, _: self.ends[shard]))
        self.open = OpenShards()
        self._descriptors: list[int] = []
        for number, content in enumerate(self.contents):
            descriptor = os.memfd_create("shard")
            os.ftruncate(descriptor, len(content))
            self._descriptors.append(descriptor)
            self.open.add(ShardOpened(number, listing.shards[number].url, len(content)), descriptor)

    def fetch(self, shard: int, end: int, *, total: bool = True) -> None:
        """Have the bytes up to `end` come."""
        content = self.contents[shard]
        end = min(end, len(content))
        os.pwrite(self._descriptors[shard], content[self.ends[shard] : end], self.ends[shard])
        self.ends[shard] = end
        self.scans.available(shard, end, len(content) if total else None)

    def scan(self) -> ScanDone | None:
        """Do the next scan, if there is one."""
        task = self.scans.next_task()
        if task is None:
            return None
        done = scan(task, self.open)
        self.scans.on_done(done)
        return done


def bare(folder: Path, counts: tuple[int, ...] = COUNTS) -> Listing:
    return list_shards(write_numbers(folder, counts, index=False) + "/*.tar", None)


@pytest.fixture
def arrival(tmp_path: Path) -> Iterator[Arrival]:
    made = Arrival(bare(tmp_path / "shards"))
    yield made
    made.open.close()


def test_a_scan_is_given_out_when_its_bytes_have_come(arrival: Arrival) -> None:
    scans = arrival.scans
    assert scans.wanted() == []
    scans.request([0, 2])
    assert scans.wanted() == [0, 2]
    assert scans.next_bytes(2) == (0, 512)
    assert scans.next_task() is None
    arrival.fetch(0, 511)
    assert scans.next_task() is None
    arrival.fetch(0, 20_000)
    task = scans.next_task()
    assert task == ScanTask(0, (0,), 0, 20_000, len(arrival.contents[0]))
    assert scans.wanted() == [0, 2], "until it has ended"
    arrival.fetch(0, 30_000)
    assert scans.next_task() is None, "one scan of a shard at a time"
    scans.on_done(scan(task, arrival.open))
    found = arrival.tables.find(0)
    assert found is not None
    assert 0 < len(found) < COUNTS[0]
    start, needs = scans.next_bytes(0)
    assert 0 < start < 20_000 < needs
    again = scans.next_task()
    assert again == ScanTask(1, (0,), start, 30_000, len(arrival.contents[0]))
    scans.on_done(scan(again, arrival.open))
    assert scans.next_task() is None, "nothing more has come"


def test_the_earlier_requested_goes_first(arrival: Arrival) -> None:
    arrival.scans.request([2, 0, 1])
    for shard in (0, 1, 2):
        arrival.fetch(shard, 1 << 30)
    tasks = [arrival.scans.next_task() for _ in range(4)]
    assert [None if task is None else task.shards for task in tasks] == [(2,), (0,), (1,), None]


def test_a_shard_whose_turn_has_not_come_is_scanned_as_a_whole(arrival: Arrival) -> None:
    """Each scan has a cost of its own, and nobody waits for this one."""
    arrival.scans.request([0, 2])
    size = len(arrival.contents[2])
    arrival.fetch(2, size - 1)
    assert arrival.scans.next_task() is None
    arrival.fetch(2, size)
    assert arrival.scans.next_task() == ScanTask(0, (2,), 0, size, size)


def test_what_a_batch_waits_for_is_put_first(tmp_path: Path) -> None:
    """The others may have been requested by a pass that was left."""
    scans, feed, fetcher = fetched(tmp_path, *[2 * PART_BYTES] * 4)
    scans.request(range(4))
    feed.pump()
    for shard in (2, 3, 2):
        scans.put_first(shard)
    assert scans.wanted() == [3, 2, 0, 1]
    scans.put_first(3)
    feed.pump()
    fetcher.notify()
    keys = []
    while (key := fetcher.window.next_missing()) is not None:
        keys.append(key)
        fetcher.window.admit(key, PART_BYTES)
    assert keys == [part_key(shard, number) for shard in (3, 2, 0, 1) for number in (0, 1)]
    for shard in (2, 3):
        fetcher.arrived(fetcher.state_of(shard), 0, PART_BYTES)
    feed.pump()
    task = scans.next_task()
    assert task is not None
    assert task.shards == (3,)
    assert scans.next_task() is None
    asyncio.run(fetcher.close())


def test_of_a_shard_of_unknown_size_what_has_come_is_scanned_at_once(arrival: Arrival) -> None:
    """It is compressed, and its parts take room that those before it may need."""
    arrival.scans.request([0, 2])
    arrival.fetch(2, 5_000, total=False)
    assert arrival.scans.next_task() == ScanTask(0, (2,), 0, 5_000, None)


def test_a_shard_is_scanned_as_it_arrives_when_those_before_it_are_known(arrival: Arrival) -> None:
    arrival.scans.request([0, 2])
    arrival.fetch(2, 5_000)
    assert arrival.scans.next_task() is None
    arrival.fetch(0, 1 << 30)
    done = arrival.scan()
    assert done is not None
    assert [each.shard for each in done.found] == [0]
    assert arrival.scans.next_task() == ScanTask(1, (2,), 0, 5_000, len(arrival.contents[2]))


def test_of_a_large_shard_much_is_scanned_before_its_turn(tmp_path: Path) -> None:
    """It may never be in memory as a whole."""
    scans, feed, fetcher = fetched(tmp_path, PART_BYTES, 6 * PART_BYTES)
    scans.request([0, 1])
    feed.pump()
    for number in range(3):
        come(fetcher, 1, number)
    feed.pump()
    assert scans.next_task() is None
    come(fetcher, 1, 3)
    feed.pump()
    task = scans.next_task()
    assert task is not None
    assert (task.shards, task.available) == ((1,), 4 * PART_BYTES)
    asyncio.run(fetcher.close())


def test_what_is_gone_again_is_not_scanned(tmp_path: Path) -> None:
    """The disk cache may have gone off since it was said to be there; memory that is not filled yet reads as zeros."""
    there = 20_000
    tables = Tables(bare(tmp_path / "shards"))
    scans = Scans(tables, fetcher=arriving(lambda _, start: start + there))
    scans.request([0])
    scans.available(0, 20_000, 50_000)
    there = 0
    assert scans.next_task() is None
    there = 10_000
    assert scans.next_task() == ScanTask(0, (0,), 0, 10_000, 50_000)


def fetched(tmp_path: Path, *sizes: int, budget_bytes: int = 1 << 30) -> tuple[Scans, ScanFeed, Fetcher]:
    """Scans of shards of so many bytes, which nobody fetches."""
    folder = "http://127.0.0.1:9"
    listed = tuple(Shard(f"{folder}/{n}.tar", f"{n}.tar", size, 0, folder) for n, size in enumerate(sizes))
    listing = Listing(listed, None, (None,) * len(sizes), ())
    tables = Tables(listing)
    fetcher = Fetcher(
        listing,
        frozenset(range(len(sizes))),
        Storages(),
        budget_bytes=budget_bytes,
        slot_bytes=lambda: 0,
        wake=lambda: None,
        progress=lambda: None,
    )
    scans = Scans(tables, fetcher=fetcher)
    return scans, ScanFeed(scans, fetcher), fetcher


def come(fetcher: Fetcher, shard: int, number: int) -> None:
    fetcher.window.admit(part_key(shard, number), PART_BYTES)
    fetcher.arrived(fetcher.state_of(shard), number, PART_BYTES)


def test_a_scan_holds_what_it_reads_and_nothing_is_held_between_scans(tmp_path: Path) -> None:
    """What was evicted in between is requested again; if it were during a scan, that would read zeros."""
    scans, feed, fetcher = fetched(tmp_path, 3 * PART_BYTES)
    scans.request([0])
    feed.pump()
    come(fetcher, 0, 0)
    feed.pump()
    fetcher.window.plan([part_key(1, 0)])
    assert list(fetcher.window.evictable()) == [part_key(0, 0)], "a batch comes first"
    task = scans.next_task()
    assert task is not None
    assert task.available == PART_BYTES
    assert list(fetcher.window.evictable()) == []
    asyncio.run(fetcher.close())


def requested(fetcher: Fetcher, shards: int) -> dict[int, list[int]]:
    """The parts that are wanted, by shard."""
    parts = {shard: [n for n in range(9) if fetcher.window.is_expected(part_key(shard, n))] for shard in range(shards)}
    return {shard: numbers for shard, numbers in parts.items() if numbers}


def test_shards_of_unknown_size_leave_room_for_the_rest_of_those_before_them(tmp_path: Path) -> None:
    """A first part of each of very many would come before the second part of the first, which is needed first."""
    scans, feed, fetcher = fetched(tmp_path, *[-1] * 99, budget_bytes=1 << 40)
    scans.request(range(99))
    feed.pump()
    first_parts = {shard: [0] for shard in range(SCANNED_PARTS // 4)}
    assert requested(fetcher, 99) == first_parts, "four parts each are expected"
    fetcher.state_of(1).total_bytes = 4 * PART_BYTES  # its answer has begun
    feed.pump()
    assert requested(fetcher, 99) == first_parts, "the first of all comes first"
    fetcher.state_of(0).total_bytes = 4 * PART_BYTES
    feed.pump()
    assert requested(fetcher, 99) == first_parts | {0: [0, 1, 2, 3], 1: [0, 1, 2, 3]}
    for shard in range(SCANNED_PARTS):
        fetcher.state_of(shard).total_bytes = PART_BYTES
    feed.pump()
    assert requested(fetcher, 99) == {shard: [0] for shard in range(SCANNED_PARTS)}, "one part each"
    asyncio.run(fetcher.close())


def test_a_part_that_cannot_be_fetched_is_an_error_at_its_shards_turn(tmp_path: Path) -> None:
    scans, feed, fetcher = fetched(tmp_path, PART_BYTES, PART_BYTES)
    scans.request(range(2))
    feed.pump()
    fetcher.failed(fetcher.state_of(1), 0, StorageError("it is gone"))
    feed.pump()
    assert not fetcher.window.is_expected(part_key(1, 0)), "it would be requested again and again"
    scans.check([0])
    with pytest.raises(StorageError, match="gone"):
        scans.check([0, 1])
    assert [str(error) for error in scans.try_again()] == ["it is gone"]
    scans.check([1])
    asyncio.run(fetcher.close())


def test_what_a_scan_reads_stays_where_a_later_part_cannot_be_fetched(tmp_path: Path) -> None:
    """Freed, it would read zeros there, and call the shard damaged."""
    scans, feed, fetcher = fetched(tmp_path, 3 * PART_BYTES)
    scans.request([0])
    feed.pump()
    come(fetcher, 0, 0)
    feed.pump()
    assert scans.next_task() is not None
    fetcher.failed(fetcher.state_of(0), 1, StorageError("it is gone"))
    feed.pump()
    scans.check([0])
    assert not list(fetcher.window.evictable())
    asyncio.run(fetcher.close())


def test_a_shard_of_which_something_was_evicted_is_looked_at_again(tmp_path: Path) -> None:
    """What has not changed is not looked at again, and this has."""
    scans, feed, fetcher = fetched(tmp_path, 2 * PART_BYTES, 2 * PART_BYTES)
    scans.request(range(2))
    feed.pump()
    come(fetcher, 1, 0)
    feed.pump()
    assert requested(fetcher, 2) == {0: [0, 1], 1: [0, 1]}
    fetcher.window.drop(part_key(1, 0))
    feed.pump()
    assert fetcher.arrived_from(1, 0)[0] == 0
    come(fetcher, 1, 0)
    come(fetcher, 1, 1)
    feed.pump()
    task = scans.next_task()
    assert task is not None
    assert (task.shards, task.available) == ((1,), 2 * PART_BYTES)
    asyncio.run(fetcher.close())


def test_a_shard_that_failed_is_requested_again_when_it_is_tried_again(tmp_path: Path) -> None:
    scans, feed, fetcher = fetched(tmp_path, PART_BYTES)
    for _ in range(3):
        scans.request([0])
        feed.pump()
        assert requested(fetcher, 1) == {0: [0]}
        fetcher.failed(fetcher.state_of(0), 0, StorageError("it is gone"))
        feed.pump()
        assert requested(fetcher, 1) == {}
        scans.try_again()
        fetcher.try_again()
    asyncio.run(fetcher.close())


def test_a_shard_that_has_ended_is_known(arrival: Arrival) -> None:
    arrival.scans.request([0])
    while arrival.scans.wanted():
        arrival.fetch(0, arrival.ends[0] + 7_000)
        arrival.scan()
    assert arrival.tables.counts.values.tolist() == [COUNTS[0], -1, -1, -1]
    arrival.scans.request([0])
    assert arrival.scans.wanted() == []
    table = arrival.tables.find(0)
    whole = scan_shard(memoryview(arrival.contents[0]), "")
    assert table is not None
    assert table.keys() == whole.keys()
    assert table.shard_bytes == whole.shard_bytes


def test_a_shard_that_is_growing_can_be_requested_again(arrival: Arrival) -> None:
    """As the next epoch does, with its own scans and the tables of the loader."""
    arrival.scans.request([0])
    arrival.fetch(0, 20_000)
    arrival.scan()
    start, needs = arrival.scans.next_bytes(0)
    later = Arrival(arrival.listing, tables=arrival.tables)
    later.scans.request([0])
    assert later.scans.wanted() == [0]
    assert later.scans.next_bytes(0) == (start, needs)
    later.fetch(0, 1 << 30)
    done = later.scan()
    later.open.close()
    assert done is not None
    assert later.tables.counts.values[0] == COUNTS[0]


def test_the_end_of_a_shard_is_scanned_when_its_size_becomes_known(arrival: Arrival) -> None:
    arrival.scans.request([1])
    arrival.fetch(1, 1 << 30, total=False)
    done = arrival.scan()
    assert done is not None
    assert done.found[0].piece is not None
    assert not done.found[0].piece.ended
    assert arrival.scan() is None
    arrival.fetch(1, 1 << 30)
    assert arrival.scan() is not None
    assert arrival.tables.counts.values[1] == COUNTS[1]


def test_a_size_that_was_reported_once_is_remembered(arrival: Arrival) -> None:
    arrival.scans.request([1])
    arrival.fetch(1, 600)
    arrival.fetch(1, 1 << 30, total=False)
    assert arrival.scan() is not None
    assert arrival.tables.counts.values[1] == COUNTS[1]


def test_requesting_is_idempotent(arrival: Arrival) -> None:
    arrival.scans.request([0, 0])
    arrival.fetch(0, 5_000)
    arrival.scans.request([0])
    assert arrival.scans.next_task() is not None
    arrival.scans.request([0])
    arrival.fetch(0, 10_000)
    assert arrival.scans.next_task() is None
    local = Scans(arrival.tables)
    local.request([1, 1])
    local.request([1])
    assert [task is None for task in (local.next_task(), local.next_task())] == [False, True]


def test_bytes_of_shards_that_nobody_requested(arrival: Arrival) -> None:
    arrival.fetch(3, 1 << 30)
    assert arrival.scans.next_task() is None
    assert arrival.scans.wanted() == []


def test_damage_is_raised_and_nothing_more_is_wanted(arrival: Arrival) -> None:
    content = bytearray(arrival.contents[0])
    content[len(content) // 1024 * 512] ^= 1
    table = scan_shard(memoryview(arrival.contents[0]), "")
    content[int(table.member_offset[20]) - 500] ^= 1
    arrival.contents[0] = bytes(content)
    arrival.scans.request([0])
    while arrival.scans.wanted():
        arrival.fetch(0, arrival.ends[0] + 5_000)
        arrival.scan()
    arrival.scans.request([0])
    with pytest.raises(ShardFormatError) as caught:
        arrival.scans.check([0])
    assert caught.value.offset == int(table.member_offset[20]) - 512
    assert caught.value.url == arrival.listing.shards[0].url
    assert arrival.scans.wanted() == []


def test_local_shards_are_scanned_whole_and_at_once(tmp_path: Path) -> None:
    listing = bare(tmp_path / "shards")
    scans = Scans(Tables(listing))
    scans.request([1, 0])
    assert scans.wanted() == []
    assert [scans.next_task(), scans.next_task()] == [ScanTask(0, (1, 0)), None]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_rows_flow_as_bytes_come_and_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("arriving")
    listing = bare(folder / "shards")
    arrival = Arrival(listing)
    order = OrderOptions(3, data.draw(st.booleans()), data.draw(st.sampled_from([0, 5, 30])), 1, 4, False, True)
    plan = RankPlan(order, arrival.tables.counts, 0, 0, 1)
    rows, located = [], 0
    while True:
        while missing := plan.missing():
            arrival.scans.request(missing)
            first = missing[0]
            assert first in arrival.scans.wanted()
            arrival.fetch(first, arrival.ends[first] + data.draw(st.sampled_from([300, 5_000, 20_000])))
            arrival.scan()
        block = plan.take(16)
        if block is None:
            break
        planned = locate(block, arrival.tables, ("cls",), verify=False)
        (column,) = planned.table.columns()
        for row, shard in enumerate(block.shard.tolist()):
            start, size = int(column.offsets[row]), int(column.sizes[row])
            assert start + size <= arrival.ends[shard], "it has come"
            rows.append(int(arrival.contents[shard][start : start + size]))
        located += any(arrival.tables.counts.values[shard] < 0 for shard in block.shard.tolist())
    arrival.open.close()
    assert located, "some rows came before their shard was whole"
    starts = np.cumsum([0, *COUNTS])
    expected = []
    with_counts = Tables(list_shards(write_numbers(folder / "indexed", COUNTS)))
    known = RankPlan(order, with_counts.counts, 0, 0, 1)
    while (block := known.take(64)) is not None:
        expected += (starts[block.shard] + block.sample).tolist()
    assert rows == expected


def test_shards_that_wait_for_their_turn_cost_nothing(tmp_path: Path) -> None:
    """`len()` of a dataset without an index asks for all of its shards at once."""

    def cost(shards: int) -> tuple[int, int]:
        scans, feed, _ = fetched(tmp_path, *[10_000] * shards)
        scans.request(range(shards))
        feed.pump()
        return lines_of(feed.pump), lines_of(scans.next_task)

    few, many = cost(100), cost(5000)
    assert many[0] < 2 * few[0]
    assert many[1] < 2 * few[1]
