"""Keywords of other loaders and misspelt ones are refused by a TypeError that says what to use instead."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from torch.utils.data import DataLoader

from streamload import StreamLoader, TarDataset
from streamload.dataloader_names import FOR_DATASET, FOR_LOADER

TORCHS = list(inspect.signature(DataLoader).parameters)
OURS = inspect.signature(StreamLoader).parameters


def refusal(**keywords: Any) -> str:
    with pytest.raises(TypeError) as raised:
        StreamLoader("/no/such/shard.tar", **keywords)
    return str(raised.value)


@pytest.mark.parametrize("name", TORCHS)
def test_every_keyword_of_torchs_loader_is_known(name: str) -> None:
    if name in OURS:
        assert name not in FOR_LOADER
    else:
        assert refusal(**{name: None}) == f"StreamLoader has no keyword {name!r} ({FOR_LOADER[name]})"


def test_what_torchs_loader_has_as_a_position_is_at_the_same_one_here() -> None:
    assert list(OURS)[1:3] == TORCHS[1:3] == ["batch_size", "shuffle"]


@pytest.mark.parametrize("name", FOR_LOADER)
def test_hints_name_what_there_is(name: str) -> None:
    assert name not in OURS
    words = FOR_LOADER[name].replace("(", " ").replace(":", " ").split()
    for word in words:
        keyword = word.partition("=")[0]
        if "=" in word:
            assert keyword in OURS
        if word.startswith(("set_epoch()", "statistics()", "close()")):
            assert hasattr(StreamLoader, word.partition("(")[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("handler", r'on_error="skip" .* samples that fail; damaged shards are always errors.*`streamload verify`'),
        ("rename_files", r"fields= names the fields as they are.*transform= may give a dict other keys"),
        ("subsample", "name fewer shards in urls=; epoch_size= makes epochs shorter"),
        ("resampled", "for drawing with replacement there is weights="),
        ("length", r"len\(loader\) is counted from the shards; for shorter or longer epochs there is epoch_size="),
        ("epoch_length", "for shorter or longer epochs there is epoch_size="),
    ],
)
def test_hints_agree_with_the_page_for_those_who_come_from_elsewhere(name: str, said: str) -> None:
    assert re.search(said, refusal(**{name: None}))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("shufle", "shuffle"),
        ("suffle_window", "shuffle_window"),
        ("num_worker", "num_workers"),
        ("batchSize", "batch_size"),
        ("prefetch_batch", "prefetch_batches"),
        ("on_errors", "on_error"),
    ],
)
def test_typos_are_answered_by_the_nearest_name(written: str, meant: str) -> None:
    assert f"no keyword {written!r} (did you mean {meant!r}?)" in refusal(**{written: 1})


def test_all_that_is_wrong_is_told_at_once() -> None:
    said = refusal(prefetch_factor=2, shufle=True, wombat=3)
    assert "'prefetch_factor' (prefetch_batches=" in said
    assert "and no 'shufle' (did you mean 'shuffle'?)" in said
    assert "and no 'wombat' (there are urls, batch_size, shuffle, " in said
    assert "persistent" in refusal(persistant_workers=True) or "kept" in refusal(persistant_workers=True)


def test_a_dataset_alone_is_answered_before_the_missing_urls() -> None:
    with pytest.raises(TypeError, match="no keyword 'dataset' .name the shards with urls="):
        StreamLoader(dataset=[1, 2])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'urls'"):
        StreamLoader()


WEBDATASETS = ("select", "decode", "to_tuple", "with_epoch", "shuffle", "map", "batched", "rename", "unbatched")


def test_methods_of_webdataset_are_answered_as_its_keywords_are(tmp_path: Path) -> None:
    """And still as an attribute that is not there, for those who ask whether it is."""
    with StreamLoader(write_numbers(tmp_path, [4]), num_workers=0) as loader:
        for name in WEBDATASETS:
            said = FOR_LOADER.get(name, f"it is a keyword: StreamLoader(urls, {name}=...)")
            with pytest.raises(AttributeError) as raised:
                getattr(loader, name)(1)
            assert str(raised.value) == f"'StreamLoader' object has no attribute {name!r} ({said})"
        assert not hasattr(loader, "to_tuple")
        assert getattr(loader, "wombat", 7) == 7
        with pytest.raises(AttributeError, match=r"^'StreamLoader' object has no attribute '_wombat'$"):
            loader._wombat


def test_the_signature_stays_the_truth() -> None:
    assert "urls" in OURS
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in OURS.values())
    assert StreamLoader.__init__.__annotations__["batch_size"] == "int"


def test_the_dataset_tells_what_is_torchs() -> None:
    for name in ("batch_size", "num_workers", "seed"):
        with pytest.raises(TypeError, match=f"TarDataset has no keyword '{name}' \\("):
            TarDataset("/no/such/shard.tar", **{name: 1})
    assert not FOR_DATASET.keys() & inspect.signature(TarDataset).parameters.keys()


def test_methods_of_webdataset_are_answered_by_a_dataset_too(tmp_path: Path) -> None:
    with TarDataset(write_numbers(tmp_path, [4])) as dataset:
        for name in (*WEBDATASETS, "repeat", "slice", "compose"):
            said = FOR_DATASET.get(name, f"it is a keyword: TarDataset(urls, {name}=...)")
            with pytest.raises(AttributeError) as raised:
                getattr(dataset, name)(1)
            assert str(raised.value) == f"'TarDataset' object has no attribute {name!r} ({said})"
        assert getattr(dataset, "wombat", 7) == 7
        assert len(pickle.loads(pickle.dumps(dataset))) == len(copy.copy(dataset)) == 4
