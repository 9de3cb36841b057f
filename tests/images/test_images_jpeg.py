"""JPEG decoding that stops below the wanted rows: bit for bit the whole picture's, and strict about cut files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from photo import encoded
from PIL import Image

from streamload.images import Resize
from streamload.images.files import decode_image
from streamload.images.jpeg import decode_jpeg, jpeg_header, smallest_scale

TEXTURE = np.random.default_rng(8).integers(0, 256, (203, 141, 3), dtype=np.uint8)
SMOOTH = np.asarray(Image.fromarray(TEXTURE[:40, :40]).resize((141, 203), Image.Resampling.BICUBIC))
SUBSAMPLINGS = ("444", "422", "420", "440", "411", "Gray")


def with_subsampling(pixels: NDArray[np.uint8], name: str) -> bytes:
    if name == "Gray":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[:, :, :1]), 90, "GRAY", "Gray")
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), 90, "RGB", name)


def top_of(data: bytes, rows: int | None, eighths: int = 8) -> NDArray[np.uint8]:
    header = jpeg_header(memoryview(data))
    assert header is not None
    decoded = decode_jpeg(memoryview(data), header, eighths=eighths, rows=rows)
    assert decoded is not None
    return decoded


@settings(deadline=None)
@given(
    subsampling=st.sampled_from(SUBSAMPLINGS),
    height=st.integers(1, 203),
    width=st.integers(1, 141),
    wanted=st.floats(0, 1),
    eighths=st.sampled_from([8, 4, 3, 2, 1]),
)
def test_the_upper_rows_are_those_of_the_whole_picture(
    subsampling: str, height: int, width: int, wanted: float, eighths: int
) -> None:
    for pixels in (TEXTURE, SMOOTH):
        data = with_subsampling(pixels[:height, :width], subsampling)
        rows = max(1, round(wanted * height))
        got, whole = top_of(data, rows, eighths), top_of(data, None, eighths)
        scaled_rows = -(-rows * eighths // 8)
        assert scaled_rows <= len(got) <= len(whole)
        np.testing.assert_array_equal(got[:scaled_rows], whole[:scaled_rows])


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("eighths", [8, 2])
def test_the_lower_rows_are_left_out(subsampling: str, eighths: int) -> None:
    data = with_subsampling(TEXTURE, subsampling)
    assert len(top_of(data, 40, eighths)) < 80 * eighths // 8
    assert len(top_of(data, 203, eighths)) == -(-203 * eighths // 8)


def with_a_scan_for_each_colour(pixels: NDArray[np.uint8]) -> bytes:
    """Put together from three grey files, which have the same tables."""
    planes = [with_subsampling(pixels[:, :, [channel]], "Gray") for channel in range(3)]
    frame, scan = planes[0].index(b"\xff\xc0"), planes[0].index(b"\xff\xda")
    size = planes[0][frame + 5 : frame + 9]
    head = b"\xff\xc0\0\x11\x08" + size + b"\3" + b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    scans = [
        plane[scan : scan + 5] + bytes([number]) + plane[scan + 6 : -2] for number, plane in enumerate(planes, start=1)
    ]
    rest = planes[0][frame + 2 + int.from_bytes(planes[0][frame + 2 : frame + 4], "big") : scan]
    return planes[0][:frame] + head + rest + b"".join(scans) + b"\xff\xd9"


UNCUTTABLE = {
    "progressive": encoded(TEXTURE, progressive=True),
    "restart marks": encoded(TEXTURE, restart_marker_blocks=5),
    "a scan for each colour": with_a_scan_for_each_colour(TEXTURE),
}


@pytest.mark.parametrize("kind", UNCUTTABLE)
def test_files_that_cannot_be_cut_short_are_decoded_whole(kind: str) -> None:
    data = memoryview(UNCUTTABLE[kind])
    header = jpeg_header(data)
    assert header is not None
    assert header.block_rows == 0
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(top_of(bytes(data), 10), expected)


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"restart_marker_blocks": 4}, {"progressive": True}])
@pytest.mark.parametrize("rows", [10, 100])
def test_a_cut_file_is_an_error_however_few_rows_are_wanted(options: dict[str, Any], rows: int) -> None:
    data = encoded(TEXTURE, quality=95, **options)
    for size in range(700, len(data) - 2, len(data) // 60):
        with pytest.raises(ValueError, match="damaged or cut off"):
            top_of(data[:size], rows)


def test_damage_above_the_end_of_the_crop_is_an_error_despite_an_end_mark() -> None:
    data = encoded(TEXTURE, quality=95)
    for size in range(len(data) // 5, len(data) // 3, 97):
        with pytest.raises(ValueError, match="damaged or cut off"):
            top_of(data[:size] + b"\xff\xd9", 110)


def test_thin_pictures_are_scaled_as_wide_ones_are() -> None:
    slope = np.repeat(np.linspace(0, 255, 800)[:, None, None], 9, axis=1).repeat(3, axis=2).astype(np.uint8)
    data = memoryview(encoded(slope, quality=98, subsampling=0))
    header = jpeg_header(data)
    assert header is not None
    assert smallest_scale(header, 60, 1) == 2
    got = Resize((60, 1)).from_encoded(data).astype(int)
    assert np.abs(got - Resize((60, 1))(decode_image(data))).max() <= 4


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_a_picture_is_decoded_into_an_array_of_its_size(file_format: str) -> None:
    data = memoryview(encoded(SMOOTH, file_format))
    expected = decode_image(data)
    slot = np.zeros((3, *SMOOTH.shape), np.uint8)
    row = slot[1]
    assert decode_image(data, out=row) is row
    np.testing.assert_array_equal(row, expected)
    assert not slot[0].any()
    assert not slot[2].any()
    strided = np.zeros((203, 282, 3), np.uint8)[:, ::2]
    assert decode_image(data, out=strided) is strided
    np.testing.assert_array_equal(strided, expected)
    other = np.zeros((203, 140, 3), np.uint8)
    np.testing.assert_array_equal(decode_image(data, out=other), expected)
    assert not other.any()


def test_a_jpeg_of_the_right_size_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    row, decode, buffers = np.zeros((3, *SMOOTH.shape), np.uint8)[1], simplejpeg.decode_jpeg, []

    def noting(*args: Any, buffer: Any, **kwargs: Any) -> Any:
        buffers.append(buffer)
        return decode(*args, buffer=buffer, **kwargs)

    monkeypatch.setattr("simplejpeg.decode_jpeg", noting)
    decode_image(memoryview(encoded(SMOOTH)), out=row)
    assert np.shares_memory(buffers[0], row)
