"""States, orders and random draws of an earlier version: what it saved is loaded, and goes on exactly.

`saved_states.json` was written by the last version before the rooms of the source tree were rebuilt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from transforms import draw

from streamload import Mixture, StreamLoader

SAVED: dict[str, Any] = json.loads(Path(__file__).with_name("saved_states.json").read_text())


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("saved")
    return write_numbers(folder / "shards", SAVED["counts"]), write_numbers(folder / "other", SAVED["other_counts"])


@pytest.mark.parametrize("case", SAVED["states"])
def test_a_saved_state_goes_on_exactly(shards: tuple[str, str], case: str) -> None:
    saved = SAVED["states"][case]
    options = dict(saved["options"])
    if "weights" in options:
        options["weights"] = {int(label): weight for label, weight in options["weights"].items()}
    urls = Mixture({"main": (shards[0], 0.7), "other": (shards[1], 0.3)}) if case == "mixture" else shards[0]
    with StreamLoader(urls, 4, fields=("cls",), num_workers=0, **options) as loader:
        loader.load_state_dict(saved["state"])
        assert [batch[0].tolist() for batch in loader] == saved["rest"]
        assert [batch[0].tolist() for batch in loader] == saved["next_epoch"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_draws_are_the_same(shards: tuple[str, str], num_workers: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 11, "num_workers": num_workers}
    with StreamLoader(shards[0], 4, fields=("cls",), transform={"cls": draw}, **options) as loader:
        assert [batch[0].tolist() for batch in loader][:3] == SAVED["draws"]
