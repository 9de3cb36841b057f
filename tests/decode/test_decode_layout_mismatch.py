"""An error about a batch that cannot be collated says where its samples differ, or what in them is strange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamload.decode.batch_maker import difference_between, find_missing_key
from streamload.decode.columns import Rows


def said(*values: Any) -> str:
    return difference_between(Rows(len(values), list(values))).partition(";")[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((np.zeros(2), np.zeros(3)), "not alike: the first is float64[2], number 1 is float64[3]"),
        (((1, "a"), (2, "b"), (3, 4)), "not alike in [1]: the first is str, number 2 is int"),
        (
            ({"cls": 1, "json": {"boxes": torch.zeros(2, 4)}}, {"cls": 1, "json": {"boxes": torch.zeros(0, 4)}}),
            "not alike in ['json']['boxes']: the first is float32[2, 4], number 1 is float32[0, 4]",
        ),
        (({"a": [1]}, {"a": [1, 2]}), "not alike in ['a']: the first is (int), number 1 is (int, int)"),
        (({"a": 1}, {"a": 1, "b": None}), "not alike: the first is {a: int}, number 1 is {a: int, b: None}"),
        (({"a": 1, "b": "x"}, {"b": "y", "a": 1.5}), "not alike in ['a']: the first is int, number 1 is float"),
        (((1, [2]), (1, None)), "not alike in [1]: the first is (int), number 1 is None"),
        (({"a": {"b": None}}, {"a": {"b": None}}), "hold None in ['a']['b'], of which no tensor is made"),
        (((1, np.array(["x"])),), "hold <U1[1] in [1], of which no tensor is made"),
        (({1, 2}, {3}), "hold set, of which no tensor is made"),
    ],
)
def test_the_place_is_named(values: tuple[Any, ...], expected: str) -> None:
    assert said(*values) == f"its samples {'are ' if expected.startswith('not') else ''}{expected}"


def test_images_of_unlike_sizes_can_be_resized() -> None:
    small, large = np.zeros((4, 5, 3), np.uint8), np.zeros((40, 50, 3), np.uint8)
    for samples in ((small, large), ({"jpg": small}, {"jpg": large})):
        assert "images.Resize((224, 224)), say)" in difference_between(Rows(2, list(samples)))
    assert "Resize" not in difference_between(Rows(2, [small, np.zeros(3, np.uint8)]))


def test_nothing_is_said_of_samples_that_are_alike() -> None:
    assert said({"a": 1, "b": [np.zeros(2)]}, {"b": [np.ones(2)], "a": 5}) == ""


def test_samples_that_hold_themselves_come_to_an_end() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert said(endless, endless) == ""
    assert "not alike in [0]" in said(endless, [2.0, endless])


@pytest.mark.parametrize(
    ("values", "lacks", "expected"),
    [
        (({"a": 1}, {"a": 1, "b": 2}), 0, "it has no key 'b', which number 1 of its batch has"),
        (({"a": 1, "b": 2}, {"a": 1}), 1, "it has no key 'b', which number 0 of its batch has"),
        (
            ([{"a": {"b": 1}}],) * 2 + ([{"a": {}}],),
            2,
            "it has no key 'b' in [0]['a'], which number 0 of its batch has",
        ),
    ],
)
def test_a_key_that_only_some_samples_have(values: tuple[Any, ...], lacks: int, expected: str) -> None:
    found = find_missing_key(Rows(len(values), list(values)))
    assert found is not None
    assert (found.row, found.field, found.message.partition(";")[0]) == (lacks, None, expected)


def test_no_key_is_missing_where_samples_differ_otherwise() -> None:
    for values in (({"a": 1}, {"a": [1]}), ([{}], [1]), ({"a": 1}, {"a": None}), ([{"a": 1}], []), (1, {"a": 1})):
        assert find_missing_key(Rows(2, list(values))) is None
