"""The disk cache in one process: what is kept, what goes, what is right, and what is left."""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_filling import (
    FILE_NAMES_AT,
    PART_BYTES,
    cached_bytes,
    cached_names,
    content,
    fill,
    identity_of,
    part_of,
    partial_names,
    read_through,
)

from streamload.fetch.cache import disk_cache, partial_shard
from streamload.fetch.cache.cached_shard import CacheDamagedError, CachedShard
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.file_locks import locked_file
from streamload.fetch.cache.partial_shard import PartialFiles, PartialShard
from streamload.fetch.cache.shard_identity import ShardIdentity, key_in_name, url_key

N_PARTS = 8
ONE = identity_of(0).bytes
ROOM = ONE + 4 * N_PARTS
"""What a shard takes with its checksums."""


class Listed:
    """Next uses by a list of shards that are to come."""

    def __init__(self, *to_come: ShardIdentity) -> None:
        self.to_come = [url_key(identity.url) for identity in to_come]

    def begin(self, name: str, /) -> None:
        if key_in_name(name) in self.to_come:
            self.to_come.remove(key_in_name(name))

    def position(self, name: str, /) -> float:
        key = key_in_name(name)
        return self.to_come.index(key) if key in self.to_come else float("inf")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture
def cache(folder: str) -> Iterator[DiskCache]:
    made = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    yield made
    made.close()


def opened(cache: DiskCache, identity: ShardIdentity) -> CachedShard:
    shard = cache.open(identity)
    assert shard is not None
    return shard


def checksum(part: int) -> int:
    return zlib.crc32(part_of(content(identity_of(1)), part))


def keep(cache: DiskCache, *identities: ShardIdentity) -> None:
    for identity in identities:
        assert read_through(cache, identity) == N_PARTS
        cache.flush()


def test_a_shard_is_fetched_once_and_read_back(cache: DiskCache, folder: str) -> None:
    first = identity_of(1)
    assert read_through(cache, first) == N_PARTS
    cache.flush()
    assert cached_names(folder) == {first.file_name}
    assert partial_names(folder) == set()
    shard = opened(cache, first)
    assert shard.complete
    assert all(shard.has(part) for part in range(N_PARTS))
    assert asyncio.run(fill(shard, first)) == []
    assert os.pread(shard.descriptor, first.bytes, 0) == content(first)
    shard.close()


def test_the_file_is_named_for_people_too_and_shows_no_secret() -> None:
    name = ShardIdentity("https://me:pw@host/a/träin-1.tar?token=secret", '"x"', 5).file_name
    assert name.endswith("-tr_in_1.tar")
    assert "secret" not in name
    assert "pw" not in name
    assert len(name) < 120


@pytest.mark.parametrize(
    "other",
    [
        ShardIdentity(identity_of(1).url, '"2"', ONE),
        ShardIdentity(identity_of(1).url, None, ONE),
        ShardIdentity(identity_of(1).url, '"1"', ONE - 1),
        ShardIdentity("s3://other/train-000001.tar", '"1"', ONE),
    ],
)
def test_another_version_or_url_is_another_entry(cache: DiskCache, folder: str, other: ShardIdentity) -> None:
    keep(cache, identity_of(1), other)
    assert cached_names(folder) == {identity_of(1).file_name, other.file_name}


def test_an_old_version_goes_first(folder: str) -> None:
    cache = DiskCache(folder, 3 * ROOM, part_bytes=PART_BYTES)
    old, new = identity_of(1), identity_of(1, etag='"2"')
    keep(cache, old, identity_of(2), identity_of(3))
    cache.expect(Listed(new, identity_of(2), new, identity_of(3)))
    keep(cache, new)
    assert cached_names(folder) == {identity.file_name for identity in (new, identity_of(2), identity_of(3))}
    cache.close()


def test_what_was_filled_in_part_is_gone_on_with(cache: DiskCache, folder: str) -> None:
    first = identity_of(1)
    shard = opened(cache, first)
    assert asyncio.run(shard.claim(3))
    shard.write(3 * PART_BYTES, part_of(content(first), 3))
    shard.finish(3, checksum(3))
    assert asyncio.run(shard.claim(4))  # and never finished
    shard.close()
    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    shard = opened(other, first)
    assert [part for part in range(N_PARTS) if shard.has(part)] == [3]
    assert asyncio.run(fill(shard, first)) == [0, 1, 2, 4, 5, 6, 7]
    shard.close()
    other.close()
    assert cached_names(folder) == {first.file_name}


def test_two_openings_fill_one_shard_and_fetch_each_part_once(cache: DiskCache, folder: str) -> None:
    async def both() -> list[list[int]]:
        return await asyncio.gather(*(fill(shard, identity_of(1), 0.003, step) for step, shard in zip((1, -1), shards)))

    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    shards = [opened(cache, identity_of(1)), opened(other, identity_of(1))]
    fetched = asyncio.run(both())
    assert sorted(fetched[0] + fetched[1]) == list(range(N_PARTS))
    assert all(fetched)
    for shard in shards:
        assert shard.complete
        assert os.pread(shard.descriptor, ONE, 0) == content(identity_of(1))
        shard.close()
    other.close()
    cache.flush()
    assert cached_names(folder) == {identity_of(1).file_name}
    assert partial_names(folder) == set()


def test_a_claim_waits_for_the_present_owner_in_this_process_too(cache: DiskCache) -> None:
    async def run() -> list[bool]:
        assert await shard.claim(0)
        waiting = [asyncio.create_task(shard.claim(0)) for _ in range(2)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting)
        shard.abandon(0)
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        shard.write(0, part_of(content(identity_of(1)), 0))
        shard.finish(0, checksum(0))
        return [(await task) for task in (*done, *left)]

    shard = opened(cache, identity_of(1))
    assert asyncio.run(run()) == [True, False]
    shard.close()


def test_a_part_that_is_abandoned_or_whose_owner_is_gone_is_taken_over(cache: DiskCache) -> None:
    async def run() -> None:
        assert await first.claim(0)
        assert await first.claim(1)
        waiting = [asyncio.create_task(second.claim(part)) for part in (0, 1)]
        first.abandon(0)
        assert await asyncio.wait_for(waiting[0], 10)
        assert not waiting[1].done()
        first.close()
        first.abandon(1)
        assert await asyncio.wait_for(waiting[1], 10)

    first, second = opened(cache, identity_of(1)), opened(cache, identity_of(1))
    asyncio.run(run())
    second.close()


def test_a_part_that_arrives_just_before_its_lock_is_had_is_not_fetched(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(cache, identity_of(1)), opened(cache, identity_of(1))
    partial = second.partial
    assert partial is not None
    try_claim = partial.try_claim

    def late(part: int) -> bool:
        assert first.partial is not None
        first.partial.write(0, part_of(content(identity_of(1)), 0))
        first.partial.set_present(part, checksum(part))
        return try_claim(part)

    monkeypatch.setattr(partial, "try_claim", late)
    assert not asyncio.run(second.claim(0))
    assert first.partial is not None
    assert first.partial.try_claim(0)  # nobody keeps its lock
    first.close()
    second.close()


def test_a_shard_that_gets_its_name_while_it_is_opened(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(cache, identity_of(1))
    open_whole = cache._open_whole
    answers = iter([lambda _: None, open_whole])
    monkeypatch.setattr(cache, "_open_whole", lambda identity: next(answers)(identity))
    assert opened(cache, identity_of(1)).complete


def test_a_complete_file_whose_owner_died_gets_its_name_from_the_next(cache: DiskCache, folder: str) -> None:
    tag = partial_shard.boot_tag()
    if tag is None:
        pytest.skip("nothing is shared here")
    at = os.path.join(folder, FILE_NAMES_AT, "partial")
    dead = PartialShard.create(PartialFiles(at, identity_of(1).file_name, tag, ONE, PART_BYTES))
    dead.write(0, content(identity_of(1)))
    for part in range(N_PARTS):
        dead.set_present(part, checksum(part))
    dead.close()
    shard = opened(cache, identity_of(1))
    assert shard.complete
    cache.flush()
    assert cached_names(folder) == {identity_of(1).file_name}
    assert partial_names(folder) == set()
    shard.close()


@pytest.mark.parametrize("kind", ["part", "state"])
def test_half_of_a_pair_is_swept_away(cache: DiskCache, folder: str, kind: str) -> None:
    opened(cache, identity_of(1)).close()
    for name in partial_names(folder):
        if name.endswith(kind):
            os.unlink(os.path.join(folder, FILE_NAMES_AT, "partial", name))
    DiskCache(folder, ROOM, part_bytes=PART_BYTES).close()
    assert partial_names(folder) == set()


def test_a_partial_file_needs_no_room_beside_itself(folder: str) -> None:
    cache = DiskCache(folder, ROOM + 4096, part_bytes=PART_BYTES)
    shard = opened(cache, identity_of(1))
    asyncio.run(fill_some(shard, identity_of(1)))
    shard.close()
    shard = opened(cache, identity_of(1))
    assert shard.has(5)
    cache.expect(Listed(identity_of(2), identity_of(2)))
    assert cache.open(identity_of(2)) is None  # and now it is in use again
    shard.close()
    cache.close()


def test_an_owner_that_was_stopped_is_not_waited_for_without_end(cache: DiskCache) -> None:
    stopped, other = opened(cache, identity_of(1)), opened(cache, identity_of(1))
    other._wait_s = 0.02

    async def run() -> None:
        assert await stopped.claim(0)
        assert await other.claim(0)

    asyncio.run(run())
    other.write(0, part_of(content(identity_of(1)), 0))
    other.finish(0, checksum(0))
    assert stopped.has(0)
    stopped.close()
    other.close()


def test_the_furthest_next_use_goes_first(folder: str) -> None:
    cache = DiskCache(folder, 3 * ROOM, part_bytes=PART_BYTES)
    one, two, three, four = (identity_of(number) for number in (1, 2, 3, 4))
    cache.expect(Listed(one, two, three, four, two, four, three, one))
    keep(cache, one, two, three, four)
    assert cached_names(folder) == {two.file_name, three.file_name, four.file_name}
    cache.close()


def test_a_shard_that_is_needed_last_passes_the_cache_by(folder: str) -> None:
    cache = DiskCache(folder, 2 * ROOM, part_bytes=PART_BYTES)
    one, two, three = (identity_of(number) for number in (1, 2, 3))
    cache.expect(Listed(one, two, three, one, two, three))
    keep(cache, one, two)
    assert cache.open(three) is None
    assert cached_names(folder) == {one.file_name, two.file_name}
    assert cache.open(identity_of(9, n_parts=17)) is None  # larger than the cache
    cache.close()


def test_without_a_known_future_nothing_displaces_anything(folder: str) -> None:
    cache = DiskCache(folder, 2 * ROOM, part_bytes=PART_BYTES)
    keep(cache, identity_of(1), identity_of(2))
    assert cache.open(identity_of(3)) is None
    cache.expect(Listed(identity_of(3), identity_of(3)))
    keep(cache, identity_of(3))
    assert cached_names(folder) == {identity_of(2).file_name, identity_of(3).file_name}  # the older one went
    cache.close()


def test_files_in_use_are_not_evicted(folder: str) -> None:
    cache = DiskCache(folder, 2 * ROOM, part_bytes=PART_BYTES)
    one, two, three = (identity_of(number) for number in (1, 2, 3))
    keep(cache, one, two)
    other = DiskCache(folder, 2 * ROOM, part_bytes=PART_BYTES)
    shard = opened(other, one)
    copy = os.dup(shard.descriptor)  # as a worker has one
    shard.close()
    cache.expect(Listed(three, three, two, one))
    keep(cache, three)
    assert cached_names(folder) == {one.file_name, three.file_name}
    os.close(copy)
    cache.expect(Listed(two, two, three, one))
    keep(cache, two)
    assert cached_names(folder) == {two.file_name, three.file_name}
    other.close()
    cache.close()


def test_a_file_that_just_got_its_name_counts_as_in_use_while_it_is(folder: str) -> None:
    cache = DiskCache(folder, ROOM, part_bytes=PART_BYTES)
    shard = opened(cache, identity_of(1))
    asyncio.run(fill(shard, identity_of(1)))
    cache.flush()
    assert cached_names(folder) == {identity_of(1).file_name}
    cache.expect(Listed(identity_of(2), identity_of(2)))
    assert cache.open(identity_of(2)) is None
    shard.close()
    cache.expect(Listed(identity_of(2), identity_of(2)))
    keep(cache, identity_of(2))
    cache.close()


def test_partial_files_count_in_full_while_they_are_in_use(folder: str) -> None:
    cache = DiskCache(folder, 2 * ROOM, part_bytes=PART_BYTES)
    shards = [opened(cache, identity_of(number)) for number in (1, 2)]
    cache.expect(Listed(identity_of(3), identity_of(3)))
    assert cache.open(identity_of(3)) is None
    assert opened(cache, identity_of(1)).close() is None  # but one that is being filled can be joined
    for shard in shards:
        shard.close()
    keep(cache, identity_of(3))
    assert cached_bytes(folder) <= 2 * ROOM + ROOM  # those that are not in use have no blocks
    cache.close()


def test_idle_partial_files_are_evicted_with_their_states(folder: str) -> None:
    cache = DiskCache(folder, ROOM, part_bytes=PART_BYTES)
    shard = opened(cache, identity_of(1))
    asyncio.run(shard.claim(0))
    shard.write(0, part_of(content(identity_of(1)), 0))
    shard.finish(0, checksum(0))
    shard.close()
    assert len(partial_names(folder)) == 2
    cache.expect(Listed(identity_of(2), identity_of(2)))
    keep(cache, identity_of(2))
    assert partial_names(folder) == set()
    cache.close()


def test_an_evicted_file_stays_readable_and_never_gets_a_name(cache: DiskCache, folder: str) -> None:
    shard = opened(cache, identity_of(1))
    for name in partial_names(folder):
        os.unlink(os.path.join(folder, FILE_NAMES_AT, "partial", name))
    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    anew = opened(other, identity_of(1))
    assert asyncio.run(anew.claim(0))
    asyncio.run(fill(shard, identity_of(1)))
    cache.flush()
    assert cached_names(folder) == set()
    assert not anew.has(0)
    assert os.pread(shard.descriptor, ONE, 0) == content(identity_of(1))
    anew.close()
    other.close()
    shard.close()


def test_partial_files_of_an_earlier_boot_are_discarded(
    cache: DiskCache, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = opened(cache, identity_of(1))
    asyncio.run(fill_some(shard, identity_of(1)))
    shard.close()
    before = partial_names(folder)
    monkeypatch.setattr(disk_cache, "boot_tag", lambda: "another-boot")
    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    assert partial_names(folder) == set()
    shard = opened(other, identity_of(1))
    assert not partial_names(folder) & before
    assert asyncio.run(fill(shard, identity_of(1))) == list(range(N_PARTS))
    shard.close()
    other.close()


def test_partial_files_that_another_machine_uses_are_left_to_it(
    cache: DiskCache, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = opened(cache, identity_of(1))
    monkeypatch.setattr(disk_cache, "boot_tag", lambda: "another-boot")
    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    assert len(partial_names(folder)) == 2
    assert read_through(other, identity_of(1)) == N_PARTS
    asyncio.run(fill(shard, identity_of(1)))
    shard.close()
    other.close()
    cache.flush()
    assert cached_names(folder) == {identity_of(1).file_name}


async def fill_some(shard: CachedShard, identity: ShardIdentity) -> None:
    for part in (0, 5):
        assert await shard.claim(part)
        shard.write(part * PART_BYTES, part_of(content(identity), part))
        shard.finish(part, zlib.crc32(part_of(content(identity), part)))


@pytest.mark.parametrize("harm", ["no state", "no data", "short state", "other header", "short data"])
def test_partial_files_that_do_not_fit_are_made_anew(cache: DiskCache, folder: str, harm: str) -> None:
    shard = opened(cache, identity_of(1))
    asyncio.run(fill_some(shard, identity_of(1)))
    shard.close()
    data, state = sorted(os.path.join(folder, FILE_NAMES_AT, "partial", name) for name in partial_names(folder))
    if harm.startswith("no"):
        os.unlink(state if harm == "no state" else data)
    elif harm.startswith("short"):
        os.truncate(state if harm == "short state" else data, 20)
    else:
        with open(state, "r+b") as file:
            file.write(b"x")
    assert read_through(cache, identity_of(1)) == N_PARTS
    cache.flush()
    assert partial_names(folder) == set()
    assert cached_names(folder) == {identity_of(1).file_name}


def test_processes_with_parts_of_other_sizes_do_not_mix(cache: DiskCache, folder: str) -> None:
    shard = opened(cache, identity_of(1))
    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES * 2)
    assert other.open(identity_of(1)) is None
    asyncio.run(fill(shard, identity_of(1)))
    shard.close()
    cache.flush()
    anew = opened(other, identity_of(1))
    assert not anew.has(0), "checksums of other parts say nothing"
    with pytest.raises(IndexError):
        anew.has(4)
    other.close()


def flip(path: str, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        found = file.read(1)
        file.seek(place)
        file.write(bytes([found[0] ^ 1]))


def test_a_file_that_was_damaged_is_removed_and_fetched_again(
    cache: DiskCache, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    keep(cache, identity_of(1))
    path = os.path.join(folder, FILE_NAMES_AT, identity_of(1).file_name)
    flip(path, 3 * PART_BYTES + 5)
    shard, late = opened(cache, identity_of(1)), opened(cache, identity_of(1))
    assert not asyncio.run(shard.claim(2))
    with pytest.raises(CacheDamagedError):
        asyncio.run(shard.claim(3))
    assert cached_names(folder) == set()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert path in record.message
    assert read_through(cache, identity_of(1)) == N_PARTS
    cache.flush()
    with pytest.raises(CacheDamagedError):
        asyncio.run(late.claim(3))
    assert cached_names(folder) == {identity_of(1).file_name}, "the sound file that has its name now stays"
    assert read_through(cache, identity_of(1)) == 0


def test_a_part_that_another_process_has_fetched_is_compared_too(cache: DiskCache, folder: str) -> None:
    shard = opened(cache, identity_of(1))
    asyncio.run(fill_some(shard, identity_of(1)))
    (path,) = (name for name in partial_names(folder) if name.endswith(".part"))
    flip(os.path.join(folder, FILE_NAMES_AT, "partial", path), 5)
    other = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    joined = opened(other, identity_of(1))
    assert not asyncio.run(joined.claim(5))
    with pytest.raises(CacheDamagedError):
        asyncio.run(joined.claim(0))
    assert partial_names(folder) == set()
    joined.close()
    assert read_through(other, identity_of(1)) == N_PARTS
    shard.close()
    other.close()


def test_files_of_before_there_were_checksums_are_made_anew(cache: DiskCache, folder: str) -> None:
    (Path(folder) / FILE_NAMES_AT / identity_of(1).file_name).write_bytes(content(identity_of(1)))
    assert read_through(cache, identity_of(1)) == N_PARTS
    cache.flush()
    assert read_through(cache, identity_of(1)) == 0


def test_files_are_for_their_owner_alone(folder: str) -> None:
    os.makedirs(os.path.join(folder, FILE_NAMES_AT), mode=0o777)
    os.chmod(os.path.join(folder, FILE_NAMES_AT), 0o777)
    cache = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    keep(cache, identity_of(1))
    shard = opened(cache, identity_of(2))
    modes = {
        os.path.basename(path): os.stat(path).st_mode & 0o777
        for at, folders, files in os.walk(folder)
        for path in (os.path.join(at, name) for name in (*folders, *files))
    }
    assert modes.pop(FILE_NAMES_AT) == modes.pop("partial") == 0o700
    assert set(modes.values()) == {0o600}
    assert len(modes) == 4
    shard.close()
    cache.close()


def test_a_whole_file_that_has_not_the_right_size_is_not_believed(cache: DiskCache, folder: str) -> None:
    keep(cache, identity_of(1))
    os.truncate(os.path.join(folder, FILE_NAMES_AT, identity_of(1).file_name), 100)
    assert read_through(cache, identity_of(1)) == N_PARTS


def test_without_byte_locks_every_opening_fills_a_file_of_its_own(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "boot_tag", lambda: None)
    monkeypatch.setattr("streamload.fetch.cache.file_locks.LOCKS_BYTES", False)
    cache = DiskCache(folder, 3 * ROOM, part_bytes=PART_BYTES)
    shards = [opened(cache, identity_of(1)), opened(cache, identity_of(1))]
    assert len(partial_names(folder)) == 4
    for shard in shards:
        assert asyncio.run(fill(shard, identity_of(1))) == list(range(N_PARTS))
        shard.close()
    cache.flush()
    assert cached_names(folder) == {identity_of(1).file_name}
    left = opened(cache, identity_of(2))
    cache.expect(Listed(identity_of(3), identity_of(3)))
    keep(cache, identity_of(3))
    assert cached_names(folder) == {identity_of(1).file_name, identity_of(3).file_name}
    left.close()
    cache.close()
    DiskCache(folder, 3 * ROOM, part_bytes=PART_BYTES).close()
    assert partial_names(folder) == set()


def test_a_process_that_keeps_the_folders_lock_costs_the_others_only_the_cache(
    cache: DiskCache, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache, identity_of(1))
    monkeypatch.setattr(disk_cache, "_OPEN_WAIT_S", 0.02)
    with locked_file(os.path.join(folder, FILE_NAMES_AT, "lock"), 1.0):
        assert cache.open(identity_of(2)) is None
        assert opened(cache, identity_of(1)).complete
    assert opened(cache, identity_of(2)) is not None


def test_closing_leaves_no_descriptor_and_no_thread(folder: str) -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    cache = DiskCache(folder, 100 * ROOM, part_bytes=PART_BYTES)
    keep(cache, identity_of(1))
    left_open = [opened(cache, identity_of(number)) for number in (1, 2, 3)]
    asyncio.run(fill(left_open[2], identity_of(3)))
    asyncio.run(left_open[1].claim(0))
    cache.close()
    cache.close()
    assert cached_names(folder) == {identity_of(1).file_name, identity_of(3).file_name}
    for shard in left_open:
        shard.close()
        with pytest.raises(RuntimeError):
            shard.write(0, b"x") if shard.partial else shard._to_fill()
    assert cache.open(identity_of(1)) is None
    if before:
        assert set(os.listdir("/proc/self/fd")) == before


def test_this_machine_tells_its_boots_apart() -> None:
    tag = partial_shard.boot_tag()
    assert tag is None or (len(tag) == 36 and tag == partial_shard.boot_tag())
