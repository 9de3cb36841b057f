"""Encoded images to uint8 arrays of height x width x RGB.

JPEG goes through simplejpeg (libjpeg-turbo), all else, and the JPEG that simplejpeg does not take, through Pillow.
What becomes RGB by which rule:

* grey, palette and two-level images: each pixel's colour; CMYK and YCCK: Pillow's conversion;
* alpha (RGBA, LA, palettes with transparency) is dropped, nothing is blended;
* 16 bits a channel: the upper 8 bits; floating-point and 32-bit pixels are refused, for their range is not stated;
* animations and multi-page files: the first picture.

An EXIF orientation is not applied, as in torchvision's default loader. A file that is cut off is an error, never
a picture with grey rows.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

__all__ = ["PIXEL_LIMIT", "decode_image", "image_size", "is_jpeg"]

PIXEL_LIMIT = 178_956_970
"""The most pixels that an image may have, Pillow's own limit; the header is checked before memory is taken."""

_JPEG_MAGIC = b"\xff\xd8\xff"
_WHOLE_SCANS_LIMIT = 32  # encoders write about 10; a small file of thousands of scans would decode for hours
_WARNING_FORMATS = ("TIFF", "GIF")
_PILLOW_ERRORS = (SyntaxError, OSError, EOFError, ArithmeticError, LookupError, TypeError, struct.error, Warning)
_warning_filters = Lock()
_PADDED_END = "extraneous bytes before marker 0xd9"


def is_jpeg(data: memoryview) -> bool:
    """True if the bytes begin as a JPEG does, whatever the file was called."""
    return bytes(data[:3]) == _JPEG_MAGIC


def image_size(data: memoryview) -> tuple[int, int]:
    """(height, width) in pixels, from the header alone.

    Raises:
        ValueError: the bytes do not begin as an image of a known format.
    """
    if is_jpeg(data):
        header = _jpeg_header(data)
        if header is not None:
            return header[0], header[1]
    with _open(data) as image:
        return image.height, image.width


def decode_image(
    data: memoryview, *, min_height: int = 0, min_width: int = 0, pixel_limit: int = PIXEL_LIMIT
) -> NDArray[np.uint8]:
    """Decodes an image; the format is told by the first bytes, not by the name.

    Args:
        data: the encoded file.
        min_height: if this or `min_width` is above 0, a JPEG is decoded at the smallest of the scales 1/8, 2/8,
            3/8 and 4/8 that leaves at least so many rows (scales in between that and 1 cost more than the whole).
            Other formats are decoded whole.
        min_width: the same for columns.
        pixel_limit: images of more pixels (before scaling) are refused.

    Returns:
        uint8 array (height, width, 3), C-contiguous, writable, in memory of its own.

    Raises:
        ValueError: not a known format, damaged, cut off, too large, or with pixels whose range is unknown.
    """
    if is_jpeg(data):
        header = _jpeg_header(data)
        if header is not None:
            height, width, colour_space, _ = header
            _check_jpeg_cost(data, height, width, pixel_limit)
            if colour_space not in ("CMYK", "YCCK"):
                decoded = _decode_jpeg(data, min_height, min_width)
                if decoded is not None:
                    return decoded
    return _decode_with_pillow(data, pixel_limit)


def _check_pixels(height: int, width: int, pixel_limit: int) -> None:
    if height * width > pixel_limit:
        raise ValueError(
            f"the image has {height} x {width} pixels, more than the limit of {pixel_limit}; "
            "if it is no decompression bomb, hand over a decoder for this field with decode={...}"
        )


def _jpeg_header(data: memoryview) -> tuple[int, int, str, str] | None:
    """Height, width, colour space and subsampling, or None where only Pillow may be able to tell."""
    import simplejpeg

    try:
        header: tuple[int, int, str, str] = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return header


def _check_jpeg_cost(data: memoryview, height: int, width: int, pixel_limit: int) -> None:
    _check_pixels(height, width, pixel_limit)
    if _is_progressive(data):
        scans = bytes(data).count(b"\xff\xda")
        if scans * height * width > _WHOLE_SCANS_LIMIT * pixel_limit:
            raise ValueError(
                f"the JPEG has about {scans} scans over {height} x {width} pixels, which would take absurdly long; "
                "write it again with the usual 10 or so"
            )


def _is_progressive(data: memoryview) -> bool:
    """Walks the marker segments up to the frame header, which tells the coding process (ITU-T T.81, annex B)."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return marker in (0xC2, 0xC6, 0xCA, 0xCE)
        position += 2 + (data[position + 2] << 8 | data[position + 3])
    return True  # not understood: the check for progressive files does no harm to others


def _decode_jpeg(data: memoryview, min_height: int, min_width: int) -> NDArray[np.uint8] | None:
    """The picture, or None if simplejpeg has no means for this kind of file."""
    import simplejpeg

    image: NDArray[np.uint8]
    # A factor of 1 would allow 5/8, 6/8 and 7/8, for which libjpeg-turbo has no fast inverse transform.
    scaling: dict[str, Any] = {}
    if min_height > 0 or min_width > 0:
        scaling = {"min_height": min_height, "min_width": min_width, "min_factor": 2.0}
    try:
        image = simplejpeg.decode_jpeg(data, "RGB", **scaling)
    except ValueError as exc:
        message = str(exc)
        if _PADDED_END in message:
            # Only the first warning is told. Here it comes at the end mark, after a whole picture: cameras pad.
            image = simplejpeg.decode_jpeg(data, "RGB", strict=False, **scaling)
        elif "Corrupt JPEG" in message or "Premature end" in message or "Invalid SOS" in message:
            raise ValueError(f"the JPEG file is damaged or cut off ({message}); write the sample again") from exc
        else:
            return None
    return image


def _open(data: memoryview) -> ImageFile:
    """Reads the header with the one Pillow plugin whose format the first bytes show.

    The plugins are called directly because `PIL.Image.open` tries every format it knows, some of which start other
    programs, and warns about large images, which are refused here by an error instead.
    """
    from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
    from PIL.Image import DecompressionBombError

    head = bytes(data[:32])
    plugin: type[ImageFile]
    if head.startswith(_JPEG_MAGIC):
        plugin = JpegImagePlugin.JpegImageFile
    elif head.startswith(b"\x89PNG\r\n\x1a\n"):
        plugin = PngImagePlugin.PngImageFile
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        # This plugin takes memory for the whole canvas at once, so its size has to be checked before.
        _check_pixels(*_webp_size(head), PIXEL_LIMIT)
        plugin = WebPImagePlugin.WebPImageFile
    elif head.startswith((b"GIF87a", b"GIF89a")):
        plugin = GifImagePlugin.GifImageFile
    elif head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        plugin = TiffImagePlugin.TiffImageFile
    elif head.startswith(b"BM"):
        plugin = BmpImagePlugin.BmpImageFile
    else:
        raise ValueError(f"not an image of a known format: it begins with {head[:8]!r}")
    try:
        with _damage_is_error() if plugin.format in _WARNING_FORMATS else nullcontext():
            return plugin(io.BytesIO(data))
    except (*_PILLOW_ERRORS, DecompressionBombError) as exc:
        raise ValueError(f"the header of the {plugin.format} image cannot be read: {exc}") from exc


@contextmanager
def _damage_is_error() -> Iterator[None]:
    """Turns what some of Pillow's plugins only warn about into errors."""
    # Filters of warnings belong to the whole process, so two threads must not change them at once.
    with _warning_filters, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about metadata, which have no part in the pixels
        warnings.filterwarnings("error", "Truncated File Read|Corrupt EXIF data|Tag data larger than file", UserWarning)
        warnings.filterwarnings("error", category=RuntimeWarning)  # among them DecompressionBombWarning
        yield


def _webp_size(head: bytes) -> tuple[int, int]:
    """Height and width from the first chunk of a WebP file (RFC 9649)."""
    chunk, payload = head[12:16], head[20:]
    if len(payload) < 10:
        raise ValueError("the WebP file is cut off within its header; write the sample again")
    if chunk == b"VP8X":
        return int.from_bytes(payload[7:10], "little") + 1, int.from_bytes(payload[4:7], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(payload[1:5], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8 ":
        return int.from_bytes(payload[8:10], "little") & 0x3FFF, int.from_bytes(payload[6:8], "little") & 0x3FFF
    raise ValueError(f"the WebP file begins with the chunk {chunk!r}, which holds no picture")


def _decode_with_pillow(data: memoryview, pixel_limit: int) -> NDArray[np.uint8]:
    with _open(data) as image:
        _check_pixels(image.height, image.width, pixel_limit)
        try:
            with _damage_is_error() if image.format in _WARNING_FORMATS else nullcontext():
                image.load()
                return _to_rgb(image)
        except _PILLOW_ERRORS as exc:
            raise ValueError(f"the {image.format} image is damaged or cut off: {exc}; write the sample again") from exc


def _to_rgb(image: ImageFile) -> NDArray[np.uint8]:
    """A loaded image as an array, by the rules at the head of this module."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        grey = (np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"the {image.format} image has 32-bit pixels (mode {image.mode}), whose range is not stated; "
            "hand over a decoder for this field with decode={...}"
        )
    if image.mode == "P":
        # Straight to RGB, Pillow would warn about palettes with transparency; the colours are the same.
        return np.array(image.convert("RGBA").convert("RGB"))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))
