"""Collating rows into a slot gives what torch's `default_collate` gives, and refuses what it refuses."""

from __future__ import annotations

import collections
import enum
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from same_batches import assert_same
from torch.utils.data import default_collate

from streamload.decode.batch_layout import describe_rows
from streamload.decode.collate import LayoutMismatchError, build_batch, choose_rows, torch_collate, write_rows
from streamload.decode.columns import Rows


class Point(NamedTuple):
    x: Any
    y: Any


Untyped = namedtuple("Untyped", ["only"])


def laid_out(values: list[Any], *, capacity: int | None = None, cuts: tuple[int, ...] = ()) -> Any:
    """The batch that comes out of a slot into which rows were written, in several parts where there are cuts."""
    layout = describe_rows(values[0]).with_capacity(capacity or len(values))
    memory = np.full(layout.offsets()[1] + 64, 0xAB, np.uint8)
    values_of_rows: list[list[Any]] = [[] for _ in range(layout.value_columns)]
    edges = sorted({0, len(values), *(cut for cut in cuts if 0 < cut < len(values))})
    for start, end in pairwise(edges):
        for whole, part in zip(values_of_rows, write_rows(layout, Rows(end - start, values[start:end]), memory, start)):
            whole.extend(part)
    assert (memory[-64:] == 0xAB).all(), "nothing is written behind what the layout asks for"
    return build_batch(layout, memory, len(values), values_of_rows)


# -- against torch, for any nest -----------------------------------------------------------------------------------

ARRAY_DTYPES = ["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
TENSOR_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]

shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def fortran(value: np.ndarray[Any, Any]) -> Any:
    return np.asfortranarray(value)


def last_axis_first(value: np.ndarray[Any, Any]) -> Any:
    return np.moveaxis(value, -1, 0) if value.ndim else value


def every_other(value: np.ndarray[Any, Any]) -> Any:
    return np.repeat(value, 2, axis=0)[::2] if value.ndim else value


@st.composite
def array_leaves(draw: st.DrawFn) -> st.SearchStrategy[Any]:
    dtype, shape = draw(st.sampled_from(ARRAY_DTYPES)), draw(shapes)
    order = draw(st.sampled_from([lambda value: value, fortran, last_axis_first, every_other]))
    return npst.arrays(dtype, shape).map(order)


@st.composite
def tensor_leaves(draw: st.DrawFn) -> st.SearchStrategy[Any]:
    dtype, shape = draw(st.sampled_from(TENSOR_DTYPES)), draw(shapes)
    axes = draw(st.permutations(range(len(shape))))
    values = npst.arrays("i4", shape, elements=st.integers(0, 200))
    return values.map(lambda array: torch.from_numpy(array).to(dtype).permute(tuple(axes)))


scalar_leaves = st.sampled_from(
    [
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.integers(0, 255).map(np.uint8),
        st.integers(-5, 5).map(np.int64),
        st.integers(-5, 5).map(np.float32),
        st.integers(-5, 5).map(np.float64),
        st.booleans().map(np.bool_),
    ]
)


def mappings(kind: type, parts: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Mappings whose keys are always in the same order."""
    return st.tuples(*parts.values()).map(lambda values: kind(zip(parts, values, strict=True)))


def nests(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(0, 9)
    return st.one_of(
        st.dictionaries(keys, children, max_size=3).map(lambda parts: mappings(dict, parts)),
        st.dictionaries(keys, children, max_size=3).map(lambda parts: mappings(OrderedDict, parts)),
        st.lists(children, max_size=3).map(lambda parts: st.tuples(*parts)),
        st.lists(children, max_size=3).map(lambda parts: st.tuples(*parts).map(list)),
        st.tuples(children, children).map(lambda parts: st.tuples(*parts).map(lambda pair: Point(*pair))),
        children.map(lambda part: part.map(Untyped)),
    )


schemas = st.recursive(scalar_leaves | array_leaves() | tensor_leaves(), nests, max_leaves=5)
"""Strategies of rows: every row drawn from one of them has the same nest, dtypes and shapes."""

batches = schemas.flatmap(lambda rows: st.lists(rows, min_size=1, max_size=5))


@settings(max_examples=100, deadline=None)
@given(values=batches, cuts=st.lists(st.integers(0, 5), max_size=3), spare=st.integers(0, 3))
def test_rows_come_out_as_torch_would_collate_them(values: list[Any], cuts: list[int], spare: int) -> None:
    ours = laid_out(values, capacity=len(values) + spare, cuts=tuple(cuts))
    assert_same(ours, default_collate(values))


@settings(max_examples=50, deadline=None)
@given(values=batches, data=st.data())
def test_chosen_rows_come_out_as_torch_would_collate_them(values: list[Any], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=5))
    layout = describe_rows(values[0]).with_capacity(len(values))
    memory = np.zeros(layout.offsets()[1], np.uint8)
    values_of_rows = write_rows(layout, Rows(len(values), values), memory, 0)
    ours = build_batch(layout, memory, len(values), values_of_rows, chosen)
    assert_same(ours, default_collate([values[row] for row in chosen]))


# -- the memory itself ---------------------------------------------------------------------------------------------


def test_a_batch_views_the_slot_without_a_copy() -> None:
    layout = describe_rows({"image": np.zeros((2, 3), np.uint8), "label": 1}).with_capacity(2)
    memory = np.zeros(layout.offsets()[1], np.uint8)
    write_rows(layout, Rows(2, [{"image": np.zeros((2, 3), np.uint8), "label": 1}] * 2), memory, 0)
    batch = build_batch(layout, memory, 2, [])
    memory[:] = 1
    assert batch["image"].tolist() == [[[1] * 3] * 2] * 2
    assert batch["label"].tolist() == [0x0101010101010101] * 2


def test_images_that_are_viewed_as_chw_become_a_channels_last_tensor() -> None:
    images = [np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3) + number for number in range(2)]
    batch = laid_out([image.transpose(2, 0, 1) for image in images])
    assert batch.shape == (2, 3, 4, 5)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert np.array_equal(batch.numpy().transpose(0, 2, 3, 1), np.stack(images))


def test_tensors_that_are_viewed_as_chw_become_a_channels_last_tensor() -> None:
    image = torch.arange(60, dtype=torch.bfloat16).reshape(4, 5, 3)
    batch = laid_out([image.permute(2, 0, 1)] * 2)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert_same(batch, default_collate([image.permute(2, 0, 1)] * 2))


def test_arrays_that_run_backwards_come_out_by_value() -> None:
    """torch refuses them; there is no reason to."""
    assert laid_out([np.arange(3)[::-1], np.arange(3)[::-1]]).tolist() == [[2, 1, 0]] * 2


def test_arrays_begin_at_aligned_addresses() -> None:
    layout = describe_rows([np.uint8(1), np.zeros(3, np.uint8), 1.5, "s", np.zeros(0, "f4"), 2]).with_capacity(3)
    starts, size_bytes = layout.offsets()
    assert [start % 64 for start in starts] == [0] * 5
    assert starts == sorted(starts)
    assert size_bytes <= 5 * 64


def test_rows_beyond_those_written_are_not_shown() -> None:
    assert laid_out([1, 2], capacity=5).tolist() == [1, 2]


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8"])
def test_unsigned_arrays_keep_their_dtype(dtype: str) -> None:
    values = [np.array([1, 2], dtype), np.array([3, 4], dtype)]
    batch = laid_out(values)
    assert batch.dtype == torch.from_numpy(values[0]).dtype
    assert batch.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([1.0], requires_grad=True),
        torch.tensor(1.5).expand(3, 2),
        torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn),
        torch.tensor(2.0, dtype=torch.bfloat16),
    ],
    ids=["conjugate", "negative", "with gradient", "expanded", "float8", "bfloat16 scalar"],
)
def test_unusual_tensors_come_out_by_value(tensor: torch.Tensor) -> None:
    batch = laid_out([tensor, tensor])
    assert batch.dtype == tensor.dtype
    assert batch.shape == (2, *tensor.shape)
    assert (
        batch.float().tolist() == [tensor.float().tolist()] * 2
        if not tensor.is_complex()
        else torch.equal(batch[1], tensor)
    )
    assert not batch.requires_grad


# -- columns -------------------------------------------------------------------------------------------------------


def test_columns_come_out_as_their_rows_would() -> None:
    columns = [np.arange(12, dtype=np.float32).reshape(4, 3), [5, 6, 7, 8], ["a", "b", "c", "d"]]
    rows = Rows(4, columns=columns)
    layout = describe_rows(rows.row(0)).with_capacity(4)
    memory = np.zeros(layout.offsets()[1], np.uint8)
    texts = write_rows(layout, rows, memory, 0)
    assert_same(build_batch(layout, memory, 4, texts), default_collate([rows.row(number) for number in range(4)]))


@pytest.mark.parametrize("kind", [dict, tuple])
def test_rows_can_be_sliced_and_taken_in_either_form(kind: type) -> None:
    keys = ("a", "b") if kind is dict else ()
    by_column = Rows(4, columns=[np.arange(4), ["w", "x", "y", "z"]], kind=kind, keys=keys)
    by_row = Rows(4, values=by_column.as_list())
    for rows in (by_column, by_row):
        assert rows.slice(1, 3).as_list() == by_row.values[1:3]  # type: ignore[index]
        assert rows.slice(1, 3).count == 2
        taken = rows.take([3, 3, 0])
        assert taken.count == 3
        assert taken.as_list() == [by_row.row(3), by_row.row(3), by_row.row(0)]
    assert by_column.row(2) == ({"a": 2, "b": "y"} if kind is dict else (2, "y"))


# -- what does not fit ---------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[Any, Any]] = {
    "another shape": (np.zeros(3), np.zeros(4)),
    "another number of axes": (np.zeros(3), np.zeros((1, 3))),
    "another dtype": (np.zeros(3, "f4"), np.zeros(3, "f8")),
    "a scalar of another dtype": (np.float32(1), np.float64(1)),
    "an int among floats": (1.0, 1),
    "a float among ints": (1, 1.0),
    "a bool among ints": (1, True),
    "an int among bools": (True, 1),
    "an int that is too large": (1, 2**63),
    "an int that is too small": (1, -(2**63) - 1),
    "an array among numbers": (1, np.zeros(3, np.int64)),
    "a number among arrays": (np.zeros(()), 1.0),
    "a string among numbers": (1, "1"),
    "a number among strings": ("1", 1),
    "a tensor among arrays of another dtype": (np.zeros(3, "i2"), torch.zeros(3, dtype=torch.bfloat16)),
    "a tensor of a dtype of the same size": (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)),
    "an array among tensors that NumPy lacks": (torch.zeros(3, dtype=torch.bfloat16), np.zeros(3, np.int16)),
    "a missing key": ({"a": 1, "b": 2}, {"a": 1}),
    "a key too many": ({"a": 1}, {"a": 1, "b": 2}),
    "a sequence among mappings": ({"a": 1}, [1]),
    "a mapping among sequences": ([1], {"a": 1}),
    "another mapping": ({"a": 1}, OrderedDict(a=1)),
    "a longer sequence": ((1, 2), (1, 2, 3)),
    "a shorter sequence": ((1, 2), (1,)),
    "a named tuple among tuples": ((1, 2), Point(1, 2)),
    "a tuple among named tuples": (Point(1, 2), (1, 2)),
    "an array among sequences": ([1, 2], np.array([1, 2])),
    "None": (1, None),
    "None among strings": ("a", None),
    "None among mappings": ({"a": 1}, None),
    "an object": (1, object()),
    "a masked array": (np.zeros(2), np.ma.masked_array([1.0, 2.0], [True, False])),
    "an enum": (1, enum.IntEnum("Colour", "RED").RED),
    "big-endian": (np.zeros(2, "<f4"), np.zeros(2, ">f4")),
}


@pytest.mark.parametrize(("first", "other"), MISFITS.values(), ids=MISFITS.keys())
def test_a_row_unlike_the_first_is_a_layout_mismatch(first: Any, other: Any) -> None:
    layout = describe_rows(first).with_capacity(3)
    memory = np.zeros(layout.offsets()[1], np.uint8)
    with pytest.raises(LayoutMismatchError):
        write_rows(layout, Rows(3, [first, other, first]), memory, 0)


@pytest.mark.parametrize(
    ("first", "columns", "kind", "keys"),
    [
        ((np.zeros(3), 1), [np.zeros((2, 4)), [1, 2]], tuple, ()),
        ((np.zeros(3), 1), [np.zeros((2, 3), "f4"), [1, 2]], tuple, ()),
        ((np.zeros(3), 1), [np.zeros((2, 3))], tuple, ()),
        ((np.zeros(3), 1), [np.zeros((2, 3)), np.zeros(2, "f4")], tuple, ()),
        ((np.zeros(3), [1]), [np.zeros((2, 3)), np.zeros(2)], tuple, ()),
        ({"a": 1, "b": 2}, [[1, 2], [3, 4]], dict, ("a", "c")),
        ({"a": 1, "b": 2}, [[1, 2], [3, 4]], tuple, ()),
        ((1, 2), [[1, 2], [3, 4]], dict, ("a", "b")),
        (1, [[1, 2]], tuple, ()),
    ],
)
def test_columns_unlike_the_first_row_are_layout_mismatches(
    first: Any, columns: list[Any], kind: type, keys: tuple[str, ...]
) -> None:
    layout = describe_rows(first).with_capacity(2)
    memory = np.zeros(layout.offsets()[1], np.uint8)
    with pytest.raises(LayoutMismatchError):
        write_rows(layout, Rows(2, columns=columns, kind=kind, keys=keys), memory, 0)


REFUSED: dict[str, Any] = {
    "None": None,
    "an object": object(),
    "None in a dict": {"a": 1, "b": None},
    "an array of objects": np.array([None, 1]),
    "an array of strings": np.array(["a", "b"]),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "a structured array": np.zeros(2, [("x", "i4")]),
    "a set": {1, 2},
    "long doubles": np.zeros(2, np.longdouble),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED.keys())
def test_what_torch_refuses_is_refused(row: Any) -> None:
    with pytest.raises(TypeError):
        default_collate([row, row])
    with pytest.raises(TypeError):
        describe_rows(row)


class Labels(list[Any]):
    pass


@pytest.mark.parametrize(
    "row",
    [
        Labels([1, 2]),
        defaultdict(list, a=1),
        collections.UserDict(a=1),
        collections.UserList([1]),
        range(3),
        enum.IntEnum("Colour", "RED").RED,
        np.str_("text"),
        np.ma.masked_array([1.0, 2.0], [True, False]),
        2**63,
    ],
    ids=lambda row: type(row).__name__,
)
def test_rows_of_unusual_classes_are_left_to_torch_or_come_out_the_same(row: Any) -> None:
    """Whoever collates falls back to torch where `describe_rows` or `write_rows` declines; nothing else may happen."""
    try:
        ours = laid_out([row, row])
    except (TypeError, LayoutMismatchError):
        return
    assert_same(ours, default_collate([row, row]))


def test_torch_collate_is_default_collate() -> None:
    rows = Rows(2, [{"a": np.zeros(2), "b": "x"}, {"a": np.ones(2), "b": "y"}])
    assert_same(torch_collate(rows), default_collate(rows.as_list()))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        torch_collate(Rows(2, [np.zeros(2), np.zeros(3)]))


# -- rows that failed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "failed", "skip", "replace"),
    [
        (4, {}, [0, 1, 2, 3], [0, 1, 2, 3]),
        (4, {1}, [0, 2, 3], [0, 2, 2, 3]),
        (4, {0}, [1, 2, 3], [1, 1, 2, 3]),
        (4, {3}, [0, 1, 2], [0, 1, 2, 0]),
        (4, {1, 2, 3}, [0], [0, 0, 0, 0]),
        (4, {0, 1, 2}, [3], [3, 3, 3, 3]),
        (5, {1, 4}, [0, 2, 3], [0, 2, 2, 3, 0]),
        (2, {0, 1}, [], []),
        (0, {}, [], []),
    ],
)
def test_rows_are_left_out_or_replaced(count: int, failed: set[int], skip: list[int], replace: list[int]) -> None:
    assert choose_rows(count, failed, "skip") == skip
    assert choose_rows(count, failed, "replace") == replace


@given(st.integers(1, 30).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_replacing_keeps_good_rows_in_place_and_uses_only_good_ones(case: tuple[int, set[int]]) -> None:
    count, failed = case
    chosen = choose_rows(count, failed, "replace")
    good = set(range(count)) - failed
    assert set(chosen) == good
    assert len(chosen) == (count if good else 0)
    assert all(chosen[row] == row for row in good)


def collates_alike(make: Callable[[], Any]) -> None:
    assert_same(laid_out([make()]), default_collate([make()]))


def test_empty_nests_stay_empty() -> None:
    for empty in ({}, [], (), {"a": {}}, [[], ()]):
        collates_alike(lambda empty=empty: empty)
