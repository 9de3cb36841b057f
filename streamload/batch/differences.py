"""Why samples cannot be collated, in words: where they differ, or what in them no tensor can be made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from streamload.batch.collate import Rows
from streamload.batch.layout import describe_rows, is_tensor

__all__ = ["difference_between"]

_IMAGES = re.compile(r"uint8\[\d+, \d+, 3] uint8\[\d+, \d+, 3]$")
_RESIZE = " (images with streamload.images.Resize((224, 224)), say)"

_LEVELS = 6
"""Deeper in a sample nobody looks, which also ends in samples that hold themselves."""


def difference_between(rows: Rows) -> str:
    """What keeps some samples from being a batch, for the message of an error.

    Places in a sample are written as in Python: `['boxes'][0]`. Empty if the samples are alike, and hold nothing
    strange.
    """
    first = rows.row(0)
    for number in range(1, rows.count):
        found = _first_difference(first, rows.row(number), "", _LEVELS)
        if found is not None:
            place, one, other = found
            images = _RESIZE if _IMAGES.match(f"{one} {other}") else ""
            return (
                f"its samples are not alike{_in(place)}: the first is {one}, number {number} is {other}; "
                f"make them alike in transform={images}, name the fields in fields=, or give a collate_fn="
            )
    strange = _strange_leaf(first, "", _LEVELS)
    if strange is None:
        return ""
    place, outline = strange
    return (
        f"its samples hold {outline}{_in(place)}, of which no tensor is made; "
        "convert it in transform=, leave it out of fields=, or give a collate_fn="
    )


def _in(place: str) -> str:
    return f" in {place}" if place else ""


def _first_difference(one: Any, other: Any, place: str, levels: int) -> tuple[str, str, str] | None:
    """The place where two samples first differ, and the outlines of what is there."""
    mine, theirs = _items(one), _items(other)
    if levels and mine and type(one) is type(other) and mine.keys() == theirs.keys():
        found = (_first_difference(mine[key], theirs[key], f"{place}[{key!r}]", levels - 1) for key in mine)
        return next((difference for difference in found if difference is not None), None)
    outlines = _outline(one, levels), _outline(other, levels)
    return None if outlines[0] == outlines[1] else (place, *outlines)


def _strange_leaf(value: Any, place: str, levels: int) -> tuple[str, str] | None:
    """The place of what no batch is made of, and its outline."""
    if isinstance(value, Mapping | tuple | list):
        items = _items(value) if levels else {}
        found = (_strange_leaf(item, f"{place}[{key!r}]", levels - 1) for key, item in items.items())
        return next((leaf for leaf in found if leaf is not None), None)
    try:
        describe_rows(value)
    except TypeError:
        return place, _outline(value, levels)
    return None


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, tuple | list) else {}


def _outline(value: Any, levels: int) -> str:
    if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping | tuple | list) and levels == 0:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_outline(item, levels - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_outline(item, levels - 1) for item in value) + ")"
    return "None" if value is None else type(value).__name__
