"""Arrays that are no pictures: more than 8 bits a channel, pixmaps, masks and depths, and tensors."""

from __future__ import annotations

import io
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from photo import called, encoded, png_file, rng
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
    ToTensor,
)
from streamload.images.files import decode_image, image_size

WIDE = np.random.default_rng(7).integers(0, 1 << 16, (9, 11, 4), np.uint16)
NARROW = (WIDE >> 8).astype(np.uint8)


def by_opencv(extension: str, pixels: NDArray[Any], *options: int) -> bytes:
    done, data = cv2.imencode(extension, pixels, options)
    assert done
    return bytes(data)


UNCOMPRESSED = int(cv2.IMWRITE_TIFF_COMPRESSION), 1

TOO_DEEP = {
    "png grey": by_opencv(".png", WIDE[..., 0]),
    "png grey by pillow": encoded(WIDE[..., 0], "PNG"),
    "png rgb": by_opencv(".png", WIDE[..., :3]),
    "png rgba": by_opencv(".png", WIDE),
    "png grey with alpha": png_file(
        9, 11, 16, 4, b"".join(b"\0" + row.astype(">u2").tobytes() for row in WIDE[..., :2])
    ),
    "tiff grey": by_opencv(".tiff", WIDE[..., 0], *UNCOMPRESSED),
    "tiff grey by pillow": encoded(WIDE[..., 0], "TIFF"),
    "tiff rgb": by_opencv(".tiff", WIDE[..., :3], *UNCOMPRESSED),
    "pgm": by_opencv(".pgm", WIDE[..., 0]),
    "ppm": by_opencv(".ppm", WIDE[..., :3]),
    "ppm in plain text": b"P3 1 1 256\n3 0 256\n",
    "pgm of 12 bits": b"P5 1 1 4095\n\x0f\xff",
    "ppm of 12 bits": b"P6 1 1 4095\n\x0f\xff\x01\x02\x03\x04",
}


@pytest.mark.parametrize("kind", TOO_DEEP)
def test_what_would_lose_bits_is_refused_with_the_ways_out(kind: str) -> None:
    data = memoryview(TOO_DEEP[kind])
    form = {"png": "PNG", "tif": "TIFF"}.get(kind[:3], "PPM")
    with pytest.raises(ValueError, match=rf"the {form} image has 16 bits per channel.*decode=.*npy"):
        decode_image(data)
    with pytest.raises(ValueError, match="16 bits per channel"):
        Resize(4).from_encoded(data)
    height, width = image_size(data)
    assert height * width > 0


@pytest.mark.parametrize(
    ("data", "grey"),
    [
        (b"P1\n3 1\n1 0 1\n", [0, 255, 0]),
        (b"P1 # a comment\n3 1\n101", [0, 255, 0]),
        (b"P2\n3 1\n255\n0 7 255\n", [0, 7, 255]),
        (b"P4\n3 1\n\xa0", [0, 255, 0]),
        (b"P5\n3 1\n255\n\x00\x07\xff", [0, 7, 255]),
        (b"P5 3 1 3\n\x00\x01\x03", [0, 85, 255]),
        (b"P3\n3 1\n255\n0 0 0 7 7 7 255 255 255\n", [0, 7, 255]),
        (b"P6\n3 1\n255\n\x00\x00\x00\x07\x07\x07\xff\xff\xff", [0, 7, 255]),
    ],
)
def test_portable_pixmaps_are_read(data: bytes, grey: list[int]) -> None:
    assert image_size(memoryview(data)) == (1, 3)
    got = decode_image(memoryview(data))
    assert got.shape == (1, 3, 3)
    assert got[0].tolist() == [[value] * 3 for value in grey]


@pytest.mark.parametrize(
    "data",
    [
        b"P5\n3 1\n255\n\x00\x07",
        b"P5 3 1 3\n\x00\x01",
        b"P5\n0 1\n255\n",
        b"P5 3 1 70000\n" + bytes(6),
        b"P6\n99999999 99999999\n255\n",
        b"P7\nWIDTH 1\n",
        b"Pf\n1 1\n-1.0\n\0\0\0\0",
    ],
)
def test_damaged_and_other_pixmaps_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"image|PPM|Channel value too large"):
        decode_image(memoryview(data))


SIDES = st.integers(1, 40)


# operations


@settings(deadline=None)
@given(height=SIDES, width=SIDES, rows=SIDES, columns=SIDES, dtype=st.sampled_from(["u1", "u2", "i4", "i8", "f4", "?"]))
def test_nearest_takes_the_pixels_that_pillow_takes(
    height: int, width: int, rows: int, columns: int, dtype: str
) -> None:
    values = rng(height).integers(0, 200, (height, width), np.uint8)
    expected = np.asarray(Image.fromarray(values).resize((columns, rows), Image.Resampling.NEAREST))
    got = Resize((rows, columns), interpolation="nearest")(values.astype(dtype))
    np.testing.assert_array_equal(got, expected.astype(dtype))
    assert got.dtype == np.dtype(dtype)


@pytest.mark.parametrize("interpolation", ["bilinear", "box", "bicubic", "lanczos"])
@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
def test_wide_numbers_are_resampled_as_floats_are(interpolation: Any, channels: tuple[int, ...]) -> None:
    depth = rng().integers(0, 1 << 16, (30, 41, *channels), np.uint16)
    resize = Resize((17, 60), interpolation=interpolation)
    got = resize(depth)
    assert (got.shape, got.dtype) == ((17, 60, *channels), np.uint16)
    planes = np.moveaxis(depth.reshape(30, 41, -1).astype(np.float32), 2, 0)
    method = Image.Resampling[interpolation.upper()]
    floats = np.stack([np.asarray(Image.fromarray(plane).resize((60, 17), method)) for plane in planes], axis=2)
    np.testing.assert_array_equal(got.reshape(floats.shape), np.rint(floats.clip(0, 65535)))
    if not channels:
        np.testing.assert_array_equal(resize(depth.astype(np.float32)), floats[:, :, 0])
    out = np.zeros_like(got)
    assert resize(depth, out=out) is out
    np.testing.assert_array_equal(out, got)


@pytest.mark.parametrize("dtype", ["i4", "i8", "?"])
def test_numbers_of_objects_are_not_averaged(dtype: str) -> None:
    with pytest.raises(TypeError, match='interpolation="nearest"'):
        Resize(5)(np.zeros((9, 9), dtype))


@pytest.mark.parametrize(
    "operation", [CenterCrop(20), CenterCrop(9), RandomCrop(11, padding=3), RandomHorizontalFlip(1.0)]
)
@pytest.mark.parametrize("dtype", ["u1", "u2", "i8", "f4", "f8", "?"])
def test_crops_and_flips_take_any_numbers(operation: Any, dtype: str) -> None:
    values = rng(3).integers(0, 200, (13, 15, 1), np.uint8)
    expected = called(operation, values)[:, :, 0].astype(dtype)
    got = called(operation, values[:, :, 0].astype(dtype))
    np.testing.assert_array_equal(got, expected)
    out = np.full_like(got, 1)
    assert called(operation, values[:, :, 0].astype(dtype), out=out) is out
    np.testing.assert_array_equal(out, expected)


def test_bytes_without_an_axis_of_channels_are_resized_as_with_one() -> None:
    values = rng().integers(0, 256, (50, 60), np.uint8)
    for operation in (Resize(20), Resize(5), Resize(70, interpolation="lanczos")):
        np.testing.assert_array_equal(operation(values), operation(values[:, :, None])[:, :, 0])
    got = RandomResizedCrop(7)(values, rng())
    np.testing.assert_array_equal(got, RandomResizedCrop(7)(values[:, :, None], rng())[:, :, 0])
    np.testing.assert_array_equal(ToFloat()(values), ToFloat()(values[:, :, None]))


# ToTensor


NOISE = rng(3).integers(0, 256, (24, 36, 3), np.uint8)


def as_torchvision_does(image: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(image).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_tensor_is_what_torchvision_makes(channels: int) -> None:
    image = rng().integers(0, 256, (24, 36, channels), np.uint8)
    got = ToTensor()(image)
    assert isinstance(got, torch.Tensor)
    assert got.is_contiguous()
    assert torch.equal(got, as_torchvision_does(image))
    if channels == 1:
        assert torch.equal(ToTensor()(image[:, :, 0]), got)


def test_the_usual_chain_normalises_tensors() -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    shape = (3, 1, 1)
    expected = (as_torchvision_does(NOISE) - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    chain = Compose([ToTensor(), Normalize(mean, std)])
    for got in (chain(NOISE), Normalize(mean, std)(ToTensor()(NOISE))):
        assert isinstance(got, torch.Tensor)
        assert got.is_contiguous()
        assert torch.equal(got, expected)
    assert torch.equal(torch.stack([chain(NOISE)] * 2), torch.stack([expected] * 2))


@pytest.mark.parametrize("image", [WIDE[..., 0], NOISE / 255, "image", None])
def test_only_bytes_have_a_known_range(image: Any) -> None:
    with pytest.raises(TypeError, match="ToTensor takes a uint8 array"):
        ToTensor()(image)


# decoders


def with_palette(numbers: NDArray[np.uint8], **options: Any) -> bytes:
    image = Image.fromarray(numbers)
    image.putpalette([*range(255, -1, -1)] * 3)
    assert image.mode == "P"
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


CLASSES = rng().integers(0, 4, (9, 11), np.uint8)


@pytest.mark.parametrize("options", [{}, {"bits": 2}, {"bits": 4}, {"transparency": 3}])
def test_a_palette_gives_the_numbers_and_not_the_colours(options: dict[str, Any]) -> None:
    data = with_palette(CLASSES, **options)
    for decoder in (images.palette, images.unchanged):
        np.testing.assert_array_equal(decoder(data), CLASSES)
        assert decoder(data).flags.writeable
    assert images.grey(data).tolist() != CLASSES.tolist()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_numbers_of_few_bits_are_not_stretched(bits: int) -> None:
    numbers = rng(bits).integers(0, 1 << bits, (5, 16), np.uint8)
    packed = np.packbits(np.unpackbits(numbers.reshape(-1, 1), axis=1)[:, -bits:]).reshape(5, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    for data in (png_file(5, 16, bits, 0, rows), pgm_of(numbers, (1 << bits) - 1)):
        np.testing.assert_array_equal(images.palette(data), numbers)
        np.testing.assert_array_equal(images.unchanged(data), numbers)


def pgm_of(numbers: NDArray[np.uint8], most: int) -> bytes:
    return b"P5 %d %d %d\n" % (numbers.shape[1], numbers.shape[0], most) + numbers.tobytes()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("png grey", WIDE[..., 0]),
        ("png grey by pillow", WIDE[..., 0]),
        ("png rgb", WIDE[..., 2::-1]),
        ("png rgba", WIDE[..., [2, 1, 0, 3]]),
        ("png grey with alpha", WIDE[..., :2]),
        ("tiff grey", WIDE[..., 0]),
        ("tiff grey by pillow", WIDE[..., 0]),
        ("tiff rgb", WIDE[..., 2::-1]),
        ("pgm", WIDE[..., 0]),
        ("ppm", WIDE[..., 2::-1]),
        ("pgm of 12 bits", [[4095]]),
        ("ppm in plain text", [[[3, 0, 256]]]),
    ],
)
def test_all_16_bits_are_there(name: str, expected: Any) -> None:
    got = images.unchanged(TOO_DEEP[name])
    np.testing.assert_array_equal(got, expected)
    assert (got.dtype, got.flags.c_contiguous, got.flags.writeable) == (np.uint16, True, True)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_8_bits_keep_their_channels(channels: int) -> None:
    pixels = NARROW[:, :, 0] if channels == 1 else NARROW[:, :, :channels]
    np.testing.assert_array_equal(images.unchanged(encoded(np.ascontiguousarray(pixels), "PNG")), pixels)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_tiffs_of_32_bits_are_read(dtype: Any) -> None:
    values = (rng().random((6, 7)) * 1000).astype(dtype)
    got = images.unchanged(encoded(values, "TIFF"))
    np.testing.assert_array_equal(got, values)
    assert got.dtype == dtype


def test_grey_is_pillows() -> None:
    for pixels in (NARROW[:, :, :3], NARROW[:, :, 0], NARROW):
        data = encoded(np.ascontiguousarray(pixels), "PNG")
        expected = np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).convert("L"))
        np.testing.assert_array_equal(images.grey(data), expected)
    jpeg = encoded(NOISE, "JPEG")
    np.testing.assert_array_equal(images.grey(jpeg), np.asarray(Image.open(io.BytesIO(jpeg)).convert("L")))


@pytest.mark.parametrize("name", ["png grey", "png rgb", "tiff grey"])
def test_what_does_not_suit_a_decoder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no palette.*uint16.*images\.unchanged"):
        images.palette(TOO_DEEP[name])
    with pytest.raises(ValueError, match=r"16 bits per channel.*images\.unchanged"):
        images.grey(TOO_DEEP[name])
    with pytest.raises(ValueError, match=r"no palette.*uint8 of shape \(9, 11, 3\)"):
        images.palette(encoded(np.ascontiguousarray(NARROW[:, :, :3]), "PNG"))


@pytest.mark.parametrize("decoder", [images.palette, images.unchanged, images.grey])
def test_damage_is_an_error_for_every_decoder(decoder: Any) -> None:
    data = with_palette(rng().integers(0, 256, (60, 70), np.uint8))
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 8
    for wrong in (data[: len(data) // 2], bytes(flipped), b"", b"no image", data[:20]):
        with pytest.raises(ValueError, match="image|PNG"):
            decoder(wrong)
    bomb = bytearray(data)
    bomb[16:24] = b"\0\0\xff\xff" * 2
    with pytest.raises(ValueError, match=r"more than the limit|cannot be read"):
        decoder(bytes(bomb))


def test_damage_of_wide_numbers_is_an_error() -> None:
    done, array = cv2.imencode(".png", rng().integers(0, 1 << 16, (60, 70), np.uint16))
    assert done
    data = bytes(array)
    for place in range(60, len(data) - 20, 400):
        flipped = bytearray(data)
        flipped[place] ^= 8
        with pytest.raises(ValueError, match="damaged"):
            images.unchanged(bytes(flipped))
        with pytest.raises(ValueError, match="damaged"):
            images.unchanged(data[:place])
