"""Image operations: equal to Pillow's and torchvision's, deterministic, and strict about what they are given."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from photo import called, encoded, from_encoded, photo, rng
from PIL import Image

from streamload import images
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
NOISE = np.random.default_rng(3).integers(0, 256, (50, 70, 3), dtype=np.uint8)


def decoded(data: bytes) -> NDArray[np.uint8]:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def by_pillow(pixels: NDArray[np.uint8], size: tuple[int, int], name: str) -> NDArray[np.uint8]:
    return np.array(Image.fromarray(pixels).resize(size[::-1], Image.Resampling[name.upper()]))


def draw_crop(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], generator: np.random.Generator
) -> tuple[float, float, float, float]:
    return RandomResizedCrop(1, scale, ratio).window(height, width, generator).box


# resampling


@pytest.mark.parametrize("interpolation", ["nearest", "box", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(20, 30), (50, 71), (120, 140), (50, 70)])
def test_resize_equals_pillow(size: tuple[int, int], interpolation: Any) -> None:
    got = Resize(size, interpolation=interpolation)(NOISE)
    np.testing.assert_array_equal(got, by_pillow(NOISE, size, interpolation))
    assert got.flags.writeable


@pytest.mark.parametrize("channels", [1, 4])
def test_resize_treats_all_channels_alike(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (31, 29, channels), dtype=np.uint8)
    got = Resize((13, 17))(image)
    assert got.shape == (13, 17, channels)
    for channel in range(channels):
        alone = Resize((13, 17))(np.ascontiguousarray(image[:, :, channel : channel + 1]))
        np.testing.assert_array_equal(got[:, :, channel : channel + 1], alone)


def test_resize_scales_the_shorter_side_to_an_integer() -> None:
    assert Resize(45)(PHOTO).shape == (45, 60, 3)
    assert Resize(45)(PHOTO.transpose(1, 0, 2)).shape == (60, 45, 3)
    assert Resize(40)(PHOTO).shape == (40, 53, 3)  # 53.3, rounded down
    assert Resize(45, max_size=50)(PHOTO).shape == (37, 50, 3)
    assert Resize(45, max_size=61)(PHOTO).shape == (45, 60, 3)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), size=st.integers(1, 60))
def test_random_resized_crop_is_a_crop_and_then_a_resize(seed: int, size: int) -> None:
    box = draw_crop(50, 70, (0.08, 1.0), (3 / 4, 4 / 3), rng(seed))
    top, left, height, width = (int(edge) for edge in box)
    part = np.ascontiguousarray(NOISE[top : top + height, left : left + width])
    got = RandomResizedCrop(size, interpolation="bicubic")(NOISE, rng=rng(seed))
    np.testing.assert_array_equal(got, by_pillow(part, (size, size), "bicubic"))
    np.testing.assert_array_equal(RandomResizedCrop(size)(NOISE, rng=rng(seed)), Resize((size, size))(part))


SIDES = st.integers(1, 400)


@settings(deadline=None)
@given(
    height=SIDES,
    width=SIDES,
    scale=st.tuples(st.floats(0.05, 1.0), st.floats(0.05, 1.0)).map(lambda pair: (min(pair), max(pair))),
    ratio=st.tuples(st.floats(0.3, 3), st.floats(0.3, 3)).map(lambda pair: (min(pair), max(pair))),
    seed=st.integers(0, 2**32),
)
def test_crops_lie_inside_and_have_the_area_and_ratio_requested(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], seed: int
) -> None:
    top, left, rows, columns = draw_crop(height, width, scale, ratio, rng(seed))
    assert rows >= 1
    assert columns >= 1
    assert 0 <= top <= height - rows
    assert 0 <= left <= width - columns
    # Sides are rounded, which moves the ratio within these bounds; an image of one row may leave no choice.
    assert columns <= (rows + 0.5) * ratio[1] + 0.5 or columns == 1
    assert columns + 0.5 >= (rows - 0.5) * ratio[0] - 0.5 or rows == 1
    central = (top, left) == ((height - rows) // 2, (width - columns) // 2)
    least, most = ((rows + sign * 0.5) * (columns + sign * 0.5) for sign in (-1, 1))
    assert central or (least <= scale[1] * height * width and most >= scale[0] * height * width)


def test_crops_are_spread_over_place_area_and_ratio() -> None:
    generator = rng(5)
    boxes = np.array([draw_crop(300, 300, (0.1, 0.9), (0.5, 2.0), generator) for _ in range(4000)])
    assert (boxes[:, 0].min(), boxes[:, 1].min()) == (0, 0)
    assert (boxes[:, 0] + boxes[:, 2]).max() == 300
    assert (boxes[:, 1] + boxes[:, 3]).max() == 300
    corners = {draw_crop(6, 7, (4 / 42, 4 / 42), (1.0, 1.0), generator)[:2] for _ in range(2000)}
    assert corners == {(top, left) for top in range(5) for left in range(6)}
    small = rng(6)
    areas = [math.prod(draw_crop(500, 500, (0.1, 0.4), (0.8, 1.25), small)[2:]) / 250_000 for _ in range(4000)]
    assert abs(np.mean(areas) - 0.25) < 0.01  # uniform in the area
    log_ratio = np.log(boxes[:, 3] / boxes[:, 2])
    assert abs(log_ratio.mean()) < 0.03  # uniform in the logarithm, so wide as often as high


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 300, (0, 143, 10, 13)), (300, 10, (143, 0, 13, 10)), (1, 1, (0, 0, 1, 1)), (1, 500, (0, 249, 1, 1))],
)
def test_where_no_crop_fits_the_largest_central_one_is_taken(height: int, width: int, box: tuple[int, ...]) -> None:
    assert draw_crop(height, width, (0.9, 1.0), (3 / 4, 4 / 3), rng()) == box


# from the encoded file


def texture(height: int, width: int) -> NDArray[np.uint8]:
    """Grain of a few pixels, as grass and gravel have."""
    grain = np.random.default_rng(2).integers(32, 224, (height // 2 + 1, width // 2 + 1), dtype=np.uint8)
    return np.asarray(Image.fromarray(grain).resize((width, height), Image.Resampling.BICUBIC).convert("RGB"))


def differences(operation: Any, data: bytes, seed: int = 0) -> NDArray[np.int64]:
    """Of the operation on the encoded file and on the array that is in it."""
    random = {"rng": rng(seed)} if isinstance(operation, RandomResizedCrop) else {}
    got, expected = operation.from_encoded(memoryview(data), rng(seed)), operation(decoded(data), **random)
    assert got.shape == expected.shape
    return np.abs(got.astype(np.int64) - expected)


@pytest.mark.parametrize("picture", [photo, texture])
@pytest.mark.parametrize("options", [{"quality": 92, "subsampling": 0}, {"quality": 75, "subsampling": 2}])
def test_decoding_at_a_smaller_scale_stays_within_one_in_the_mean(picture: Any, options: dict[str, Any]) -> None:
    """The stated tolerance of shrinking from the encoded file, at every scale and where the next one begins."""
    data = encoded(picture(663, 907), **options)
    scaled = 0
    for ratio in (1.9, 2.0, 2.7, 4.0, 4.9, 5.0, 5.5, 6.6, 6.7, 8.0, 9.9, 10.1, 13.0, 18.0, 25.0):
        size = round(663 / ratio), round(907 / ratio)
        off = differences(Resize(size), data)
        assert off.mean() <= 1
        assert np.quantile(off, 0.999) <= 13
        assert ratio >= 5 or not off.any()
        scaled += bool(off.any())
    assert scaled >= 8
    for seed in range(8):
        assert differences(RandomResizedCrop((60, 90), scale=(0.2, 1.0)), data, seed).mean() <= 1


def test_drawings_at_a_smaller_scale_stay_within_the_stated_tolerance() -> None:
    """Overshoot beside an edge is cut off in the whole picture only, and a board is in step with the JPEG's blocks."""
    rows, columns = np.mgrid[0:384, 0:512]
    drawings = {
        "lines": ((columns * 3 + rows) % 17 < 1, (38, 51), 4),
        "board": ((columns // 8 + rows // 8) % 2, (48, 64), 10),
    }
    for drawing, size, most in drawings.values():
        pixels = np.repeat((drawing * 255).astype(np.uint8)[:, :, None], 3, axis=2)
        assert 1 < differences(Resize(size), encoded(pixels, quality=95, subsampling=0)).mean() <= most


@pytest.mark.parametrize("height", [332, 333, 335, 341])
def test_sides_that_are_no_multiple_of_eight_do_not_shift_the_box(height: int) -> None:
    """A slope from black to white: a shift by half a scaled pixel would show in its mean."""
    slope = np.repeat(np.linspace(0, 255, height)[:, None, None], 300, axis=1).repeat(3, axis=2).astype(np.uint8)
    data = encoded(slope, quality=98)
    operation = RandomResizedCrop(20, scale=(0.3, 0.5))
    for seed in range(5):
        got, expected = operation.from_encoded(memoryview(data), rng(seed)), operation(decoded(data), rng=rng(seed))
        assert abs(float(got.mean()) - float(expected.mean())) < 0.35


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_without_scaling_the_encoded_way_is_exact(file_format: str) -> None:
    data = encoded(PHOTO, file_format)
    for seed in range(5):
        for operation in (RandomResizedCrop(64), Compose([RandomResizedCrop(64), RandomHorizontalFlip()])):
            got = from_encoded(operation, data, seed)
            np.testing.assert_array_equal(got, operation(decoded(data), rng=rng(seed)))
    np.testing.assert_array_equal(Resize(80).from_encoded(memoryview(data)), Resize(80)(decoded(data)))


def test_the_same_state_gives_the_same_bytes() -> None:
    data = encoded(photo(331, 453))
    operation = Compose([RandomResizedCrop(32), RandomHorizontalFlip(), RandomCrop(30, padding=2)])
    first, again, other = (from_encoded(operation, data, seed).tobytes() for seed in (4, 4, 5))
    assert first == again != other


# Compose


def test_compose_passes_the_generator_to_those_who_take_it() -> None:
    seen: list[Any] = []

    def plain(image: Any) -> Any:
        seen.append("plain")
        return image

    def random(image: Any, rng: np.random.Generator) -> Any:
        seen.append(rng)
        return image

    generator = rng()
    assert Compose([plain, random, bytes])(b"x", rng=generator) == b"x"
    assert seen == ["plain", generator]


def test_operations_pickle_compare_and_are_public() -> None:
    operation = Compose([RandomResizedCrop(32), RandomHorizontalFlip(), ToFloat(), Normalize([0.5] * 3, [0.5] * 3)])
    again = pickle.loads(pickle.dumps(operation))
    assert again == operation
    np.testing.assert_array_equal(again(PHOTO, rng=rng(1)), operation(PHOTO, rng=rng(1)))
    assert all(hasattr(images, name) for name in images.__all__)


def test_torchvision_agrees() -> None:
    import torch
    from torchvision_ops import v2

    functional = v2.functional
    for image in (PHOTO, NOISE):
        tensor = torch.from_numpy(image.copy()).permute(2, 0, 1)
        for seed in range(10):
            box = [int(edge) for edge in draw_crop(*image.shape[:2], (0.08, 1.0), (3 / 4, 4 / 3), rng(seed))]
            expected = functional.resized_crop(tensor, *box, size=[40, 40], antialias=True).permute(1, 2, 0).numpy()
            got = RandomResizedCrop(40)(image, rng=rng(seed))
            assert image is NOISE or np.abs(got.astype(int) - expected).mean() < 1
        for size in (30, 200, (60, 31), 91, (200, 50), (93, 123), (89, 121)):
            sides = [size] if isinstance(size, int) else list(size)
            expected = functional.resize(tensor, sides, antialias=True).permute(1, 2, 0).numpy()
            got = Resize(size)(image)
            assert got.shape == expected.shape
            assert image is NOISE or np.abs(got.astype(int) - expected).mean() < 1
            sides = [size, size] if isinstance(size, int) else list(size)
            expected = functional.center_crop(tensor, sides).permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(CenterCrop(size)(image), expected)


# -- operations that move or convert pixels, and what every operation refuses ----------------------------------------


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
        (lambda: Resize(5, max_size=5), "and max_size larger"),
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


# -- results written into an array that is offered -------------------------------------------------------------------

LARGE_NOISE = np.random.default_rng(3).integers(0, 256, (90, 120, 3), dtype=np.uint8)
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
    expected = called(operation, LARGE_NOISE)
    out = like(expected, layout)
    kept = LARGE_NOISE.copy()
    assert called(operation, LARGE_NOISE, out=out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(LARGE_NOISE, kept)
    if layout == "row of a batch":
        assert out.base is not None
        assert not out.base[1].any()
        assert not out.base[3].any()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_does_not_fit_is_left_alone(operation: Any) -> None:
    expected = called(operation, LARGE_NOISE)
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
        got = called(operation, LARGE_NOISE, out=out)
        assert got is not out
        np.testing.assert_array_equal(got, expected)
        assert out is None or not out.any()


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [40, 80, (20, 30)])
def test_from_the_encoded_file_too(file_format: str, size: Any) -> None:
    data = encoded(LARGE_NOISE, file_format)
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
