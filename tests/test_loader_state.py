"""Resuming: the rest of the same epoch, at any world size and any number of workers, as often as wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from same_batches import global_batches
from transforms import draw

from streamload import Mixture, StreamLoader
from streamload.errors import LoaderStateError, TransformError

COUNTS = [30, 1, 50, 0, 20, 39]
TOTAL = sum(COUNTS)
OPTIONS: dict[str, Any] = {"fields": ("cls",), "shuffle": 25, "num_workers": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("state") / "shards", COUNTS)


def states_of(source: str, world_size: int, batch_size: int, **options: Any) -> list[dict[str, Any]]:
    """The state after each batch of rank 0."""
    with StreamLoader(source, batch_size, **{**OPTIONS, **options}, rank=0, world_size=world_size) as loader:
        return [json.loads(json.dumps(loader.state_dict())) for _ in loader]


def test_every_state_gives_the_rest_at_another_world_size(source: str) -> None:
    options = {**OPTIONS, "pad": False}
    whole = global_batches(source, 2, 12, lanes=2, **options)
    states = states_of(source, 2, 6, lanes=2)
    assert len(states) == len(whole)
    for step, state in list(enumerate(states, start=1))[::3]:
        for other_world in (1, 4):
            assert global_batches(source, other_world, 12, state, **options) == whole[step:]
        rest = global_batches(source, 3, 15, state, **options)
        assert sorted(sum(rest, [])) == sorted(sum(whole[step:], [])), "of another size, too"


def test_state_counts_what_the_loop_has_been_given(source: str) -> None:
    with StreamLoader(source, 10, **{**OPTIONS, "num_workers": 1}, prefetch_batches=8) as loader:
        assert loader.state_dict()["position"] == 0
        for step, _ in enumerate(loader, start=1):
            state = loader.state_dict()
            assert (state["epoch"], state["position"]) == (0, min(10 * step, TOTAL))
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
        loader.load_state_dict(state)
        assert list(loader) == [], "after the last batch nothing of the epoch is left"
        assert len(list(loader)) == 14


def test_set_epoch_keeps_what_was_resumed(source: str) -> None:
    whole = global_batches(source, 1, 10, **OPTIONS)
    state = states_of(source, 1, 10)[2]
    with StreamLoader(source, 10, **OPTIONS) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert [sorted(batch[0].tolist()) for batch in loader] == whole[3:]
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert loader.state_dict()["position"] == 0
        assert len(list(loader)) == 14


def test_after_an_error_of_the_loader_a_pass_goes_on_from_there(source: str) -> None:
    whole = global_batches(source, 1, 10, **OPTIONS)
    broken = True

    def fail_sometimes(value: int) -> int:
        if broken and value in whole[3]:
            raise ValueError("not today")
        return value

    with StreamLoader(source, 10, **OPTIONS, transform={"cls": fail_sometimes}) as loader:
        got = []
        with pytest.raises(TransformError, match="not today"):
            for batch in loader:
                got.append(sorted(batch[0].tolist()))
        assert got == whole[:3]
        assert loader.state_dict()["position"] == 30
        broken = False
        assert [sorted(batch[0].tolist()) for batch in loader] == whole[3:]


def test_a_position_behind_the_end_belongs_to_no_epoch_of_this_dataset(source: str) -> None:
    with StreamLoader(source, 4, **OPTIONS) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 10**9})
        with pytest.raises(LoaderStateError, match=f"position 1000000000 lies outside the epoch's {TOTAL} samples"):
            next(iter(loader))


# -- states, orders and random draws of an earlier version: what it saved goes on exactly ----------------------------

SAVED: dict[str, Any] = json.loads(Path(__file__).with_name("saved_states.json").read_text())
"""Written by the last version before the rooms of the source tree were rebuilt."""


@pytest.fixture(scope="module")
def saved_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("saved")
    return write_numbers(folder / "shards", SAVED["counts"]), write_numbers(folder / "other", SAVED["other_counts"])


@pytest.mark.parametrize("case", SAVED["states"])
def test_a_saved_state_goes_on_exactly(saved_shards: tuple[str, str], case: str) -> None:
    saved = SAVED["states"][case]
    options = dict(saved["options"])
    if "weights" in options:
        options["weights"] = {int(label): weight for label, weight in options["weights"].items()}
    main, other = saved_shards
    urls = Mixture({"main": (main, 0.7), "other": (other, 0.3)}) if case == "mixture" else main
    with StreamLoader(urls, 4, fields=("cls",), num_workers=0, **options) as loader:
        loader.load_state_dict(saved["state"])
        assert [batch[0].tolist() for batch in loader] == saved["rest"]
        assert [batch[0].tolist() for batch in loader] == saved["next_epoch"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_draws_are_the_same(saved_shards: tuple[str, str], num_workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 11, "num_workers": num_workers}
    with StreamLoader(saved_shards[0], 4, fields=("cls",), transform={"cls": draw}, **options) as loader:
        assert [batch[0].tolist() for batch in loader][:3] == SAVED["draws"]
