"""Keywords of other loaders and misspelt ones are refused by a TypeError that says what takes their place."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from torch.utils.data import DataLoader

from streamload import ShardWriter, StreamLoader, TarDataset

TORCHS = list(inspect.signature(DataLoader).parameters)
OURS = inspect.signature(StreamLoader).parameters
PAGE = (Path(__file__).parent.parent / "docs" / "coming-from.md").read_text()
ADVICE = "help(StreamLoader) lists the arguments"


def refusal(**keywords: Any) -> str:
    with pytest.raises(TypeError) as raised:
        StreamLoader("/no/such/shard.tar", **keywords)
    return str(raised.value)


@pytest.mark.parametrize("name", TORCHS)
def test_every_keyword_of_torchs_loader_has_a_line_on_the_page(name: str) -> None:
    (line,) = re.findall(rf"^\| `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert (name in OURS) == line.startswith(f"`{name}`")
    for keyword in re.findall(r"`(\w+)=", line):
        assert keyword in OURS or keyword in TORCHS
    if name not in OURS:
        assert refusal(**{name: "spawn"}).endswith(ADVICE)


def test_the_constructor_has_thirty_parameters_and_torchs_first() -> None:
    assert len(OURS) <= 30
    assert list(OURS)[1:3] == TORCHS[1:3] == ["batch_size", "shuffle"]


def test_what_programs_leave_at_the_value_of_torchs_loader_is_accepted(tmp_path: Path) -> None:
    """All of its own values by default, and those that ask for what is done anyway."""
    own = {name: parameter.default for name, parameter in inspect.signature(DataLoader).parameters.items()}
    del own["dataset"], own["pin_memory"]  # this one is always on
    shards = write_numbers(tmp_path, [4])
    with StreamLoader(shards, fields=("cls",), **own) as loader:
        assert [labels.tolist() for (labels,) in loader] == [[0], [1], [2], [3]]
    with StreamLoader(shards, 4, fields=("cls",), num_workers=0, persistent_workers=True, pin_memory=True) as loader:
        assert [labels.tolist() for (labels,) in loader] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("written", "meant"),
    [("shufle", "shuffle"), ("batchSize", "batch_size"), ("on_errors", "on_error"), ("workers", "num_workers")],
)
def test_typos_are_answered_by_the_nearest_name(written: str, meant: str) -> None:
    said = f"StreamLoader got an unexpected keyword argument {written!r} (did you mean {meant!r}?); {ADVICE}"
    assert refusal(**{written: 1}) == said


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("persistent_workers", ""),
        ("prefetch_factor", " (pass prefetch_batches=, "),
        ("handler", " (pass on_error='skip')"),
        ("feeders", " (leave it out; each rank has its own feeder"),
        ("keys", " (pass them as where="),
        ("timeout", " (leave it out; the log says what a batch waits for"),
    ],
)
def test_keywords_of_others_are_answered_by_what_to_do_instead(name: str, instead: str) -> None:
    said = refusal(**{name: 7})
    assert f"unexpected keyword argument {name!r}{instead}" in said
    assert said.endswith(ADVICE)


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    said = "StreamLoader got an unexpected keyword argument 'wombat', 'shufle' (did you mean 'shuffle'?); "
    assert refusal(wombat=3, shufle=True) == said + ADVICE


@pytest.mark.parametrize("make", [TarDataset, ShardWriter])
def test_the_others_say_so_too(make: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=rf"^{make.__name__} got an unexpected keyword argument 'maxsize'.*; help\({make.__name__}\)"
    ):
        make(tmp_path, maxsize=1)


@pytest.mark.parametrize("make", [StreamLoader, TarDataset])
def test_methods_of_other_loaders_are_answered_by_a_keyword(make: Any, tmp_path: Path) -> None:
    """And still as an attribute that is not there, for those who ask whether it is."""
    with make(write_numbers(tmp_path, [4])) as made:
        said = f"{make.__name__!r} object has no attribute"
        with pytest.raises(AttributeError, match=f"^{said} 'select'; pass where=$"):
            made.select(1)
        with pytest.raises(AttributeError, match=rf"{said} 'decode'; it is a keyword: {make.__name__}\(urls, decode="):
            made.decode("rgb8")
        assert not hasattr(made, "to_tuple")
        assert getattr(made, "wombat", 7) == 7
        with pytest.raises(AttributeError, match=r"no attribute '_wombat'$"):
            made._wombat


@pytest.mark.parametrize("name", ["batch_size", "drop_last", "num_workers"])
def test_what_would_have_no_effect_cannot_be_set(name: str, tmp_path: Path) -> None:
    with StreamLoader(write_numbers(tmp_path, [4]), 2, num_workers=0) as loader:
        with pytest.raises(AttributeError):
            setattr(loader, name, 3)
        assert (loader.batch_size, loader.drop_last, loader.num_workers) == (2, False, 0)
