"""Images with more than 8 bits a channel are refused, however they say so; and portable pixmaps are read."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from photo import encoded, png_file

from streamload.images import Resize
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
    with pytest.raises(ValueError, match=rf"the {form} image has 16 bits a channel.*decode=.*npy"):
        decode_image(data)
    with pytest.raises(ValueError, match="16 bits a channel"):
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
