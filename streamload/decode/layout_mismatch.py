"""Messages for samples that cannot be collated: where they differ, or which value no tensor can be made of."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamload.decode.batch_layout import describe_rows, is_tensor
from streamload.decode.columns import Rows

__all__ = ["difference_between", "find_missing_key"]

_IMAGES = re.compile(r"uint8\[\d+, \d+, 3] uint8\[\d+, \d+, 3]$")
_RESIZE = " (images with streamload.images.Resize((224, 224)), say)"

_LEVELS = 6
"""How deep samples are compared; the limit also ends with samples that contain themselves."""


def difference_between(rows: Rows) -> str:
    """Why some samples cannot be a batch, for the message of an error.

    Places in a sample are written as in Python: `['boxes'][0]`. Empty if the samples are alike and hold only what can
    be collated.
    """
    first = rows.row_alike(0)
    for number in range(1, rows.count):
        found = _first_difference(first, rows.row_alike(number), "", _LEVELS)
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
        "convert it in decode= or transform=, leave it out of fields=, or give a collate_fn="
    )


class MissingKey(NamedTuple):
    """A sample lacks what another one of its batch has.

    Attributes:
        row: the row that lacks it.
        field: the key, if it is a field.
        message: for an error of that sample.
    """

    row: int
    field: str | None
    message: str


def find_missing_key(rows: Rows, names: Sequence[str] | None = None, fields: Collection[str] = ()) -> MissingKey | None:
    """Find a key of some mapping in the samples that not all of them have.

    torch's `default_collate` takes the first sample's keys and would silently drop what only others have.

    Args:
        rows: the samples.
        names: the samples' keys, where they are known.
        fields: the stored fields, where the samples are dicts of them.
    """
    first = rows.row_alike(0)
    for number in range(1, rows.count):
        found = _first_missing(first, rows.row_alike(number), "", _LEVELS)
        if found is not None:
            place, key, first_has_it = found
            lacks, has = (number, 0) if first_has_it else (0, number)
            which = f"number {has}" if names is None else f"sample {names[has]!r}"
            is_field = key in fields and not place
            return MissingKey(
                lacks,
                str(key) if is_field else None,
                f"it has no {'field' if is_field else 'key'} {key!r}{_in(place)}, which {which} of its batch has; "
                f"{_wanted_fields(rows) if is_field else 'make them alike in transform='}, or give a collate_fn=",
            )
    return None


def _first_missing(one: Any, other: Any, place: str, levels: int) -> tuple[str, Any, bool] | None:
    """The first place where only one of two samples has a key, the key, and whether the first sample has it."""
    mine, theirs = _items(one), _items(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping) and mine.keys() != theirs.keys():
        key = next(key for key in (*mine, *theirs) if key not in mine or key not in theirs)
        return place, key, key in mine
    if not levels or not mine or not theirs:
        return None
    found = (_first_missing(mine[key], theirs[key], f"{place}[{key!r}]", levels - 1) for key in mine if key in theirs)
    return next((missing for missing in found if missing is not None), None)


def _wanted_fields(rows: Rows) -> str:
    common = [key for key in rows.row_alike(0) if all(key in rows.row_alike(number) for number in range(rows.count))]
    fields = ", ".join(repr(key) for key in common if key not in ("__key__", "__url__"))
    said = f" (those of this batch have {fields})" if fields else ""
    return f"name the fields that all samples have in fields={said}, make the samples alike in transform="


def _in(place: str) -> str:
    return f" in {place}" if place else ""


def _first_difference(one: Any, other: Any, place: str, levels: int) -> tuple[str, str, str] | None:
    """The first place where two samples differ, and the outlines of both values."""
    mine, theirs = _items(one), _items(other)
    if levels and mine and type(one) is type(other) and mine.keys() == theirs.keys():
        found = (_first_difference(mine[key], theirs[key], f"{place}[{key!r}]", levels - 1) for key in mine)
        return next((difference for difference in found if difference is not None), None)
    outlines = _outline(one, levels), _outline(other, levels)
    return None if outlines[0] == outlines[1] else (place, *outlines)


def _strange_leaf(value: Any, place: str, levels: int) -> tuple[str, str] | None:
    """The place and the outline of a value that cannot be collated."""
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
