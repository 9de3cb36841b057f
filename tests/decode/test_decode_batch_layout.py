"""Whatever nest a `collate_fn` returns comes out of the slot as it went in."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from streamload.decode.batch_layout import Layout, ValueLeaf, describe_batch, describe_rows, slot_views
from streamload.decode.collate import build_batch
from streamload.decode.values import ValueBlock, load_values


class Pair(NamedTuple):
    image: Any
    label: Any


Named = namedtuple("Named", "a b")


class Oddity:
    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Oddity) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def through_a_slot(batch: Any) -> tuple[Any, Layout]:
    """What the trainer gets of a batch that a worker lays down; the layout travels as a pickle."""
    layout, arrays, columns = describe_batch(batch)
    values, start = ValueBlock(columns), layout.offsets()[1]
    memory = np.full(start + values.size_bytes, 0xAB, np.uint8)
    for view, array in zip(slot_views(layout, memory, None), arrays, strict=True):
        view[...] = array
    sent: Layout = pickle.loads(pickle.dumps(layout))
    return build_batch(sent, memory, None, load_values(values.write(memory, start), memory)), layout


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert torch.equal(ours.detach(), theirs.detach())
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


BATCHES: dict[str, Any] = {
    "a tensor": torch.arange(6).reshape(2, 3),
    "an array stays an array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "one number": 7,
    "None": None,
    "a scalar array": np.array(3.5),
    "a scalar tensor": torch.tensor(3),
    "nothing in it": {},
    "empty arrays": (np.zeros((0, 3)), torch.zeros(2, 0)),
    "nested": {"x": [torch.zeros(2), (1, "text", {"y": np.ones(3, np.int16)})], "z": None},
    "a tuple": (torch.zeros(2), torch.ones(3)),
    "a list": [torch.zeros(2), torch.ones(3)],
    "named tuples": Pair(torch.zeros(2), Named(np.ones(2), "b")),
    "numbers as keys": {1: torch.zeros(1), None: 2},
    "bfloat16": torch.tensor([1.5, 2.5]).to(torch.bfloat16),
    "float8": torch.tensor([1.5, 2.0]).to(torch.float8_e5m2),
    "bools": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "expanded": torch.zeros(1, 3).expand(4, 3),
    "reversed": np.arange(5)[::-1],
    "strings": ["a", "b"],
    "an array of strings": np.array(["a", "bc"]),
    "an array of objects": np.array([None, 1]),
    "a structured array": np.zeros(2, [("x", "i4")]),
    "long doubles": np.ones(2, np.longdouble),
    "big-endian": np.arange(3, dtype=">i4"),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "NumPy scalars": [np.float32(1), np.int64(2)],
    "an object": Oddity(3),
    "another mapping": OrderedDict(a=torch.zeros(2)),
    "a set": {1, 2},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_it_comes_out_as_it_went_in(batch: Any) -> None:
    assert_same(through_a_slot(batch)[0], batch)


def test_masked_arrays_keep_their_mask() -> None:
    came, _ = through_a_slot({"m": np.ma.masked_array([1.0, 2.0], [True, False])})
    assert came["m"].mask.tolist() == [True, False]


def test_a_sparse_tensor_goes_beside() -> None:
    came, layout = through_a_slot(torch.eye(3).to_sparse())
    assert layout.arrays == ()
    assert torch.equal(came.to_dense(), torch.eye(3))


def test_a_parameter_stays_a_parameter() -> None:
    came, _ = through_a_slot(torch.nn.Parameter(torch.ones(2)))
    assert isinstance(came, torch.nn.Parameter)


def test_arrays_and_tensors_in_plain_nests_go_to_the_slot_and_nothing_else() -> None:
    _, layout = through_a_slot({"a": torch.zeros(2), "b": [np.zeros(3), "text", 4], "c": Pair(torch.ones(1), None)})
    assert len(layout.arrays) == 3
    assert layout.value_columns == 2


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 4, dtype=torch.bfloat16).permute(2, 0, 1),
        torch.zeros(3, 4).T,
    ],
    ids=["channels_last", "permuted", "transposed"],
)
def test_dense_tensors_keep_their_order_in_memory(batch: torch.Tensor) -> None:
    assert through_a_slot(batch)[0].stride() == batch.stride()


def test_arrays_keep_their_order_in_memory() -> None:
    assert through_a_slot(np.asfortranarray(np.arange(6).reshape(2, 3)))[0].flags.f_contiguous


def test_a_named_tuple_class_that_only_the_user_has_comes_back() -> None:
    came, _ = through_a_slot(Pair(1, 2))
    assert type(came) is Pair


def test_a_layout_of_rows_has_one_leaf_a_value() -> None:
    layout = describe_rows({"image": np.zeros((4, 5, 3), np.uint8), "label": 3, "key": "a", "both": [True, b"x"]})
    assert [(leaf.dtype, leaf.shape) for leaf in layout.arrays] == [("|u1", (4, 5, 3)), ("<i8", ()), ("|b1", ())]
    assert layout.value_columns == 2
    assert layout.capacity == 1


def test_capacity_sets_the_size_and_nothing_else() -> None:
    layout = describe_rows(np.zeros(100, np.uint8))
    assert layout.with_capacity(7).offsets() == ([0], 704)
    assert layout.with_capacity(7).tree == layout.tree


def test_describing_rows_does_not_look_at_strings() -> None:
    layout = describe_rows("text")
    assert layout.tree == ValueLeaf(0)
    assert layout.offsets() == ([], 0)


def test_refusals_name_the_class_and_what_to_do() -> None:
    with pytest.raises(
        TypeError, match=r"got test_decode_batch_layout\.Oddity\. Convert it in a transform, or give a collate"
    ):
        describe_rows({"a": [Oddity(1)]})
    with pytest.raises(TypeError, match="cannot collate arrays of dtype object; convert them in a transform"):
        describe_rows(np.array([None]))


def test_tensors_elsewhere_than_in_memory_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dense CPU tensors, got .* on meta"):
        describe_rows(torch.zeros(2, device="meta"))
