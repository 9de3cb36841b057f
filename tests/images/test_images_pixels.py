"""Operations that move or convert pixels, and what every operation refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from photo import called, photo, rng

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

PHOTO = photo(90, 120)


def test_random_crop_reaches_every_place_and_pads_with_zeros() -> None:
    image = np.arange(1, 13, dtype=np.uint8).reshape(3, 4, 1)
    generator, seen = rng(), set()
    for _ in range(300):
        part = RandomCrop((2, 3), padding=1)(image, rng=generator)
        assert part.shape == (2, 3, 1)
        seen.add(part.tobytes())
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    assert seen == {padded[y : y + 2, x : x + 3].tobytes() for y in range(4) for x in range(4)}
    with pytest.raises(ValueError, match=r"3 x 4.*6 x 6.*padding"):
        RandomCrop(6, padding=1)(image, rng=generator)


def test_flip_happens_as_often_as_requested() -> None:
    mirrored = PHOTO[:, ::-1]
    generator = rng()
    outcomes = [RandomHorizontalFlip(0.3)(PHOTO, rng=generator) for _ in range(400)]
    flips = sum(np.array_equal(outcome, mirrored) for outcome in outcomes)
    assert sum(np.array_equal(outcome, PHOTO) for outcome in outcomes) == 400 - flips
    assert 80 < flips < 160
    assert RandomHorizontalFlip(1.0)(PHOTO, rng=generator).flags.c_contiguous
    np.testing.assert_array_equal(RandomHorizontalFlip(1)(PHOTO, rng=generator), mirrored)
    np.testing.assert_array_equal(RandomHorizontalFlip(0)(PHOTO, rng=generator), PHOTO)


def test_to_float_is_a_view_that_makes_channels_last_batches() -> None:
    got = ToFloat()(PHOTO)
    assert got.shape == (3, 90, 120)
    assert got.dtype == np.float32
    assert got.transpose(1, 2, 0).flags.c_contiguous
    np.testing.assert_array_equal(got, (PHOTO.astype(np.float32) / np.float32(255)).transpose(2, 0, 1))
    assert ToFloat()(PHOTO.transpose(1, 0, 2)).transpose(1, 2, 0).flags.c_contiguous


def test_normalize_takes_floats_and_bytes() -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    floats = ToFloat()(PHOTO)
    kept = floats.copy()
    got = Normalize(mean, std)(floats)
    np.testing.assert_array_equal(floats, kept)
    expected = (PHOTO / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(got, expected.transpose(2, 0, 1), atol=1e-5)
    np.testing.assert_array_equal(Normalize(mean, std)(PHOTO), got)
    np.testing.assert_array_equal(Normalize(mean, std)(np.ascontiguousarray(floats)), got)
    assert got.dtype == np.float32
    assert got.transpose(1, 2, 0).flags.c_contiguous


ALL: list[Any] = [RandomResizedCrop(9), Resize(9), CenterCrop(9), RandomHorizontalFlip(), RandomCrop(9), ToFloat()]


@pytest.mark.parametrize("operation", ALL)
def test_no_operation_changes_its_argument_or_needs_it_contiguous(operation: Any) -> None:
    frozen = PHOTO.copy()
    frozen.flags.writeable = False
    strided = np.repeat(PHOTO, 2, axis=1)[:, ::2]
    for image in (frozen, strided):
        np.testing.assert_array_equal(called(operation, image), called(operation, PHOTO))


@pytest.mark.parametrize("operation", [Resize((90, 120)), CenterCrop((90, 120)), CenterCrop(20), RandomCrop((90, 120))])
def test_results_share_no_memory_with_the_argument(operation: Any) -> None:
    assert not np.shares_memory(called(operation, PHOTO), PHOTO)


@pytest.mark.parametrize("operation", ALL)
def test_operations_name_what_they_were_given(operation: Any) -> None:
    name = type(operation).__name__
    with pytest.raises(TypeError, match=f"{name}.*float64"):
        called(operation, PHOTO / 2)
    with pytest.raises(TypeError, match=f"{name}.*float32"):  # as ToFloat makes it, with channels first
        called(operation, ToFloat()(PHOTO))
    with pytest.raises(TypeError, match=f"{name}.*list"):
        called(operation, [1])
    for wrong in (PHOTO[0, :, 0], PHOTO[:, :, None], PHOTO[:, :, :2], PHOTO[:0]):
        with pytest.raises(ValueError, match=f"{name}.*height, width, channels"):
            called(operation, wrong)


def test_numpys_numbers_are_sizes() -> None:
    five: Any = np.int64(5)
    ten: Any = np.int64(10)
    half: Any = np.float32(0.5)
    one: Any = np.int8(1)
    assert RandomResizedCrop((five, ten))(PHOTO, np.random.default_rng(0)).shape == (5, 10, 3)
    assert Resize(five, max_size=ten) == Resize(5, max_size=10)
    assert Resize(five)(PHOTO).shape == Resize(5)(PHOTO).shape
    assert RandomCrop(five, padding=one) == RandomCrop(5, padding=1)
    assert RandomHorizontalFlip(half) == RandomHorizontalFlip(0.5)


def test_normalize_names_what_it_was_given() -> None:
    with pytest.raises(TypeError, match=r"Normalize.*float64"):
        Normalize([0.5], [0.5])(np.zeros((1, 2, 2)))  # type: ignore[arg-type]
    number: Any = 0.5
    with pytest.raises(TypeError, match=r"Normalize.*one for each channel, not mean=0.5"):
        Normalize(number, number)
    with pytest.raises(ValueError, match="Normalize has 1 channels"):
        Normalize([0.5], [0.5])(PHOTO)
    with pytest.raises(ValueError, match=r"Normalize.*\(3, 4\)"):
        Normalize([0.5] * 3, [0.5] * 3)(np.zeros((3, 4), np.float32))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RandomResizedCrop(0), "size must be a positive integer.*0"),
        (lambda: RandomResizedCrop((5, 5, 5)), "size"),  # type: ignore[arg-type]
        (lambda: RandomResizedCrop(5, scale=(0.5, 1.5)), r"scale must be .* <= 1, not \(0.5, 1.5\)"),
        (lambda: RandomResizedCrop(5, scale=(0.0, 1.0)), "scale"),
        (lambda: RandomResizedCrop(5, scale=(0.9, 0.1)), "scale"),
        (lambda: RandomResizedCrop(5, ratio=(0.0, 1.0)), "ratio must be"),
        (lambda: RandomResizedCrop(5, ratio=(1.0, math.inf)), "ratio must be"),
        (lambda: RandomResizedCrop(5, ratio=(math.nan, 1.0)), "ratio must be"),
        (lambda: RandomResizedCrop(5, interpolation="cubic"), "interpolation must be one of.*'cubic'"),  # type: ignore[arg-type]
        (lambda: Resize(-3), "size"),
        (lambda: Resize(True), "size"),
        (lambda: Resize((5, 6), max_size=7), "max_size"),
        (lambda: Resize(5, max_size=5), "max_size must be an integer above"),
        (lambda: CenterCrop("5"), "size"),  # type: ignore[arg-type]
        (lambda: RandomCrop(5, padding=-1), "padding"),
        (lambda: RandomHorizontalFlip(1.5), "p must be a probability"),
        (lambda: Normalize([0.5], [0.5, 0.5]), "one for each channel"),
        (lambda: Normalize([0.5], [0.0]), "std above 0"),
        (lambda: Normalize([math.nan], [1.0]), "finite"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_compose_refuses_what_cannot_be_called() -> None:
    for wrong in ([5], Resize(5)):
        with pytest.raises(TypeError, match="operations must be a list of callables"):
            Compose(wrong)  # type: ignore[arg-type]
