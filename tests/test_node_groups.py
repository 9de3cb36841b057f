"""Ranks of a machine that get the same batches: each is made once, lies in one slot, and is exact for every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import node_ranks
import pytest
from make_shards import write_numbers
from node_ranks import FEEDER, WORKER, Node, RankError, node_of
from preloaded import Preloaded

SAMPLES = 220
OPTIONS: dict[str, Any] = {**node_ranks.OPTIONS, "batch_size": 5}
SHARED: dict[str, Any] = {**OPTIONS, "feeders": "node", "shared_by": 2}


@pytest.fixture(scope="module")
def four(preloaded: Preloaded) -> Iterator[Node]:
    """Two groups of two ranks."""
    with node_of(preloaded, 4) as node:
        yield node


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("numbers") / "shards", [120, 1, 7, 0, 90, 2])


@pytest.fixture(scope="module")
def wanted(four: Node, shards: str) -> list[list[Any]]:
    """What the first rank of each group gets with a feeder of its own, in three epochs."""
    alone = [{"rank": rank // 2, "world_size": 2} for rank in range(4)]
    with four.loaders(shards, **OPTIONS, each=alone):
        return [four.ask("batches", None)[::2] for _ in range(3)]


def of_each(epoch: list[Any]) -> list[Any]:
    """Of each rank, from those of each group."""
    return [epoch[0], epoch[0], epoch[1], epoch[1]]


def made(path: Path) -> int:
    """How many samples the workers have made."""
    return len(path.read_bytes().splitlines())


def test_a_batch_is_made_once_and_its_slot_is_mapped_by_the_ranks_of_its_group(
    four: Node, shards: str, wanted: list[Any], tmp_path: Path
) -> None:
    noted = tmp_path / "made"
    with four.loaders(shards, **SHARED, noted=str(noted)):
        for epoch in wanted[:2]:
            found: list[list[Any]] = [[], [], [], []]
            while any(given := four.ask("batches", 4)):  # in step, as ranks that compute together are
                found = [before + more for before, more in zip(found, given, strict=True)]
                if len(given[0]) < 4:
                    break
            assert found == of_each(epoch)
        slots = [set(each) for each in four.ask("slots")]
        totals = four.ask("totals")
    assert 2 * SAMPLES <= made(noted) <= 3 * SAMPLES, "the third epoch may be made ahead; twice two would be 880"
    assert slots[0] == slots[1] != slots[2] == slots[3]
    assert not slots[0] & slots[2]
    assert sum(each["made_samples"] for each in totals) <= made(noted) + 1e-6
    assert [each["samples"] for each in totals] == [SAMPLES] * 4


def test_what_a_rank_writes_to_a_batch_the_others_do_not_see(four: Node, shards: str, wanted: list[Any]) -> None:
    """And it does not see that itself in the slot's next batch."""
    with four.loaders(shards, **SHARED, prefetch_batches=2):
        one, other = four.ranks[:2]
        for epoch in wanted[:2]:
            for first in range(0, 22, 2):
                for rank in (one, other):
                    assert rank.ask("changed", 2) == epoch[0][first : first + 2]
            assert four.ask("batches", None)[:2] == [[], []]


def test_a_late_rank_gets_what_was_made_already(four: Node, shards: str, wanted: list[Any], tmp_path: Path) -> None:
    noted = tmp_path / "made"
    with four.loaders(shards, **SHARED, noted=str(noted)):
        early, late = four.ranks[:2]
        assert early.ask("batches", None) == wanted[0][0]
        assert late.ask("batches", None) == wanted[0][0]
        assert early.ask("slots") == late.ask("slots")
    assert made(noted) <= SAMPLES, "and as much of the second epoch"


def test_a_rank_that_comes_too_late_has_them_made_again(
    four: Node, shards: str, wanted: list[Any], tmp_path: Path
) -> None:
    noted = tmp_path / "made"
    small = {"batch_size": 1, "noted": str(noted)}
    with four.loaders(shards, **{**OPTIONS, **small}, each=[{"rank": 0, "world_size": 2}] * 4):
        alone = [four.ranks[0].ask("batches", None) for _ in range(3)]
    noted.unlink()
    with four.loaders(shards, **{**SHARED, **small}):
        early, late = four.ranks[:2]
        assert early.ask("batches", None) == alone[0]
        before = made(noted)
        assert late.ask("batches", None) == alone[0]
        assert made(noted) >= before + SAMPLES // 2
        for rank in (late, early):  # with the next epoch they are together again
            rank.tell("batches", None)
        assert [rank.heard() for rank in (early, late)] == [alone[1]] * 2


def test_a_rank_that_begins_a_pass_twice_is_with_its_group_again(
    four: Node, shards: str, wanted: list[Any], tmp_path: Path
) -> None:
    noted = tmp_path / "made"
    with four.loaders(shards, **SHARED, noted=str(noted)):
        one = four.ranks[0]
        state = one.ask("state")
        assert one.ask("batches", 1) == wanted[0][0][:1]  # to look at it
        one.ask("load", state)
        for epoch in wanted:
            assert four.ask("batches", None) == of_each(epoch)
    assert made(noted) <= 5 * SAMPLES, "four epochs, and two of one group that the look has made ahead"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pass over these has been made before the first of its batches is taken."""
    return write_numbers(tmp_path_factory.mktemp("few") / "shards", [30])


@pytest.mark.parametrize("first", [1, None])
def test_a_rank_that_reads_a_whole_pass_twice_gets_it_in_other_memory(four: Node, few: str, first: int | None) -> None:
    """As where a small validation set is read again and again, by one rank of a group oftener than by the others."""
    with four.loaders(few, **OPTIONS, each=[{"rank": rank // 2, "world_size": 2} for rank in range(4)]):
        alone = [four.ask("batches", None) for _ in range(2)]
    with four.loaders(few, **SHARED):
        one = four.ranks[0]
        state = one.ask("state")
        kept = one.ask("keep", first)
        assert kept == alone[0][0][:first]
        time.sleep(0.3)  # else not all of it has been made
        one.ask("load", state)
        assert [four.ask("batches", None) for _ in range(2)] == alone
        assert one.ask("kept") == [digest for _, digest in kept]


def test_a_failure_is_one_of_the_pass_that_each_rank_reads(four: Node, tmp_path: Path) -> None:
    """Also for a rank that has begun more passes than the others."""
    url = write_numbers(tmp_path / "shards", [30, 30, 30])
    with four.loaders(url, **SHARED):
        for shard in Path(url).glob("*.tar"):
            shard.unlink()
        for rank in (four.ranks[0], *four.ranks):
            with pytest.raises(RankError, match="ShardNotFoundError"):
                rank.ask("batches", None)


@pytest.mark.exhaustive
def test_a_rank_that_waits_for_its_group_is_told_so(four: Node, shards: str) -> None:
    slowed = {"collate_fn": "as_list", "pause_s": 0.01, "noted": "/dev/null"}  # else all are made ahead
    with four.loaders(shards, **SHARED, prefetch_batches=2, timeout=6, **slowed):
        fast, slow = four.ranks[:2]
        slow.ask("batches", 1)
        with pytest.raises(RankError, match="ahead of its group .*: 1 rank of it must take an earlier one first"):
            fast.ask("batches", None)


def test_the_slowest_rank_bounds_how_far_the_others_are(four: Node, shards: str, wanted: list[Any]) -> None:
    with four.loaders(shards, **SHARED, prefetch_batches=2, collate_fn="as_list", pause_s=0.01, noted="/dev/null"):
        fast, slow = four.ranks[:2]
        begun = slow.ask("batches", 1)
        fast.tell("batches", None)
        time.sleep(0.3)
        slow_rest = slow.ask("batches", None)
        found = fast.heard()
    assert begun + slow_rest == found
    assert len(found) == len(wanted[0][0])


def test_a_rank_that_leaves_its_pass_does_not_disturb_the_others(four: Node, shards: str, wanted: list[Any]) -> None:
    with four.loaders(shards, **SHARED):
        one, other = four.ranks[:2]
        for rank in (one, other):
            assert rank.ask("batches", 3) == wanted[0][0][:3]
        one.ask("leave")
        assert other.ask("batches", None) == wanted[0][0][3:]
        assert other.ask("batches", None) == wanted[1][0]
        assert one.ask("batches", 2) == wanted[1][0][:2]
        other.tell("batches", 2)  # it may have to wait for the slower one
        assert one.ask("batches", None) == wanted[1][0][2:]
        assert other.heard() == wanted[2][0][:2]
        assert one.ask("batches", None) == wanted[2][0]
        assert other.ask("batches", None) == wanted[2][0][2:]


def test_a_rank_that_leaves_when_all_has_been_made_does_not_hold_up_the_others(
    four: Node, shards: str, wanted: list[Any]
) -> None:
    with four.loaders(shards, **SHARED):
        one, other = four.ranks[:2]
        for rank in (one, other):
            assert rank.ask("batches", 20) == wanted[0][0][:20]
        one.ask("leave")
        assert other.ask("batches", None) == wanted[0][0][20:]
        for _ in range(12):
            assert len(other.ask("batches", None)) == len(wanted[0][0])


def test_a_rank_that_is_between_two_passes_does_not_hold_up_the_others(
    four: Node, shards: str, wanted: list[Any]
) -> None:
    with four.loaders(shards, **SHARED, prefetch_batches=20, transform="slow"):
        assert four.ask("batches", None) == of_each(wanted[0])
        one, other = four.ranks[:2]
        for _ in range(3):
            assert len(other.ask("batches", None)) == len(wanted[0][0])
        assert one.ask("batches", None) == wanted[1][0]


def test_a_rank_may_be_in_the_next_pass_already_and_slots_of_streams_that_were_left_are_unmapped(
    four: Node, shards: str, wanted: list[Any]
) -> None:
    with four.loaders(shards, **SHARED, prefetch_batches=2, transform="slow"):
        one, other = four.ranks[:2]
        assert [rank.ask("batches", 3) for rank in (one, other)] == [wanted[0][0][:3]] * 2
        mapped = []
        for epoch in range(1, 13):
            one.ask("leave")
            ahead = one.ask("batches", 3)
            if epoch == 1:
                assert other.ask("batches", None) == wanted[0][0][3:]
            other.ask("leave")
            assert other.ask("batches", 3) == ahead
            mapped.append(len(one.ask("slots")))
        assert min(mapped[-4:]) <= max(mapped[:4]), mapped  # how many are in flight differs from pass to pass


def test_ranks_go_on_from_a_state_and_with_another_transform(four: Node, shards: str, wanted: list[Any]) -> None:
    with four.loaders(shards, **SHARED):
        assert four.ask("batches", 4) == [batches[:4] for batches in of_each(wanted[0])]
        state = four.ranks[3].ask("state")
        assert four.ask("batches", None) == [batches[4:] for batches in of_each(wanted[0])]
        four.ask("load", state)
        assert four.ask("batches", None) == [batches[4:] for batches in of_each(wanted[0])]
        assert four.ask("batches", None) == of_each(wanted[1])
        four.ask("change", "negative")
        changed = four.ask("batches", None)
        assert changed[0] == changed[1] != wanted[2][0]


@pytest.mark.parametrize("module", [FEEDER, pytest.param(WORKER, marks=pytest.mark.exhaustive)])
def test_helpers_may_be_killed(four: Node, shards: str, wanted: list[Any], module: str) -> None:
    with four.loaders(shards, **SHARED, transform="slow"):
        assert four.ask("batches", 2) == [batches[:2] for batches in of_each(wanted[0])]
        four.kill_helper(module)
        assert four.ask("batches", None) == [batches[2:] for batches in of_each(wanted[0])]
        for rank in four.ranks:
            rank.tell("batches", None)
        four.kill_helper(module)
        assert [rank.heard() for rank in four.ranks] == of_each(wanted[1])
        assert four.ask("batches", None) == of_each(wanted[2])


def test_a_sample_that_fails_is_raised_by_each_rank_of_its_group(four: Node, shards: str) -> None:
    with four.loaders(shards, **SHARED, transform="raise_on_bad"):
        for rank in four.ranks[:2]:
            with pytest.raises(RankError, match=r"TransformError.*part"):
                rank.ask("batches", None)


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_does_not_disturb_the_others(preloaded: Preloaded, shards: str, killed: int) -> None:
    """The starter of the feeder, or another one. It dies with batches that it has not taken."""
    with node_of(preloaded, 2) as node:
        with node.loaders(shards, **SHARED):
            whole = [node.ask("batches", None)[0] for _ in range(3)]
        with node.loaders(shards, **SHARED):
            assert node.ask("batches", 2) == [whole[0][:2]] * 2
            node.ranks[killed].kill()
            left = node.ranks[1 - killed]
            assert left.ask("batches", None) == whole[0][2:]
            assert [left.ask("batches", None) for _ in range(2)] == whole[1:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "skip", "transform": "raise_on_bad", "drop_last": True, "lanes": 2},
        {"weights": [1.0, 2.0] * 110},
        {"collate_fn": "as_staircase", "fields": ["cls"]},
        {"num_workers": 2, "batch_size": 33, "pad": False},
    ],
)
def test_the_batches_are_those_of_feeders_of_their_own(four: Node, shards: str, options: dict[str, Any]) -> None:
    with four.loaders(shards, **{**OPTIONS, **options, "shared_by": 2}):
        alone = [four.ask("batches", None) for _ in range(2)]
    with four.loaders(shards, **{**SHARED, **options}):
        found = [four.ask("batches", None) for _ in range(2)]
    assert found == alone
