"""Columns of one field: equal to decoding sample by sample, or declined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decoded_fields import ARRAYS, assert_same, decode, npy_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamload.decode.columns import StoredRows
from streamload.decode.field_reader import decode_integers, shared_npy_layout


def shard_of(members: list[bytes], gap: int = 7) -> tuple[Any, Any, Any]:
    """The members in a shard with foreign bytes between, and where they are."""
    data, offsets = b"9" * 30, []
    for member in members:
        offsets.append(len(data))
        data += member + b"-" * gap
    sizes = [len(member) for member in members]
    return np.frombuffer(data, np.uint8), np.array(offsets, np.int64), np.array(sizes, np.int64)


def decode_column(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[Any] | None:
    """The fast way of whichever kind the field is."""
    layout = shared_npy_layout(field, data, offsets, sizes)
    if layout is None:
        return decode_integers(field, data, offsets, sizes)
    shards = np.zeros(len(offsets), np.int32)
    out = np.empty((len(offsets), *layout.shape), layout.dtype)
    StoredRows(layout.dtype, layout.shape, shards, offsets + layout.start, {0: data}).copy_to(out)
    return out


def one_by_one(field: str, members: list[bytes]) -> list[Any] | None:
    try:
        return [decode(field, member) for member in members]
    except ValueError:
        return None


INTEGER_TEXTS = st.one_of(
    st.integers(-(10**18) + 1, 10**18 - 1).map(lambda n: str(n).encode()),
    st.integers(0, 99).map(lambda n: str(n).encode()),
    st.binary(max_size=3),
    st.sampled_from([b"-", b"-0", b"007", b" 1", b"1\n", b"+1", b"1_0", b"1" * 19]),
)


@settings(deadline=None, max_examples=200)
@given(members=st.lists(INTEGER_TEXTS, max_size=6), shuffle=st.randoms())
def test_integer_columns_equal_single_decoding(members: list[bytes], shuffle: Any) -> None:
    data, offsets, sizes = shard_of(members)
    order = shuffle.sample(range(len(members)), len(members))
    got = decode_column("cls", data, offsets[order], sizes[order])
    if got is not None:
        assert got.dtype == np.int64
        assert got.tolist() == one_by_one("cls", [members[number] for number in order])


@given(numbers=st.lists(st.integers(-(10**16), 10**16), min_size=1, max_size=8))
def test_integer_columns_take_the_fast_way_for_plain_numbers(numbers: list[int]) -> None:
    got = decode_column("label.cls", *shard_of([str(number).encode() for number in numbers]))
    assert got is not None
    assert got.tolist() == numbers


@settings(deadline=None, max_examples=150)
@given(array=ARRAYS, others=st.integers(0, 3), other=ARRAYS, tail=st.sampled_from([b"", b"\0", b"abc"]))
def test_npy_columns_equal_single_decoding(array: NDArray[Any], others: int, other: NDArray[Any], tail: bytes) -> None:
    members = [npy_bytes(array) + tail] * 2 + [npy_bytes(other)] * others
    data, offsets, sizes = shard_of(members)
    got = decode_column("npy", data, offsets, sizes)
    if got is None:
        assert (
            len(set(sizes.tolist())) > 1
            or array.dtype != other.dtype
            or array.shape != other.shape
            or (array.flags.f_contiguous and not array.flags.c_contiguous)
        )
        return
    singles = [decode("npy", member) for member in members]
    assert len(got) == len(singles)
    for row, single in enumerate(singles):
        assert_same(got[row, ...], single)


def test_npy_columns_gather_in_the_order_requested_and_own_their_memory() -> None:
    arrays = [np.full((4, 3), number, np.float32) for number in range(5)]
    data, offsets, sizes = shard_of([npy_bytes(array) for array in arrays])
    data = data.copy()
    order = [3, 0, 4]
    got = decode_column("npy", data, offsets[order], sizes[order])
    data[:] = 0
    assert got is not None
    np.testing.assert_array_equal(got, np.stack([arrays[number] for number in order]))


def test_columns_decline_what_they_cannot_do() -> None:
    plain = npy_bytes(np.zeros((2, 3), np.uint8))
    other_header = npy_bytes(np.zeros((3, 2), np.uint8))
    column_major = npy_bytes(np.zeros((2, 3), np.uint8, order="F"))
    for field, members in (
        ("npy", [plain, other_header]),
        ("npy", [column_major, column_major]),
        ("npy", [plain[:-1], plain[:-1]]),
        ("bin", [b"1", b"2"]),
        ("cls.gz", [b"1", b"2"]),
        ("cls", [b"1", b""]),
    ):
        assert decode_column(field, *shard_of(members)) is None, field


@pytest.mark.parametrize(("field", "member"), [("npy", npy_bytes(np.zeros((2, 3), np.uint8))), ("cls", b"12")])
def test_columns_decline_what_lies_outside_the_shard(field: str, member: bytes) -> None:
    data, offsets, sizes = shard_of([member, member], gap=0)
    assert decode_column(field, data, offsets, sizes) is not None
    assert decode_column(field, data, offsets[:0], sizes[:0]) is None
    for shift in (-len(data), -10_000, 1, 10_000):  # NumPy would count -len(data) from the end, to valid bytes
        beyond = np.array([offsets[0], offsets[1] + shift])
        assert decode_column(field, data, beyond, sizes) is None
        assert decode_column(field, data, offsets + shift * len(data), sizes) is None
    assert decode_column(field, data, offsets - len(data), sizes) is None
    assert decode_column(field, data, np.array([-1]), np.array([-1])) is None


def test_integers_that_may_not_fit_are_left_to_single_decoding() -> None:
    for text in (b"9" * 19, b"9" * 30):
        assert decode_column("cls", *shard_of([text, text])) is None


def test_a_short_integer_at_the_very_start_of_a_shard_is_not_read_from_before_it() -> None:
    data = np.frombuffer(b"123", np.uint8)
    assert decode_column("cls", data, np.array([0, 1]), np.array([1, 2])) is None
    got = decode_column("cls", data, np.array([1, 0]), np.array([1, 1]))
    assert got is not None
    assert got.tolist() == [2, 1]


@pytest.mark.parametrize("length", [3, 1024], ids=["copied together", "copied row by row"])
def test_stored_rows_are_copied_in_order_from_several_shards(length: int) -> None:
    arrays = [np.full(length, number, np.uint16) for number in range(6)]
    memory, starts = {}, {}
    for shard in (4, 9):
        data, offsets, sizes = shard_of([npy_bytes(array) for array in arrays])
        layout = shared_npy_layout("npy", data, offsets, sizes)
        assert layout is not None
        memory[shard], starts[shard] = data + np.uint8(0), offsets + layout.start
    picks = [(4, 3), (9, 0), (4, 1), (9, 5)]
    rows = StoredRows(
        np.dtype(np.uint16),
        (length,),
        np.array([shard for shard, _ in picks], np.int32),
        np.array([starts[shard][row] for shard, row in picks]),
        memory,
    )
    out = np.full((6, length), 9, np.uint16)
    rows.copy_to(out[1:5])
    assert out[:, 0].tolist() == [9, 3, 0, 1, 5, 9]
    assert (out == out[:, :1]).all()
    assert rows[1].tolist() == [0] * length
    assert [int(rows.take([3, 0])[row][0]) for row in range(2)] == [5, 3]
    assert [int(rows.slice(2, 4)[row][0]) for row in range(2)] == [1, 5]
    for data in memory.values():
        data[:] = 0
    assert out[:, 0].tolist() == [9, 3, 0, 1, 5, 9], "what was copied owns its memory"
