"""The account of parts against a plain model, whatever is done in whatever order: nothing drifts, nothing is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamload.fetch.ledger import PartLedger
from streamload.fetch.parts import part_key, shard_and_number

BUDGET = 40
SIZE = 10
PARTS = [part_key(shard, number) for shard in range(3) for number in range(4)]
some_parts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=3, unique=True)


class Epochs(RuleBasedStateMachine):
    """Batches are planned, scheduled, made and given up; parts come, fail, are dropped; shards leave the cache."""

    @initialize()
    def begin(self) -> None:
        self.ledger = PartLedger(BUDGET)
        self.planned: list[list[int]] = []
        self.dealt: list[list[int]] = []
        self.held: list[list[int]] = []
        self.unpassed: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.coming: set[int] = set()
        self.there: dict[int, int] = {}
        self.failed: set[int] = set()

    # -- an epoch

    @rule(keys=some_parts)
    def plan(self, keys: list[int]) -> None:
        self.planned.append(keys)
        self.ledger.reserve(keys)
        self.ledger.want(keys)
        self.failed.difference_update(keys)

    @precondition(lambda self: self.planned and self.ledger.are_present(self.planned[0]))
    @rule(stays=st.booleans())
    def deal(self, stays: bool) -> None:
        keys = self.planned.pop(0)
        self.ledger.use(keys)
        self.dealt.append(keys)
        for key in keys if stays else ():
            self.ledger.hold([key])
            self.unpassed[key] += 1

    @precondition(lambda self: self.dealt)
    @rule()
    def make(self) -> None:
        self.ledger.release(self.dealt.pop(0))

    @precondition(lambda self: self.planned)
    @rule()
    def give_up_the_last(self) -> None:
        self.ledger.cancel(self.planned.pop())

    @precondition(lambda self: self.unpassed)
    @rule(data=st.data())
    def pass_by(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.unpassed)))
        self.ledger.release([key])
        self.unpassed -= Counter([key])

    # -- scans

    @rule(keys=some_parts)
    def hold(self, keys: list[int]) -> None:
        self.held.append(keys)
        self.ledger.hold(keys)
        self.ledger.want(keys)
        self.failed.difference_update(keys)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.ledger.release(self.held.pop())

    @rule(shard=st.integers(0, 2))
    def expect(self, shard: int) -> None:
        self.ledger.expect_rows(shard)

    @rule(key=st.sampled_from(PARTS))
    def keep(self, key: int) -> None:
        if key in self.there:
            self.ledger.keep(key)
            self.kept.add(key)

    @rule(key=st.sampled_from(PARTS))
    def unkeep(self, key: int) -> None:
        self.ledger.unkeep(key)
        self.kept.discard(key)

    # -- the fetcher

    @rule(other=st.integers(0, 15))
    def pump(self, other: int) -> None:
        for key in self.ledger.take_free():
            self.drop(key)
            assert key not in self.kept
        key = self.ledger.next_wanted()
        if key is None:
            return
        assert key not in self.coming
        assert key not in self.there
        dropped = self.ledger.room_for(SIZE, other)
        if dropped is None:
            return
        for each in dropped:
            self.drop(each)
        self.ledger.admitted(key, SIZE)
        self.coming.add(key)
        assert self.ledger.used_bytes + other <= BUDGET

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), size=st.sampled_from([0, 7, SIZE]))
    def arrive(self, data: st.DataObject, size: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        self.coming.discard(key)
        self.there[key] = size
        self.ledger.arrived(key, size)

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        self.forget(key)
        self.ledger.give_up(key)
        self.failed.add(key)

    @rule(shard=st.integers(0, 2))
    def leave_the_cache(self, shard: int) -> None:
        keys = sorted(self.ledger.parts_of(shard))
        for key in keys:
            self.ledger.give_up(key)
            self.forget(key)
        self.ledger.want_again(key for key in keys if self.ledger.is_needed(key))

    # -- what always holds

    @invariant()
    def the_bytes_are_those_of_the_parts(self) -> None:
        counted = sum(self.there.values())
        assert self.ledger.used_bytes == counted + SIZE * len(self.coming)
        assert self.ledger.in_flight() == self.coming
        needed = self.in_use()
        unneeded = sum(size for key, size in self.there.items() if key not in needed)
        kept_bytes = self.ledger.kept_from_next_bytes()
        assert self.ledger.used_bytes - unneeded <= kept_bytes <= self.ledger.used_bytes
        if not self.ledger.waiting:
            assert kept_bytes == self.ledger.used_bytes - unneeded

    @invariant()
    def whatever_is_needed_is_there_or_will_come(self) -> None:
        planned = {key for keys in self.planned for key in keys}
        for key in planned | self.held_keys() | set(self.unpassed):
            assert key in self.failed or self.ledger.is_expected(key)

    @invariant()
    def parts_belong_to_their_shards(self) -> None:
        for shard in range(3):
            known = {key for key in [*self.there, *self.coming] if shard_and_number(key)[0] == shard}
            assert self.ledger.parts_of(shard) == known

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        while self.planned:
            self.give_up_the_last()
        for keys in self.dealt + self.held:
            self.ledger.release(keys)
        for key in self.unpassed.elements():
            self.ledger.release([key])
        for key in set(self.kept):
            self.unkeep(key)
        self.dealt, self.held, self.unpassed = [], [], Counter()
        for key in sorted(self.coming):
            self.ledger.arrived(key, SIZE)
            self.there[key] = SIZE
        self.coming.clear()
        assert self.ledger.next_wanted() is None
        assert self.ledger.waiting == 0
        assert self.ledger.kept_from_next_bytes() == 0
        for key in [*self.ledger.take_free(), *(self.ledger.room_for(BUDGET, 0) or ())]:
            self.drop(key)
        assert self.ledger.used_bytes == 0

    # -- inside

    def in_use(self) -> set[int]:
        return self.held_keys() | set(self.unpassed)

    def held_keys(self) -> set[int]:
        return {key for keys in self.dealt + self.held for key in keys}

    def forget(self, key: int) -> None:
        self.coming.discard(key)
        self.there.pop(key, None)
        self.kept.discard(key)

    def drop(self, key: int) -> None:
        assert key not in self.in_use()
        self.forget(key)
        self.ledger.dropped(key)


Epochs.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = Epochs.TestCase
