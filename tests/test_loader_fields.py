"""Which fields a sample has for the user: tuples, dicts, keys, alternatives; and which names are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import exhaustive

from streamload import ShardWriter, StreamLoader


@pytest.fixture
def source(tmp_path: Path) -> str:
    with ShardWriter(tmp_path / "s") as writer:
        for number in range(6):
            image = {"npy": np.full(2, number)} if number % 2 else {"seg.npy": np.full(2, number)}
            writer.write(
                {"__key__": f"dir/k{number}", **image, "cls": number, "json": {"n": number, "t": "x" * number}}
            )
    return str(tmp_path / "s")


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_keys_and_urls_may_stand_among_the_fields(source: str, workers: int) -> None:
    fields = ("cls", "__key__", "npy;seg.npy", "__url__")
    with StreamLoader(source, 3, fields=fields, num_workers=workers) as loader:
        labels, keys, values, urls = next(iter(loader))
    assert labels.tolist() == [0, 1, 2]
    assert keys == ("dir/k0", "dir/k1", "dir/k2")  # a tuple, as default_collate has it
    assert values.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert all(url.startswith(source) and url.endswith(".tar") for url in urls)
    with StreamLoader(source, 3, fields=("__key__",), num_workers=workers) as loader:
        assert [batch[0] for batch in loader] == [keys, ("dir/k3", "dir/k4", "dir/k5")]


@pytest.mark.parametrize("fields", [("npy; seg.npy ", "txt ; bin?"), (".NPY;Seg.npy", ".TXT;BIN?")])
def test_blanks_dots_and_case_mean_nothing(source: str, fields: tuple[str, ...]) -> None:
    options: dict[str, Any] = {"decode": {"npy; SEG.npy": len}, "transform": {" .seg.npy ;NPY": float}}
    with StreamLoader(source, 6, fields=fields, num_workers=0, **options) as loader:
        sizes, absent = next(iter(loader))
    assert sizes.tolist() == [144] * 6
    assert absent == (None,) * 6


@pytest.mark.parametrize("workers", [0, exhaustive((2,))])
def test_nested_values_are_collated(source: str, workers: int) -> None:
    with StreamLoader(source, 3, fields=("json",), num_workers=workers) as loader:
        (value,) = next(iter(loader))
    assert torch.equal(value["n"], torch.tensor([0, 1, 2]))
    assert value["t"] == ["", "x", "xx"]


def test_bytes_where_nothing_is_decoded(source: str) -> None:
    with StreamLoader(source, 2, fields=("cls", "json"), decode=False, num_workers=1) as loader:
        assert next(iter(loader)) == [(b"0", b"1"), (b'{"n":0,"t":""}', b'{"n":1,"t":"x"}')]
