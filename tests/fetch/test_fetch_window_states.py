"""The window against a plain model, whatever is done in whatever order: nothing drifts, nothing is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamload.fetch.parts import part_key, shard_and_number
from streamload.fetch.window import PartWindow

BUDGET = 40
SIZE = 10
SCANS = 1_000_000
NEVER = 2_000_000
PARTS = [part_key(shard, number) for shard in range(3) for number in range(4)]
some_parts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3, unique=True)


class Epochs(RuleBasedStateMachine):
    """Batches are planned, scheduled, made and given up; shards are scanned; parts come, fail and are dropped."""

    @initialize()
    def begin(self) -> None:
        self.window = PartWindow(BUDGET)
        self.turn = 0
        self.planned: list[tuple[int, list[int]]] = []
        self.scheduled: list[list[int]] = []
        self.unpassed: Counter[int] = Counter()
        self.requested: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.coming: set[int] = set()
        self.there: dict[int, int] = {}
        self.failed: set[int] = set()

    # -- an epoch

    @rule(keys=some_parts)
    def plan(self, keys: list[int]) -> None:
        self.planned.append((self.turn + 1, keys))
        self.turn += len(keys)
        self.window.plan(keys)

    @precondition(lambda self: self.planned and self.window.are_present(self.planned[0][1]))
    @rule(stays=st.booleans())
    def schedule(self, stays: bool) -> None:
        _, keys = self.planned.pop(0)
        self.window.start(keys)
        self.scheduled.append(keys)
        for key in keys if stays else ():
            self.window.hold([key])
            self.unpassed[key] += 1

    @precondition(lambda self: self.scheduled)
    @rule()
    def make(self) -> None:
        self.window.release(self.scheduled.pop(0))

    @precondition(lambda self: self.planned)
    @rule()
    def give_up_the_last(self) -> None:
        self.window.cancel(self.planned.pop()[1])

    @precondition(lambda self: self.unpassed)
    @rule(data=st.data())
    def pass_by(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.unpassed)))
        self.window.release([key])
        self.unpassed -= Counter([key])

    # -- scans

    @rule(key=st.sampled_from(PARTS), scan=st.integers(0, 3))
    def request(self, key: int, scan: int) -> None:
        self.window.request(key, scan)
        self.requested[key] = scan

    @rule(key=st.sampled_from(PARTS))
    def withdraw(self, key: int) -> None:
        self.window.withdraw(key)
        self.requested.pop(key, None)

    @rule(key=st.sampled_from(PARTS), scan=st.integers(0, 3))
    def keep(self, key: int, scan: int) -> None:
        if key in self.there:
            self.window.keep(key, scan)
            self.kept[key] = scan

    @rule(key=st.sampled_from(PARTS))
    def unkeep(self, key: int) -> None:
        self.window.unkeep(key)
        self.kept.pop(key, None)

    # -- the fetcher

    @rule(other=st.integers(0, 15))
    def pump(self, other: int) -> None:
        for key in self.window.take_free():
            assert self.turn_of(key) == NEVER
            assert not self.there[key]
            self.drop(key)
        key = self.window.next_missing()
        missing = {key: turn for key in PARTS if (turn := self.turn_to_fetch(key)) < NEVER and self.is_missing(key)}
        assert key == min(missing, key=lambda key: (missing[key], key), default=None)
        assert self.window.waiting == len(missing)
        if key is None:
            return
        later = {each: turn for each in self.there if (turn := self.turn_of(each)) > missing[key]}
        order = list(self.window.evictable())
        assert set(order) == later.keys()
        assert [later[each] for each in order] == sorted(later.values(), reverse=True)
        evicted = self.window.room_for(SIZE, other)
        if evicted is None:
            assert self.used_bytes() - sum(self.there[each] for each in later) + SIZE + other > BUDGET
            return
        assert evicted == order[: len(evicted)]
        for each in evicted:
            self.drop(each)
        self.window.admit(key, SIZE)
        self.coming.add(key)
        assert self.used_bytes() + other <= BUDGET

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), size=st.sampled_from([0, 7, SIZE]))
    def arrive(self, data: st.DataObject, size: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        self.coming.discard(key)
        self.there[key] = size
        self.window.arrive(key, size)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        self.forget(key)
        self.window.fail(key)
        self.failed.add(key)

    @rule(keys=some_parts)
    def try_again(self, keys: list[int]) -> None:
        self.window.try_again(keys)
        self.failed.difference_update(keys)

    @rule(shard=st.integers(0, 2))
    def lose_a_shard(self, shard: int) -> None:
        """Also what is held: it is fetched again, before all else."""
        for key in sorted(self.window.parts_of(shard)):
            self.window.drop(key)
            self.forget(key)

    # -- what always holds

    @invariant()
    def the_bytes_are_those_of_the_parts(self) -> None:
        assert self.window.used_bytes == self.used_bytes()
        assert self.window.in_flight() == self.coming
        for shard in range(3):
            known = {key for key in [*self.there, *self.coming] if shard_and_number(key)[0] == shard}
            assert self.window.parts_of(shard) == known

    # -- the model

    def used_bytes(self) -> int:
        return sum(self.there.values()) + SIZE * len(self.coming)

    def is_missing(self, key: int) -> bool:
        return key not in self.there and key not in self.coming and key not in self.failed

    def turn_to_fetch(self, key: int) -> int:
        if self.unpassed[key] or any(key in keys for keys in self.scheduled):
            return 0
        planned = [turn + keys.index(key) for turn, keys in self.planned if key in keys]
        return planned[0] if planned else SCANS + self.requested[key] if key in self.requested else NEVER

    def turn_of(self, key: int) -> int:
        return min(self.turn_to_fetch(key), SCANS + self.kept[key] if key in self.kept else NEVER)

    def forget(self, key: int) -> None:
        self.coming.discard(key)
        self.there.pop(key, None)
        self.kept.pop(key, None)

    def drop(self, key: int) -> None:
        self.forget(key)
        self.window.drop(key)


Epochs.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWindow = Epochs.TestCase
