"""Encoded images: what becomes RGB by which rule, and that damage and bombs are errors."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from photo import encoded, png_file
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from streamload.images.files import decode_image, image_size

ROWS, COLUMNS = np.mgrid[0:37, 0:53]
PICTURE = np.stack([ROWS * 6, COLUMNS * 4, (ROWS * COLUMNS) % 256], axis=2).astype(np.uint8)
TEXTURE = np.random.default_rng(5).integers(0, 256, (40, 48, 3), dtype=np.uint8)


def decode(data: bytes, **options: Any) -> NDArray[np.uint8]:
    return decode_image(memoryview(data), **options)


def by_pillow(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB"))


LOSSLESS = [
    ("PNG", {}),
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
    ("PPM", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
]


@pytest.mark.parametrize(("file_format", "options"), LOSSLESS)
def test_lossless_formats_give_the_pixels_back(file_format: str, options: dict[str, Any]) -> None:
    data = encoded(PICTURE, file_format, **options)
    got = decode(data)
    np.testing.assert_array_equal(got, PICTURE)
    assert got.dtype == np.uint8
    assert got.flags.writeable
    assert got.flags.c_contiguous
    assert image_size(memoryview(data)) == (37, 53)


@pytest.mark.parametrize(
    ("file_format", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("WEBP", "RGB", {}),
        ("AVIF", "RGB", {}),
        ("WEBP", "RGBA", {}),
        ("GIF", "P", {}),
        ("PNG", "1", {}),
        ("PNG", "L", {}),
        ("PNG", "LA", {}),
        ("PNG", "P", {}),
        ("TIFF", "CMYK", {}),
    ],
)
def test_every_other_kind_becomes_what_pillow_makes_of_it(file_format: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(PICTURE, file_format, mode, **options)
    np.testing.assert_array_equal(decode(data), by_pillow(data))
    assert image_size(memoryview(data)) == (37, 53)


def test_alpha_is_dropped_and_nothing_is_blended() -> None:
    alpha = np.concatenate([PICTURE, (COLUMNS * 4).astype(np.uint8)[:, :, None]], axis=2)
    np.testing.assert_array_equal(decode(encoded(alpha, "PNG", "RGBA")), PICTURE)
    palette = Image.fromarray(PICTURE).quantize(16)
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=bytes(range(0, 160, 10)))
    np.testing.assert_array_equal(decode(file.getvalue()), np.array(palette.convert("RGB")))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_a_stated_range_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"range is not stated.*decode="):
        decode(encoded(ROWS.astype(dtype), "TIFF", "F" if dtype is np.float32 else "I"))


def test_of_an_animation_the_first_picture() -> None:
    first, second = Image.fromarray(PICTURE), Image.fromarray(255 - PICTURE)
    file = io.BytesIO()
    first.save(file, "PNG", save_all=True, append_images=[second])
    np.testing.assert_array_equal(decode(file.getvalue()), PICTURE)


def test_large_texts_and_profiles_of_png_are_ignored() -> None:
    """Pillow refuses them, though they have no part in the pixels."""
    texts = PngInfo()
    texts.add_itxt("history", "x" * 2_000_000, zip=True)
    data = encoded(PICTURE, "PNG", pnginfo=texts, icc_profile=bytes(1_500_000))
    np.testing.assert_array_equal(decode(data), PICTURE)


def test_exif_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    data = encoded(PICTURE, "JPEG", exif=exif)
    assert decode(data).shape == (37, 53, 3)
    np.testing.assert_array_equal(decode(data), decode(encoded(PICTURE, "JPEG")))


def test_the_first_bytes_determine_the_format_and_others_are_refused() -> None:
    for data in (b"", b"%!PS-Adobe-3.0 EPSF", b"\x00" * 50, b"RIFF\0\0\0\0WAVEfmt "):
        with pytest.raises(ValueError, match="not an image of a known format"):
            decode(data)


KINDS = {
    "baseline": ("JPEG", "RGB", {"quality": 90}),
    "progressive": ("JPEG", "RGB", {"progressive": True}),
    "restart": ("JPEG", "RGB", {"restart_marker_blocks": 4}),
    "cmyk": ("JPEG", "CMYK", {}),
    "png": ("PNG", "RGB", {}),
    "webp": ("WEBP", "RGB", {}),
    "webp lossless": ("WEBP", "RGBA", {"lossless": True}),
    "bmp": ("BMP", "RGB", {}),
    "gif": ("GIF", "P", {}),
    "tiff": ("TIFF", "RGB", {}),
    "ppm": ("PPM", "RGB", {}),
    "pgm": ("PPM", "L", {}),
    "tiff lzw": ("TIFF", "RGB", {"compression": "tiff_lzw"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_file_is_an_error_or_complete_but_never_another_picture(kind: str) -> None:
    file_format, mode, options = KINDS[kind]
    data = encoded(TEXTURE, file_format, mode, **options)
    whole = decode(data)
    refused = 0
    for size in sorted({*range(0, len(data), max(1, len(data) // 150)), *range(len(data) - 30, len(data))}):
        try:
            got = decode(data[:size])
        except ValueError:
            refused += 1
        else:
            np.testing.assert_array_equal(got, whole, err_msg=f"cut to {size} of {len(data)}")
            assert size > len(data) - 30  # nothing but an end-of-archive marker or a checksum is missing
    assert refused > 100


def test_padding_before_the_end_mark_is_no_damage() -> None:
    data = encoded(TEXTURE, "JPEG")
    whole = decode(data)
    np.testing.assert_array_equal(decode(data[:-2] + bytes(9) + data[-2:]), whole)
    np.testing.assert_array_equal(decode(data + b"trailer"), whole)


def jpeg_of_colour(mode: str, **options: Any) -> bytearray:
    """One colour, in whole blocks, so that any sampling factors give the same picture."""
    return bytearray(encoded(np.full((64, 64, 3), (200, 30, 90), np.uint8), "JPEG", mode, **options))


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_jpeg_with_colours_at_a_quarter_of_the_rows_is_read(options: dict[str, Any]) -> None:
    data = jpeg_of_colour("RGB", subsampling=0, **options)
    frame = data.index(b"\xff\xc2" if options else b"\xff\xc0")
    data[frame + 11] = 0x14  # four blocks of brightness above each other for one of each colour: 4:4:1
    header = data[:frame] + data[frame:]
    try:
        expected = by_pillow(bytes(header))
    except OSError:
        pytest.skip("this libjpeg cannot read it")
    np.testing.assert_array_equal(decode(bytes(header)), expected)
    assert image_size(memoryview(bytes(header))) == (64, 64)


def scans_of(data: bytes) -> list[int]:
    return [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"]


@pytest.mark.parametrize("spectrum", [(0, 0, 0), (5, 9, 0x11)])
@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 4}])
def test_a_sequential_jpeg_may_say_anything_of_its_spectrum(
    spectrum: tuple[int, int, int], options: dict[str, Any]
) -> None:
    data = bytearray(encoded(TEXTURE, "JPEG", quality=95, **options))
    whole = decode(bytes(data))
    (scan,) = scans_of(data)
    at = scan + 5 + 2 * data[scan + 4]
    data[at : at + 3] = bytes(spectrum)
    np.testing.assert_array_equal(decode(bytes(data)), by_pillow(bytes(data)))
    np.testing.assert_array_equal(decode(bytes(data)), whole)
    for size in range(len(data) // 2, len(data) - 40, 101):
        with pytest.raises(ValueError, match="damaged or cut off"):
            decode(bytes(data[:size]) + b"\xff\xd9")


def test_one_limit_of_pixels_holds_for_all_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 37 * 53 - 1)  # where Pillow only warns
    for file_format in ("TIFF", "GIF", "PNG", "BMP"):
        data = encoded(PICTURE, file_format, "L")
        assert decode(data).shape == (37, 53, 3)
        assert image_size(memoryview(data)) == (37, 53)


def png_of_size(height: int, width: int) -> bytes:
    return png_file(height, width, 8, 2)


def jpeg_of_size(height: int, width: int) -> bytes:
    data = encoded(TEXTURE, "JPEG")
    frame = data.index(b"\xff\xc0")
    return data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]


@pytest.mark.parametrize("make", [png_of_size, jpeg_of_size])
def test_a_bomb_is_refused_by_its_header(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("decoding began before the size was checked")

    monkeypatch.setattr("simplejpeg.decode_jpeg", never)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", never)
    with pytest.raises(ValueError, match=r"60000 x 60000 pixels.*178956970"):
        decode(make(60_000, 60_000))


def test_a_progressive_jpeg_of_absurdly_many_scans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(TEXTURE, "JPEG", progressive=True)
    assert data.count(b"\xff\xda") > 4
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    bomb = data[:-2] + 32 * last_scan + data[-2:]
    assert decode(bomb).shape == (40, 48, 3)
    monkeypatch.setattr("streamload.images.files.PIXEL_LIMIT", 40 * 48)
    with pytest.raises(ValueError, match="scans"):
        decode(bomb)
    one_scan = encoded(TEXTURE, "JPEG", comment=b"\xff\xda" * 50)  # in a comment the mark of a scan means nothing
    for sound in (data, one_scan):
        assert decode(sound).shape == (40, 48, 3)
