import random

import numpy as np
import order_oracle as oracle
import pytest

from streamload.order.randomness import CounterDraws, SampleRandomness, philox_key


def test_generator_is_the_papers():
    # The known answer for an all-zero counter and key, as published with the Random123 library.
    known = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert oracle.philox([0, 0, 0, 0], (0, 0)) == known
    draws = CounterDraws(np.array([5, 7], np.uint64))
    for low, second, third in ((0, 0, 0), (3, 1, 2), (2**63, 2**64 - 1, 2**40)):
        draws.set_counter(low, second, third)
        draws.bits.random_raw()  # what is left in the buffer must not come out after the next set_counter
        draws.set_counter(low, second, third)
        assert draws.bits.random_raw(4).tolist() == oracle.philox([low + 1, second, third, 0], (5, 7))


def test_keys_are_pinned():
    assert philox_key(0, 0, "window").tolist() == list(oracle.key_of(0, 0, "window"))
    assert philox_key(7, 3, "shards").tolist() == KEY_OF_SHARDS


def test_a_draw_does_not_depend_on_where_the_run_of_draws_begins():
    key = philox_key(1, 2, "window")
    whole = oracle.drawn(key, 9, 0, 41)
    assert whole.dtype == np.float64
    assert whole.tolist() == [oracle.uniform(tuple(key.tolist()), 9, i) for i in range(41)]
    for first in range(41):
        for count in (0, 1, 41 - first):
            assert oracle.drawn(key, 9, first, count).tolist() == whole[first : first + count].tolist()


def test_sample_generator_depends_on_the_sample_only():
    one, other = SampleRandomness(1, 2), SampleRandomness(1, 2)
    expected = one.generator(3, 4).random(5).tolist()
    other.generator(8, 9).integers(0, 10, 3, dtype=np.int32)  # leaves half a word behind
    other.generator(3, 5).random()
    assert other.generator(3, 4).random(5).tolist() == expected
    assert one.generator(3, 4).integers(0, 2**32, 3, dtype=np.uint32).tolist() == (
        SampleRandomness(1, 2).generator(3, 4).integers(0, 2**32, 3, dtype=np.uint32).tolist()
    )


@pytest.mark.parametrize("kind", ["generator", "seeds"])
def test_samples_shards_epochs_and_seeds_are_independent(kind):
    def first(seed, epoch, shard, sample):
        randomness = SampleRandomness(seed, epoch)
        if kind == "seeds":
            return randomness.seeds(shard, sample)
        return tuple(randomness.generator(shard, sample).random(3).tolist())

    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 2, 3), (0, 0, 3, 2)]
    assert len({first(*place) for place in places}) == len(places)


def test_seeds_fit_what_they_are_for():
    randomness = SampleRandomness(0, 0)
    for sample in range(200):
        python, legacy, torch = randomness.seeds(1, sample)
        assert {type(python), type(legacy), type(torch)} == {int}
        random.Random(python)
        np.random.RandomState(legacy)
        assert 0 <= torch < 2**63
    assert len({value for sample in range(200) for value in randomness.seeds(1, sample)}) == 600


KEY_OF_SHARDS = [17506976077567959913, 5145822573523230823]
