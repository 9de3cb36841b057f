"""Resize images before packing: shorter side N, as JPEG."""

from __future__ import annotations

import io
import struct
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.images import Resize
from streamload.images.files import image_size
from streamload.images.jpeg import is_jpeg

_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class Resizing:
    """Resize larger images to a shorter side of `size` pixels, and encode them as JPEG (4:2:0 or grey).

    The EXIF orientation is applied; transparency, metadata, colour profiles and all but the first frame are dropped.
    """

    size: int
    quality: int

    def __call__(self, field: str, data: bytes) -> tuple[str, bytes]:
        """Return the field and bytes to store, unchanged for a small image. Raises ValueError for a damaged one."""
        prefix, dot, _ = field.rpartition(".")
        view = memoryview(data)
        if min(image_size(view)) <= self.size:
            return field, data
        pixels = Resize(self.size).from_encoded(view)
        return f"{prefix}{dot}jpg", _encoded(_upright(pixels, data), self.quality)


def _encoded(pixels: NDArray[np.uint8], quality: int) -> bytes:
    import simplejpeg

    is_grey = bool((pixels == pixels[..., :1]).all())
    colours, spaces = (pixels[..., :1], ("GRAY", "Gray")) if is_grey else (pixels, ("RGB", "420"))
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(colours), quality, *spaces, fastdct=False))


def _upright(pixels: NDArray[np.uint8], data: bytes) -> NDArray[np.uint8]:
    """Apply the EXIF orientation of the file that the pixels are from; damaged metadata has none."""
    from PIL import Image, ImageOps

    if is_jpeg(memoryview(data)) and b"Exif\0\0" not in data[: 1 << 17]:
        return pixels
    image = Image.fromarray(pixels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about malformed metadata; the pixels were decoded without a warning
            with io.BytesIO(data) as file, Image.open(file, formats=("JPEG", "PNG", "WEBP", "TIFF")) as original:
                image.getexif()[_ORIENTATION] = original.getexif().get(_ORIENTATION, 1)
        return np.asarray(ImageOps.exif_transpose(image))
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, struct.error, Image.DecompressionBombError):
        return pixels
