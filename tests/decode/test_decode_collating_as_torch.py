"""Whatever samples are, their batch is what torch's `default_collate` makes of them, or is refused as there.

Only mappings of unlike keys are refused always, of which torch takes the first one's.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from same_batches import assert_same
from tasks_by_hand import Shelf, batch_of, job, numbered, slots_for, values_of
from torch.utils.data import default_collate

from streamload.decode.batch_maker import BatchMaker, find_missing_key
from streamload.decode.columns import Rows
from streamload.decode.tasks import Piece, PieceDone, RowFailure


class Box(NamedTuple):
    corner: Any
    size: Any


Single = namedtuple("Single", ["only"])


# -- samples of all kinds ------------------------------------------------------------------------------------------

DTYPES = ["?", "u1", "i4", "i8", "f2", "f4", "f8", "c8"]

numbers = (
    st.integers(-5, 5) | st.floats(-2, 2) | st.booleans() | st.sampled_from([2**62, 2**63, -(2**63), float("inf")])
)
texts = st.text(max_size=3) | st.binary(max_size=3)
numpy_scalars = st.builds(lambda dtype, value: np.dtype(dtype).type(value), st.sampled_from(DTYPES), st.integers(0, 3))
shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (0, 4)])
arrays = st.tuples(st.sampled_from([*DTYPES, ">f4"]), shapes).flatmap(lambda kind: npst.arrays(*kind))
tensors = st.builds(
    lambda dtype, shape, fill: torch.full(shape, fill, dtype=dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    shapes,
    st.integers(0, 3),
)
refused = st.sampled_from([None, np.array(["a"]), np.array([None]), {1}, Ellipsis, np.datetime64("2020-01-01")])
leaves = numbers | texts | numpy_scalars | arrays | tensors

names = st.sampled_from(["a", "b", "__key__", 1])


def nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(names, children, max_size=3),
        st.dictionaries(names, children, max_size=2).map(OrderedDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Box, children, children),
        children.map(Single),
    )


samples = st.recursive(leaves | refused, nests, max_leaves=5)


def again(value: Any, draw: Any, *, odd: bool) -> Any:
    """A sample like another one: the same nest and kinds of leaves; with `odd` it may differ here and there."""
    if odd and draw(st.integers(0, 3)) == 0:
        return draw(samples)
    if isinstance(value, dict):
        kept = [key for key in value if not (odd and draw(st.integers(0, 7)) == 0)]
        return type(value)((key, again(value[key], draw, odd=odd)) for key in kept)
    if isinstance(value, Box | Single):
        return type(value)(*(again(item, draw, odd=odd) for item in value))
    if isinstance(value, list | tuple):
        items = [again(item, draw, odd=odd) for item in value]
        return type(value)([*items, draw(leaves)] if odd and draw(st.integers(0, 7)) == 0 else items)
    if isinstance(value, np.ndarray) and odd:
        return draw(arrays)
    if isinstance(value, bool | int | float | str | bytes) and draw(st.booleans()):
        return type(value)(draw(st.sampled_from([0, 1]))) if not isinstance(value, str | bytes) else value * 2
    return value


@st.composite
def batches(draw: st.DrawFn) -> list[Any]:
    first = draw(samples)
    odd = draw(st.booleans())
    return [first, *(again(first, draw, odd=odd) for _ in range(draw(st.integers(0, 3))))]


# -- our way from samples to a batch -------------------------------------------------------------------------------


def ours(values: list[Any], cuts: list[int]) -> Any:
    """The batch as a loader makes it: rows in parts to their places, or, where some don't fit, the batch as a whole.

    Returns:
        The batch, or the failure.
    """
    shelf = Shelf(numbered(len(values)))
    whole = shelf.task(("cls",), whole=True)
    slots = slots_for(whole)
    maker = BatchMaker(job(fields=("cls",), transform=lambda sample: values[sample[0]], on_error="raise"), slots)
    failed: tuple[RowFailure, ...] = ()
    layout: bytes | None = None
    values_so_far: list[list[Any]] = []
    for start, end in pairwise(sorted({0, len(values), *(cut for cut in cuts if cut < len(values))})):
        plain = shelf.task(("cls",), list(range(start, end)), capacity=len(values))
        (done,) = maker.run(
            plain._replace(pieces=(Piece(0, 0, start, end - start, start << 16),)),
            shelf,
            [-1],
        ).pieces
        failed = failed or done.failures
        if done.layout_mismatch or failed:
            break
        if done.layout is not None:
            layout = done.layout
            maker.fix_layout(layout)
        columns = values_of(done, slots)
        values_so_far = [[*one, *more] for one, more in zip(values_so_far or [[]] * len(columns), columns, strict=True)]
    else:
        return batch_of(PieceDone(Piece(0, 0, 0, len(values))), slots, layout, values_so_far)
    if failed:
        return failed[0]
    (done,) = maker.run(whole, shelf, [-1]).pieces
    return done.failures[0] if done.failures else batch_of(done, slots)


def torchs(values: list[Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arrays that cannot be written to
            return default_collate(values)
    except Exception as error:
        return error


@settings(max_examples=150, deadline=None)
@given(values=batches(), cuts=st.lists(st.integers(1, 3), max_size=2))
@example(values=[[], []], cuts=[])
@example(values=[{}, {"a": 1}], cuts=[1])
@example(values=[{"a": 1}, {"a": 1, "b": 2}], cuts=[1])
@example(values=[["a"], [None]], cuts=[1])
@example(values=["a", 1], cuts=[1])
@example(values=[True, 2], cuts=[])
@example(values=[np.zeros(()), np.float64(1)], cuts=[])
@example(values=[1, 2**63], cuts=[])
@example(values=[[np.zeros(2), "a"], [np.zeros(2), "b"], [np.zeros(3), "c"]], cuts=[2])
@example(values=[{"boxes": np.zeros((2, 4))}, {"boxes": np.zeros((0, 4))}], cuts=[1])
def test_batches_of_any_samples_are_torchs(values: list[Any], cuts: list[int]) -> None:
    assume(all(value is not None for value in values))  # that is a transform without a `return`, and is told as that
    theirs, found = torchs(values), ours(values, cuts)
    if find_missing_key(Rows(len(values), values)) is not None:
        assert isinstance(found, RowFailure), "torch raises or drops what the first sample does not have"
        assert "it has no key" in found.message
    elif isinstance(theirs, Exception):
        assert isinstance(found, RowFailure), f"torch refuses it ({theirs}), and we gave {found}"
        assert found.kind == "CollateError"
    else:
        assert not isinstance(found, RowFailure), f"torch makes {theirs} of it, and we refuse it: {found.message}"
        assert_same(found, theirs)


@settings(max_examples=60, deadline=None)
@given(value=samples, depth=st.lists(st.sampled_from(["dict", "list", "box"]), max_size=3))
def test_what_torch_refuses_is_named(value: Any, depth: list[str]) -> None:
    """A field that no tensor can be made of: the error says where in the sample it is."""
    assume(isinstance(torchs([value]), Exception) is False)
    bad: Any = None
    place = ""
    for kind in depth:
        bad = {"dict": {"fine": 1, "bad": bad}, "list": ["fine", bad], "box": Box(0, bad)}[kind]
        place = {"dict": "['bad']", "list": "[1]", "box": "[1]"}[kind] + place
    found = ours([(1, bad, value)] * 2, [])
    assert isinstance(found, RowFailure)
    assert f"hold None in [1]{place}, of which no tensor is made" in found.message
