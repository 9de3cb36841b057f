"""Which samples an epoch holds: `weights`, `sampler`, `epoch_size`, end to end."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_shards import write_numbers, write_samples
from same_batches import global_batches
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from streamload import StreamLoader
from streamload.errors import DatasetIndexError, LoaderStateError

COUNTS = [30, 1, 50, 0, 20, 39]
TOTAL = sum(COUNTS)
OPTIONS: dict[str, Any] = {"fields": ("cls",), "num_workers": 0}
SHUFFLED: dict[str, Any] = {**OPTIONS, "shuffle": 100}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sample n holds n."""
    return write_numbers(tmp_path_factory.mktemp("choice") / "shards", COUNTS)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """2,000 samples in 8 shards, every twentieth of label 1 and the others of label 0."""
    samples = [{"cls": int(number % 20 == 7), "id": number} for number in range(2000)]
    return write_samples(tmp_path_factory.mktemp("uneven") / "shards", samples, max_count=250)


def numbers(loader: StreamLoader) -> list[int]:
    return [number for batch in loader for number in batch[0].tolist()]


def one_epoch(source: str, batch_size: int, state: Any = None, **options: Any) -> list[int]:
    with StreamLoader(source, batch_size, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return numbers(loader)


def states_of(source: str, batch_size: int, **options: Any) -> list[dict[str, Any]]:
    with StreamLoader(source, batch_size, **options) as loader:
        return [loader.state_dict() for _ in loader]


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ("balanced", 1 / 2),
        ({0: 1, 1: 3.5}, 350 / 2250),
        (torch.where(torch.arange(2000) % 20 == 7, 3.5, 1.0), 350 / 2250),
    ],
    ids=["balanced", "labels", "tensor"],
)
def test_weights_give_their_shares_and_each_sample_its_turn(uneven: str, weights: Any, share: float) -> None:
    drawn = Counter(one_epoch(uneven, 50, **{**SHUFFLED, "fields": ("id",)}, weights=weights, epoch_size=900))
    assert drawn.total() == 900
    for label, part in ((True, share), (False, 1 - share)):
        of_label = [drawn[number] for number in range(2000) if (number % 20 == 7) == label]
        assert abs(sum(of_label) - 900 * part) < 1
        assert max(of_label) - min(of_label) <= 1


def test_repeats_of_a_sample_have_randomness_of_their_own(source: str) -> None:
    def noise(value: int, rng: np.random.Generator) -> tuple[int, float]:
        return value, float(rng.random())

    weights = [1.0] * 5 + [0.0] * (TOTAL - 5)
    for options in ({"weights": weights, "epoch_size": 20}, {"epoch_size": TOTAL * 3}):
        with StreamLoader(source, 10, **SHUFFLED, transform={"cls": noise}, **options) as loader:
            values = [v for batch in loader for v in batch[0][1].tolist()]
        assert len(set(values)) == len(values)


# -- sampler -------------------------------------------------------------------------------------------------------


def samplers(seed: int) -> list[Sampler[int] | list[int]]:
    generator = torch.Generator().manual_seed(seed)
    data = range(TOTAL)
    return [
        SequentialSampler(data),
        RandomSampler(data, generator=generator),
        RandomSampler(data, replacement=True, num_samples=50, generator=generator),
        SubsetRandomSampler(range(0, TOTAL, 3), generator=generator),
        WeightedRandomSampler([1.0 + n for n in range(TOTAL)], 77, generator=generator),
        [5, 139, 5, 0, 31],
    ]


@pytest.mark.parametrize("which", range(6))
def test_a_torch_sampler_gives_what_it_gives_with_a_dataloader(source: str, which: int) -> None:
    theirs = DataLoader(list(range(TOTAL)), 8, sampler=samplers(3)[which], drop_last=which == 1)
    with StreamLoader(source, 8, **OPTIONS, sampler=samplers(3)[which], drop_last=which == 1) as loader:
        assert len(loader) == len(theirs)
        for _ in range(2):
            assert [b[0].tolist() for b in loader] == [b.tolist() for b in theirs]


def test_samplers_are_divided_among_the_ranks(source: str) -> None:
    order = np.random.default_rng(0).permutation(TOTAL)[:96]
    whole = global_batches(source, 1, 12, **OPTIONS, sampler=order)
    assert whole == [sorted(order[first : first + 12].tolist()) for first in range(0, 96, 12)]
    assert global_batches(source, 3, 12, **OPTIONS, sampler=order) == whole
    state = states_of(source, 12, **OPTIONS, sampler=order)[2]
    assert global_batches(source, 4, 12, state, **OPTIONS, sampler=order) == whole[3:]


def test_a_seeded_sampler_resumes_in_a_later_epoch(source: str) -> None:
    def loader() -> StreamLoader:
        seeded = RandomSampler(range(TOTAL), generator=torch.Generator().manual_seed(1))
        return StreamLoader(source, 10, **OPTIONS, sampler=seeded)

    with loader() as first:
        epochs = [numbers(first) for _ in range(2)]
        rest = iter(first)
        epochs.append([n for _ in range(4) for n in next(rest)[0].tolist()])
        state = first.state_dict()
        following = [n for batch in rest for n in batch[0].tolist()]
    with loader() as second:
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert numbers(second) == following
    assert sorted(epochs[2] + following) == list(range(TOTAL))


def test_an_order_that_does_not_come_again_is_refused(source: str) -> None:
    state = states_of(source, 10, **OPTIONS, sampler=list(range(50)))[2]
    with StreamLoader(source, 10, **OPTIONS, sampler=list(range(1, 51))) as loader:
        loader.load_state_dict(state)
        for _ in range(2):  # who tries again gets no other order for the saved one either
            with pytest.raises(LoaderStateError, match="order differs.*generator"):
                iter(loader)


# -- epoch_size ----------------------------------------------------------------------------------------------------


def test_an_epoch_of_a_size_goes_on_where_the_one_before_ended(source: str) -> None:
    with StreamLoader(source, 7, **SHUFFLED, epoch_size=TOTAL // 4, drop_last=True) as loader:
        assert len(loader) == TOTAL // 4 // 7
        assert sorted(sum((numbers(loader) for _ in range(4)), [])) == list(range(TOTAL))


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": [1.0, float("nan")]}, "nan"),
        ({"weights": {0: -2}}, "-2"),
        ({"weights": [0.0] * TOTAL}, "all zero"),
        ({"weights": 3}, "shape"),
        ({"weights": {"cat": 1}}, "weights has 'cat'; give labels, which are whole numbers"),
        ({"weights": {0: "x"}}, "must be a number"),
        ({"weights": [1.0] * 5}, "5 numbers, but the dataset has 140"),
        ({"weights": dict.fromkeys(range(TOTAL + 1), 1)}, "label 140, which no sample has"),
        ({"weights": dict.fromkeys(range(TOTAL - 1), 1)}, "lacks the label 139"),
        ({"weights": "balanced", "shuffle": False}, "shuffle=True"),
        ({"sampler": [1]}, "shuffle and sampler"),
        ({"sampler": [1], "shuffle": False, "weights": "balanced"}, "weights and sampler"),
        ({"sampler": [1], "shuffle": False, "epoch_size": 3}, "epoch_size and sampler"),
        ({"sampler": iter([1]), "shuffle": False}, "only once"),
        ({"sampler": 5, "shuffle": False}, "iterable"),
        ({"sampler": DistributedSampler(range(9), 2, 0), "shuffle": False}, "num_replicas=1"),
        ({"epoch_size": 0}, "epoch_size=0"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_wrong_values_are_refused(source: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        StreamLoader(source, 10, **{**SHUFFLED, **options})


@pytest.mark.parametrize("sampler", [[0, TOTAL], [-1], [[1, 2]], [0.5]], ids=str)
def test_what_a_sampler_gives_is_checked(source: str, sampler: Sequence[Any]) -> None:
    with (
        StreamLoader(source, 10, **OPTIONS, sampler=sampler) as loader,
        pytest.raises((TypeError, ValueError), match="the sampler gave"),
    ):
        iter(loader)


def test_weights_by_label_need_labels_and_weights_of_samples_as_many(source: str, tmp_path: Path) -> None:
    bare = os.fspath(shutil.copytree(source, tmp_path / "bare", ignore=shutil.ignore_patterns(".streamload")))
    with pytest.raises(DatasetIndexError, match="streamload index"):
        StreamLoader(bare, 10, **SHUFFLED, weights="balanced")
    with StreamLoader(bare, 10, **SHUFFLED, weights=[1.0] * 5) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="5 numbers"):
                iter(loader)
    with pytest.raises(DatasetIndexError, match="cls"):
        StreamLoader(
            write_samples(tmp_path / "unlabelled", [{"txt": "a"}]), 10, shuffle=True, weights="balanced", num_workers=0
        )


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        ({"epoch_size": 50}, {"epoch_size": 60}, "epoch_size was 50 and is 60"),
        ({"weights": "balanced"}, {"weights": [1.0] * TOTAL}, "weights was 'balanced'"),
        ({}, {"sampler": [1, 2], "shuffle": False}, "shuffle was True.*sampler was None"),
        ({"sampler": [1, 2], "shuffle": False}, {}, "sampler was 'order' and is None"),
    ],
)
def test_a_state_of_another_sampling_is_refused(
    source: str, saved: dict[str, Any], now: dict[str, Any], named: str
) -> None:
    state = states_of(source, 10, **{**SHUFFLED, **saved})[0]
    with StreamLoader(source, 10, **{**SHUFFLED, **now}) as loader, pytest.raises(LoaderStateError, match=named):
        loader.load_state_dict(state)
