"""What several feeders make is what one makes, bit for bit; Ray itself is not in these tests."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from feeders_here import use_feeders_here
from functions_of_users import fails_at_the_end, int_or_float, large_int_or_float, noisy, stacked, uneven
from same_batches import assert_same

from streamload import Mixture, RayFeeders, StreamLoader
from streamload.errors import SampleError, ShardFormatError, ShardNotFoundError, WorkerError
from streamload.feeder.messages import EpochStart
from streamload.remote import actor
from streamload.remote.relay import Relay

ARGUMENTS: dict[str, Any] = {
    "batch_size": 16,
    "shuffle": True,
    "fields": ("npy", "cls", "txt", "bin"),
    "shuffle_window": 40,
    "num_workers": 1,
}


@pytest.fixture(autouse=True)
def feeders_here(monkeypatch: pytest.MonkeyPatch) -> None:
    use_feeders_here(monkeypatch)


CASES: dict[str, dict[str, Any]] = {
    "shuffled": {"lanes": 4, "transform": noisy},
    "one lane, short tail, two ranks": {"pad": False, "rank": 1, "world_size": 2, "batch_size": 7},
    "padded on three ranks": {"rank": 2, "world_size": 3, "batch_size": 5},
    "drop_last": {"drop_last": True},
    "weights": {"weights": "balanced", "epoch_size": 150},
    "where": {"where": "label > 2"},
    "collate_fn": {"collate_fn": stacked},
    "bytes": {"decode": False, "batch_size": 9},
    "out of order": {"in_order": False},
    "not alike": {"transform": {"cls": int_or_float}, "fields": ("cls", "txt"), "batch_size": 5},
    "sampler": {"sampler": [5, 3, 3, 300, 17, 42, 9], "shuffle": False, "batch_size": 3},
}


EXHAUSTIVE = pytest.mark.exhaustive
SOON = ("one lane, short tail, two ranks", "collate_fn")
"""What takes two seconds each is tried always; everything goes through Ray too, in `test_ray_feeders.py`."""


HERE: dict[str, Any] = {**ARGUMENTS, "num_workers": 0}
"""For what is expected: processes take longer to start than this takes."""


def passes(shards: Any, n: int, feeders: RayFeeders | None, **arguments: Any) -> list[list[Any]]:
    with StreamLoader(shards, **{**(ARGUMENTS if feeders else HERE), **arguments}, feeders=feeders) as loader:
        found = [list(loader) for _ in range(n)]
        assert [len(each) for each in found] == [len(loader)] * n
        return found


@pytest.mark.parametrize("case", [case if case in SOON else pytest.param(case, marks=EXHAUSTIVE) for case in CASES])
def test_the_batches_are_those_of_the_local_loader(shards: Path, case: str) -> None:
    arguments = CASES[case]
    given = str(shards)
    expected = passes(given, 2, None, **arguments)
    found = passes(given, 2, RayFeeders(3 if len(case) % 2 else 2), **arguments)
    if case == "out of order":
        found, expected = ([sorted(each, key=str) for each in many] for many in (found, expected))
    assert_same(found, expected)


@pytest.mark.parametrize(("lanes", "warnings"), [(4, 0), (3, 1)])
def test_feeders_that_read_the_same_shards_are_warned_of_once(
    shards: Path, caplog: pytest.LogCaptureFixture, lanes: int, warnings: int
) -> None:
    passes(str(shards), 2, RayFeeders(2), lanes=lanes, rank=0, world_size=2)
    message = "since lanes=3 is no multiple of 2 ranks times 2 feeders; where a run begins with lanes=4, each byte"
    assert sum(message in record.getMessage() for record in caplog.records) == warnings
    assert sum("lanes" in record.getMessage() for record in caplog.records) == warnings


def test_a_mixture_is_the_same(shards: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(shards)
    mixture = Mixture({"a": (str(shards), 3), "b": (str(other), 1)})
    assert_same(passes(mixture, 1, RayFeeders(3)), passes(mixture, 1, None))


@pytest.mark.parametrize("collate_fn", [None, pytest.param(stacked, marks=EXHAUSTIVE)])
def test_a_state_goes_from_one_number_of_feeders_to_another(shards: Path, collate_fn: Any) -> None:
    with StreamLoader(str(shards), **HERE, collate_fn=collate_fn) as loader:
        expected = list(loader)
    state, found = None, []
    for feeders in (RayFeeders(2), None, RayFeeders(3)):
        with StreamLoader(str(shards), **ARGUMENTS, collate_fn=collate_fn, feeders=feeders) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for batch in loader:
                found.append(batch)
                state = loader.state_dict()
                if len(found) % 7 == 0:
                    break
    assert_same(found, expected)


def test_feeders_change_between_passes(shards: Path) -> None:
    with StreamLoader(str(shards), **HERE) as loader:
        expected = [list(loader) for _ in range(3)]
    with StreamLoader(str(shards), **ARGUMENTS, feeders=RayFeeders(3)) as loader:
        found = [list(loader)]
        loader.feeders = None
        found.append(list(loader))
        loader.feeders = RayFeeders(2)
        found.append(list(loader))
    assert_same(found, expected)


@pytest.mark.parametrize("on_error", ["skip", pytest.param("replace", marks=EXHAUSTIVE)])
def test_failed_samples_are_left_out_of_the_same_batches(shards: Path, on_error: str) -> None:
    found = []
    for feeders in (None, RayFeeders(2)):
        common = ARGUMENTS if feeders else HERE
        arguments = {**common, "fields": ("bad.npy", "txt"), "shuffle": False, "batch_size": 2}
        with StreamLoader(str(shards), **arguments, on_error=on_error, feeders=feeders) as loader:
            batches = list(loader)
            found.append((batches, [str(error) for error in loader.skipped]))
    assert_same(found[1], found[0])
    assert len(found[0][1]) == 3


def test_the_same_error_comes_at_the_same_turn(shards: Path) -> None:
    found = []
    for feeders in (None, RayFeeders(2)):
        with StreamLoader(str(shards), **{**ARGUMENTS, "fields": ("bad.npy",), "lanes": 2}, feeders=feeders) as loader:
            batches = 0
            with pytest.raises(SampleError) as caught:
                for _ in loader:
                    batches += 1
            found.append((batches, traceback.format_exception(caught.value), loader.state_dict()))
    assert found[1] == found[0]


@EXHAUSTIVE
def test_samples_that_are_not_alike_fail_as_a_batch_of_one_feeder(shards: Path) -> None:
    found = []
    for feeders in (None, RayFeeders(2)):
        arguments = {**ARGUMENTS, "fields": ("npy", "cls"), "transform": uneven}
        with StreamLoader(str(shards), **arguments, feeders=feeders) as loader:
            with pytest.raises(SampleError) as caught:
                list(loader)
            found.append(str(caught.value))
    assert found[1] == found[0]


def test_what_is_empty_at_the_end_is_filled_up(shards: Path) -> None:
    """The last batches have no sample left, so that the first one of the order comes again in their place."""
    found = []
    for feeders in (None, RayFeeders(2)):
        common = ARGUMENTS if feeders else HERE
        arguments = {**common, "shuffle": False, "transform": fails_at_the_end, "fields": ("cls", "__key__")}
        with StreamLoader(str(shards), **arguments, on_error="skip", samples=slice(0, 100), feeders=feeders) as loader:
            found.append(list(loader))
    assert_same(found[1], found[0])
    assert len(found[0]) == 7


def test_counts_and_a_pass_that_is_left(shards: Path, tmp_path: Path) -> None:
    """Without an index, a pass is left, and the next one is the next epoch."""
    plain = tmp_path / "plain"
    plain.mkdir()
    for shard in sorted(shards.glob("*.tar")):
        (plain / shard.name).symlink_to(shard)
    with StreamLoader(str(plain), **HERE) as loader:
        n_batches = len(loader)
        list(loader)
        expected = list(loader)
    with StreamLoader(str(plain), **ARGUMENTS, feeders=RayFeeders(2)) as loader:
        assert len(loader) == n_batches
        next(iter(loader))
        assert_same(list(loader), expected)
        assert loader.statistics().samples > 0


def test_counting_a_damaged_shard_fails(shards: Path, tmp_path: Path) -> None:
    """The failure of the feeder and that of the call go together, and one must not stay behind the other."""
    for shard in sorted(shards.glob("*.tar")):
        (tmp_path / shard.name).write_bytes(shard.read_bytes()[:9000])
    for _ in range(4):  # it depends on which of them comes first
        with StreamLoader(str(tmp_path), batch_size=4, num_workers=1, feeders=RayFeeders(2), timeout=20) as loader:
            with pytest.raises(ShardFormatError, match="cut"):
                len(loader)


@EXHAUSTIVE
def test_large_rows_that_are_not_alike_change_hands_while_they_are_sent(shards: Path) -> None:
    """Another feeder is hosted meanwhile, which has announced none of what is being sent."""
    how: dict[str, Any] = {
        "fields": ("cls",), "transform": {"cls": large_int_or_float}, "batch_size": 4, "shuffle": False,
    }  # fmt: skip
    seen = passes(str(shards), 1, RayFeeders(2), **how, prefetch_batches=16)
    assert_same(seen, passes(str(shards), 1, None, **how))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_feeder_that_cannot_be_hosted_answers_calls(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Also those that come when it has found out already."""
    handle = Relay.handle

    def late(relay: Relay, message: object) -> None:
        if isinstance(message, EpochStart):
            asyncio.get_running_loop().call_later(0.5, handle, relay, message)
        else:
            handle(relay, message)

    if is_late:
        monkeypatch.setattr(Relay, "handle", late)

    def refuse(*_: object) -> None:
        raise ShardNotFoundError("the node does not see this shard", url="x")

    monkeypatch.setattr(actor, "check_paths", refuse)
    for shard in shards.glob("*.tar"):  # without an index
        (tmp_path / shard.name).symlink_to(shard)
    with StreamLoader(str(tmp_path), batch_size=4, num_workers=1, feeders=RayFeeders(2), timeout=20) as loader:
        with pytest.raises(ShardNotFoundError, match="does not see"):
            next(iter(loader))
        with pytest.raises(ShardNotFoundError, match="does not see"):
            len(loader)


# -- few descriptors -----------------------------------------------------------------------------------------------


@contextmanager
def most_descriptors(number: int) -> Iterator[None]:
    """Let this process, in which relays and actors run, have so many more open than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + number
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_batches_ahead_take_their_share_of_descriptors_only(shards: Path) -> None:
    arguments = {**ARGUMENTS, "batch_size": 2, "prefetch_batches": 200, "lanes": 2}
    (expected,) = passes(str(shards), 1, None, **arguments)
    with most_descriptors(150), StreamLoader(str(shards), **arguments, feeders=RayFeeders(2)) as loader:
        batches = iter(loader)
        first = next(batches)
        time.sleep(1)  # all that may come ahead has come
        assert_same([first, *batches], expected)
    assert loader.statistics().restarted_workers == 0


def test_too_many_open_files_are_no_death_of_a_feeder(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = itertools.count()

    def take(relay: Relay, size_bytes: int) -> Any:
        if next(slots) == 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return take_slot(relay, size_bytes)

    take_slot = Relay.take_slot
    monkeypatch.setattr(Relay, "take_slot", take)
    with StreamLoader(str(shards), **ARGUMENTS, feeders=RayFeeders(2)) as loader:
        with pytest.raises(WorkerError, match="too many open files: this process may have only") as caught:
            list(loader)
        assert loader.statistics().restarted_workers == 0
    assert "died" not in str(caught.value)
