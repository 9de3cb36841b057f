"""Decode image files to uint8 arrays of height x width x RGB, or to the numbers of masks and depth maps.

JPEG goes through simplejpeg (libjpeg-turbo); other formats, and JPEG that simplejpeg refuses, through Pillow.
Conversion to RGB:

* grey, palette and two-level images: each pixel's colour; CMYK and YCCK: Pillow's conversion;
* alpha (RGBA, LA, palettes with transparency) is dropped without blending;
* more than 8 bits per channel are refused, since depth maps and labels would lose information (Pillow scales AVIF
  to 8 bits, however); floating-point and 32-bit pixels are refused, since their range is unknown;
* animations and multi-page files: the first picture.

As in torchvision's default loader, EXIF orientation is not applied. A truncated file raises an error; it never becomes
a picture with grey rows.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamload.images.jpeg import JpegHeader, decode_jpeg, jpeg_header
from streamload.images.placing import opencv, placed, writable_in_order

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

R = TypeVar("R")

PIXEL_LIMIT = 178_956_970
"""Maximum pixels of an image, as in Pillow; checked in the header before memory is allocated."""

_WHOLE_SCANS_LIMIT = 32  # encoders write about 10 scans; a small file with thousands would take hours to decode
_WARNING_FORMATS = ("TIFF", "GIF")
_TIFF_BITS_PER_SAMPLE = 258
_PNG_METADATA = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
# The first bytes of files by Pillow's plugin; for AVIF, the bytes after the length of the first box.
_SIGNATURES: dict[str, tuple[bytes, ...]] = {
    "Jpeg": (b"\xff\xd8\xff",),
    "Png": (b"\x89PNG\r\n\x1a\n",),
    "WebP": (b"RIFF",),
    "Gif": (b"GIF87a", b"GIF89a"),
    "Tiff": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "Bmp": (b"BM",),
    "Avif": (b"ftypavif", b"ftypavis"),
    "Ppm": tuple(b"P%d%c" % (kind, space) for kind in range(1, 7) for space in b" \t\n\v\f\r"),
}
# The maximum value of PNG pixels of fewer than 8 bits, which Pillow scales to 255.
_LEVELS = {"L;2": 3, "L;4": 15}
_PILLOW_ERRORS = (SyntaxError, OSError, EOFError, ArithmeticError, LookupError, TypeError, struct.error, Warning)
_warning_filters = Lock()


def image_size(data: memoryview) -> tuple[int, int]:
    """Return (height, width) in pixels, from the header alone.

    Raises:
        ValueError: unknown format, or a damaged header.
    """
    header = jpeg_header(data)
    if header is not None:
        return header.height, header.width
    with _open(data) as image:
        return image.height, image.width


def decode_image(data: memoryview, *, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode an image to uint8 (height, width, 3), C-contiguous; the first bytes, not the name, decide the format.

    Args:
        data: the encoded file.
        out: where to write, by the rules of `placing`; a JPEG of its size is decoded directly into it.

    Raises:
        ValueError: unknown format, damaged, truncated, too large, more than 8 bits per channel, or pixels of unknown
            range.
    """
    header = readable_jpeg_header(data)
    if header is not None:
        target = writable_in_order(out, (header.height, header.width, 3), np.uint8)
        decoded = decode_jpeg(data, header, out=target)
        if decoded is not None:
            return placed(decoded, out)
    return placed(read_with_pillow(data, lambda image: _converted(image, "RGB")), out)


def readable_jpeg_header(data: memoryview) -> JpegHeader | None:
    """Return the header of a JPEG that simplejpeg can decode; None for any other file.

    Raises:
        ValueError: the image has too many pixels or scans.
    """
    header = jpeg_header(data)
    if header is None:
        return None
    _check_size(data, header.height, header.width, progressive=header.progressive)
    return None if header.colour_space in ("CMYK", "YCCK") else header


def _check_size(
    data: memoryview, height: int, width: int, *, progressive: bool, pixel_limit: int = PIXEL_LIMIT
) -> None:
    if height * width > pixel_limit:
        raise ValueError(
            f"the image has {height} x {width} pixels, more than the limit of {pixel_limit}; "
            "if that is intended, pass a decoder for this field in decode={...}"
        )
    scans = bytes(data).count(b"\xff\xda") if progressive else 0
    if scans * height * width > _WHOLE_SCANS_LIMIT * PIXEL_LIMIT:
        raise ValueError(
            f"the JPEG has about {scans} scans over {height} x {width} pixels, which would take too long to decode; "
            "write it again with the usual 10 or so"
        )


def _open(data: memoryview) -> ImageFile:
    """Read the header with the Pillow plugin that the first bytes select.

    Unlike `PIL.Image.open`, which tries all formats, this never starts other programs, and does not warn about large
    images, which `_check_size` refuses.
    """
    from PIL.Image import DecompressionBombError

    head = bytes(data[:32])
    kind = next((kind for kind, starts in _SIGNATURES.items() if head[4 * (kind == "Avif") :].startswith(starts)), None)
    if kind is None or (kind == "WebP" and head[8:12] != b"WEBP"):
        raise ValueError(f"not an image of a known format: it begins with {head[:8]!r}")
    plugin: type[ImageFile] = getattr(import_module(f"PIL.{kind}ImagePlugin"), f"{kind}ImageFile")
    try:
        with _damage_is_error(plugin.format):
            return plugin(io.BytesIO(_without_metadata(data) if kind == "Png" else data))
    except (*_PILLOW_ERRORS, ValueError, DecompressionBombError) as exc:
        raise ValueError(f"the header of the {plugin.format} image cannot be read: {exc}") from exc


def _without_metadata(png: memoryview) -> bytes:
    """Remove texts and the colour profile, since Pillow refuses large ones."""
    chunks, start = [png[:8]], 8
    while start < len(png):
        end = start + 12 + int.from_bytes(png[start : start + 4])
        if png[start + 4 : start + 8] not in _PNG_METADATA:
            chunks.append(png[start:end])
        start = end
    return b"".join(chunks)


@contextmanager
def _damage_is_error(image_format: str | None) -> Iterator[None]:
    """Turn Pillow's warnings of damage into errors, for some formats."""
    if image_format not in _WARNING_FORMATS:
        yield
        return
    from PIL.Image import DecompressionBombWarning

    # Warning filters belong to the process, so two threads must not change them at once.
    with _warning_filters, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about metadata, which does not affect the pixels
        warnings.filterwarnings("error", "Truncated File Read|Corrupt EXIF data|Tag data larger than file", UserWarning)
        warnings.filterwarnings("error", category=RuntimeWarning)
        warnings.filterwarnings("ignore", category=DecompressionBombWarning)  # `PIXEL_LIMIT` applies to all formats
        yield


def read_with_pillow(data: memoryview, read: Callable[[ImageFile], R], pixel_limit: int = PIXEL_LIMIT) -> R:
    """Open an image with Pillow, without reading its pixels, and return `read(image)`.

    Raises:
        ValueError: unknown format, too large, damaged or truncated.
    """
    with _open(data) as image:
        progressive = bool(image.info.get("progressive"))  # set for JPEG only
        _check_size(data, image.height, image.width, progressive=progressive, pixel_limit=pixel_limit)
        try:
            with _damage_is_error(image.format):
                return read(image)
        except _PILLOW_ERRORS as exc:
            raise ValueError(f"the {image.format} image is damaged or cut off: {exc}; write the sample again") from exc


def _converted(image: ImageFile, mode: str) -> NDArray[np.uint8]:
    _check_pixels(image)
    image.load()
    if image.mode == mode:
        return np.array(image)
    # Pillow warns if a palette with transparency is converted directly to RGB; the colours are the same.
    colours = (image.convert("RGBA") if image.mode == "P" else image).convert("RGB")
    return np.array(colours if mode == "RGB" else colours.convert(mode))


def _check_pixels(image: ImageFile) -> None:
    bits = _channel_bits(image)
    if 8 < bits < 32:
        raise ValueError(
            f"the {image.format} image has {bits} bits per channel, but decoding would keep 8; give a decoder for "
            "its field, as in decode={'depth.png': images.unchanged}, store its values as npy, or convert it to 8 bits"
        )
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise ValueError(
            f"the {image.format} image has wide pixels (mode {image.mode}), whose range is not stated; "
            "give a decoder for its field, such as decode={'depth.tif': images.unchanged}"
        )


def _channel_bits(image: ImageFile) -> int:
    """Return the bits per channel in the file, rounded up to 8 or 16 except for TIFF; Pillow reduces RGB to 8."""
    from PIL.TiffImagePlugin import TiffImageFile

    if isinstance(image, TiffImageFile):
        return int(max(image.tag_v2.get(_TIFF_BITS_PER_SAMPLE, (1,))))
    if image.format == "PNG":
        return 16 if any(";16" in str(tile.args) for tile in image.tile) else 8
    if image.format == "PPM":
        most = max((tile.args[-1] for tile in image.tile if isinstance(tile.args, tuple)), default=0)
        return 16 if image.mode == "I" or most > 255 else 8
    return 8


def unchanged(data: bytes) -> NDArray[Any]:
    """Decode the stored numbers, unconverted: depth maps, and masks of all kinds.

    Returns:
        (height, width) for grey and palette images (indices of colours), else (height, width, channels), with 2
        channels for grey with alpha, 3 for RGB, 4 for RGBA or CMYK. uint8 or uint16; float32 or int32 for some TIFFs.

    Raises:
        ValueError: unknown format, damaged, truncated, too large, or of an unsupported depth.
    """
    view = memoryview(data)
    return read_with_pillow(view, lambda image: _stored_numbers(image, view))


def palette(data: bytes) -> NDArray[np.uint8]:
    """Decode a palette or grey mask to the class of each pixel.

    Returns:
        uint8 (height, width): indices into the palette, or the stored values of a grey image.

    Raises:
        ValueError: a pixel has several numbers, or more than 8 bits, or `unchanged` fails.
    """
    numbers = unchanged(data)
    if numbers.ndim != 2 or numbers.dtype != np.uint8:
        raise ValueError(
            f"the image has no palette: its pixels are {numbers.dtype} of shape {numbers.shape}; to decode them "
            "unconverted use images.unchanged"
        )
    return numbers


def grey(data: bytes) -> NDArray[np.uint8]:
    """Decode the lightness of each pixel, as Pillow's `convert("L")` computes it.

    Returns:
        uint8 (height, width).

    Raises:
        ValueError: as for `decode_image`.
    """
    return read_with_pillow(memoryview(data), lambda image: _converted(image, "L"))


def _stored_numbers(image: ImageFile, data: memoryview) -> NDArray[Any]:
    bits = _channel_bits(image)
    if 8 < bits < 32:
        # Pillow would truncate or scale several channels of 16 bits to 8.
        is_grey_with_alpha = any("LA;16" in str(tile.args) for tile in image.tile)
        cv2, pixels = opencv(), None
        if bits == 16:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if pixels is None or pixels.dtype != np.uint16 or pixels.shape[:2] != (image.height, image.width):
            raise ValueError(
                f"the {image.format} image of {bits} bits per channel is damaged, cut off or unusual; write "
                "the sample again, or store its values as npy"
            )
        if pixels.ndim == 2:
            return pixels  # type: ignore[no-any-return]
        # OpenCV's order is blue, green, red.
        order = [0, 3] if is_grey_with_alpha else [2, 1, 0, *range(3, pixels.shape[2])]
        return np.ascontiguousarray(pixels[:, :, order])
    arguments = [tile.args for tile in image.tile]
    if image.format == "PPM":
        most = next((int(each[-1]) for each in arguments if isinstance(each, tuple)), 255)
    else:
        most = next((_LEVELS[str(each)] for each in arguments if str(each) in _LEVELS), 255)
    image.load()
    numbers: NDArray[Any] = np.array(image)
    if numbers.dtype == np.bool_:
        return numbers.astype(np.uint8)
    return numbers if most == 255 else np.rint(numbers * (most / 255)).astype(np.uint8)
