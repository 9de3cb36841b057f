"""Expansion of what a user writes for a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from streamload.storage import storages
from streamload.storage.storages import MAX_URLS, expand_urls


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("a.tar", ["a.tar"]),
        (Path("d/a.tar"), ["d/a.tar"]),
        (Path("d/{0..1}.tar"), ["d/0.tar", "d/1.tar"]),
        ("x-{000009..000011}.tar", ["x-000009.tar", "x-000010.tar", "x-000011.tar"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("{a,b{1..2},{c,d}}.tar", ["a.tar", "b1.tar", "b2.tar", "c.tar", "d.tar"]),
        ("b.tar::a.tar", ["b.tar", "a.tar"]),
        ("b{0..1}::a", ["b0", "b1", "a"]),
        ("./a::s3://b/c.tar", ["./a", "s3://b/c.tar"]),
        (["c::b", "{0..1}", Path("a")], ["c", "b", "0", "1", "a"]),
        (("b", "a", "b"), ["b", "a", "b"]),
        ("s3://bucket/{a,b}.tar", ["s3://bucket/a.tar", "s3://bucket/b.tar"]),
        ("d/*.tar", ["d/*.tar"]),
        ("{name}.tar", ["{name}.tar"]),
        (r"\{a{1,2}", ["{a1", "{a2"]),
        (r"back\slash", [r"back\slash"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{10..1..4}", ["10", "6", "2"]),
        ("http://[::1]:8000/a.tar", ["http://[::1]:8000/a.tar"]),
        ("http://[::1]/{a,b}.tar::c.tar", ["http://[::1]/a.tar", "http://[::1]/b.tar", "c.tar"]),
        (
            ["http://u:p@[fe80::1%25eth0]:80/[0-9].tar::d[ab].tar", "dir::http:/x.tar"],
            ["http://u:p@[fe80::1%25eth0]:80/[0-9].tar", "d[ab].tar", "dir", "http:/x.tar"],
        ),
    ],
)
def test_expands(urls: str | os.PathLike[str] | list[str], expected: list[str]) -> None:
    assert expand_urls(urls) == expected


@pytest.mark.parametrize(
    "urls", [None, 3, b"a.tar", {"a": 1}, {"a"}, (u for u in "ab"), [1], ["a", None], [["a"]], [b"a"]]
)
def test_refuses_other_types_and_names_the_argument(urls: object) -> None:
    with pytest.raises(TypeError, match=r"^urls"):
        expand_urls(urls)  # type: ignore[arg-type]


def test_a_torch_dataset_is_refused_with_where_it_belongs() -> None:
    dataset: Any = torch.utils.data.TensorDataset(torch.zeros(3))
    with pytest.raises(TypeError, match="pass a Dataset to torch's DataLoader, or pack it"):
        expand_urls(dataset)


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        ([], "empty"),
        ("", "empty url"),
        ("  ", "empty url"),
        ("a::", "empty url"),
        (["a", ""], r"urls\[1\]"),
        ("{a,}", "empty url"),
        ("{a", "brace"),
        ("a}", "brace"),
        ("a\0b", "NUL"),
        ("pipe:cat a.tar", "program"),
        ("PIPE: cat a.tar", "program"),
        ("{pipe:cat a.tar,b.tar}", "program"),
        ("a.tar::pipe:cat b", "program"),
        (["a.tar", "pipe:x"], r"urls\[1\] would run a program"),
        ("cat a.tar |", "program"),
        ("| cat", "program"),
        ("cmd:cat a", "program"),
        (["a", "simplcache::s3://b/a.tar"], r"urls\[1\] has the unknown prefix simplcache::"),
        ("simplecache::http://h/a.tar", r"filesystem=fsspec.filesystem\(...\), or cache_dir="),
        ("zip://a.tar::s3://b/a.zip", r"filesystem=fsspec.filesystem\(...\), or cache_dir="),
        ("train::s3://b/a.tar", r"unknown prefix train:: .*\(if train is a folder, write \./train\)"),
    ],
)
def test_refuses_other_values(urls: str | list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        expand_urls(urls)


@pytest.mark.parametrize("urls", [f"{{1..{MAX_URLS + 1}}}", "{0..999999999999}", "{a,b{3..-99999999}}"])
def test_a_range_that_would_fill_the_memory_is_refused(urls: str) -> None:
    with pytest.raises(ValueError, match="more than 10,000,000"):
        expand_urls(urls)


@pytest.mark.parametrize("written", ["{a,b}" * 40, "{a..z}" * 6, ["{1..600}"] * 2, ["x"] * 1001])
def test_expansion_ends_at_the_limit(written: str | list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "MAX_URLS", 1000)
    with pytest.raises(ValueError, match="more than 1,000"):
        expand_urls(written)
