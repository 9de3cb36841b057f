"""Operations write into the array they are offered: the same values, no copy, and nothing where it does not fit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from photo import called, encoded, from_encoded

from streamload.images import (
    CenterCrop,
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
)

NOISE = np.random.default_rng(3).integers(0, 256, (90, 120, 3), dtype=np.uint8)
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

OPERATIONS: list[Any] = [
    RandomResizedCrop(40),
    RandomResizedCrop(40, interpolation="bicubic"),
    Resize((30, 50)),
    Resize((90, 120)),
    Resize(200),
    CenterCrop(60),
    CenterCrop(130),
    RandomCrop(33, padding=2),
    RandomHorizontalFlip(0.0),
    RandomHorizontalFlip(1.0),
    ToFloat(),
    Normalize(MEAN, STD),
    Compose([Resize(50), RandomHorizontalFlip(1.0)]),
    Compose([RandomResizedCrop(40), Compose([ToFloat(), Normalize(MEAN, STD)])]),
    Compose([ToFloat(), Normalize(MEAN, STD)]),
]


def like(expected: NDArray[Any], layout: str) -> NDArray[Any]:
    """An array for results as `expected`, zero, in a memory layout."""
    if layout == "row of a batch":
        batch = np.zeros((4, *expected.transpose(np.argsort(expected.strides)[::-1]).shape), expected.dtype)
        return batch[2].transpose(np.argsort(np.argsort(expected.strides)[::-1]))
    if layout == "contiguous":
        return np.zeros(expected.shape, expected.dtype)
    return np.zeros((*expected.shape[:2], 2 * expected.shape[2]), expected.dtype)[:, ::-1, ::2]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("layout", ["row of a batch", "contiguous", "strided"])
def test_what_fits_is_written_to_and_returned(operation: Any, layout: str) -> None:
    assert operation.writes_into_out is True
    expected = called(operation, NOISE)
    out = like(expected, layout)
    kept = NOISE.copy()
    assert called(operation, NOISE, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(NOISE, kept)
    if layout == "row of a batch":
        assert out.base is not None
        assert not out.base[1].any()
        assert not out.base[3].any()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_does_not_fit_is_left_alone(operation: Any) -> None:
    expected = called(operation, NOISE)
    read_only = np.zeros_like(expected)
    read_only.flags.writeable = False
    wrong: list[Any] = [
        np.zeros((*expected.shape[:2], expected.shape[2] + 1), expected.dtype),
        np.zeros(expected.shape, np.int16),
        np.zeros(expected.shape[:2], expected.dtype),
        read_only,
        None,
    ]
    for out in wrong:
        got = called(operation, NOISE, out=out)
        assert got is not out
        np.testing.assert_array_equal(got, expected)
        assert out is None or not out.any()


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [40, 80, (20, 30)])
def test_from_the_encoded_file_too(file_format: str, size: Any) -> None:
    data = encoded(NOISE, file_format)
    operations: list[Any] = [
        RandomResizedCrop(size),
        Resize(size),
        Compose([RandomResizedCrop(size)]),
        Compose([RandomResizedCrop(size), RandomHorizontalFlip(), ToFloat(), Normalize(MEAN, STD)]),
    ]
    for operation in operations:
        expected = from_encoded(operation, data)
        out = np.zeros_like(expected)
        assert from_encoded(operation, data, out=out) is out
        np.testing.assert_array_equal(out, expected)
        wrong = np.zeros((7, 7, 3), expected.dtype)
        np.testing.assert_array_equal(from_encoded(operation, data, out=wrong), expected)
        assert not wrong.any()


def test_float_and_normalize_in_one_pass_have_the_bits_of_two() -> None:
    shades = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    two = Normalize(MEAN, STD)(ToFloat()(shades).copy())
    chain = Compose([ToFloat(), Normalize(MEAN, STD)])
    np.testing.assert_array_equal(chain(shades), two)
    np.testing.assert_array_equal(Normalize(MEAN, STD)(shades), two)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(chain))(shades), two)
    np.testing.assert_array_equal(
        Normalize(MEAN, STD)(shades.transpose(1, 0, 2)[::-1, ::-1]), two.transpose(0, 2, 1)[:, ::-1, ::-1]
    )
    with pytest.raises(TypeError, match="ToFloat.*float32"):
        chain(two)
    with pytest.raises(ValueError, match="ToFloat.*height, width, channels"):
        chain(shades[:, 0, 0])
    with pytest.raises(ValueError, match=r"3 channels.*got \(1, 16, 16\)"):
        chain(shades[:, :, 0])
