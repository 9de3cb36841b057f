"""Read, check and resize the members of samples."""

from __future__ import annotations

import io
import json
import os
import stat
import struct
import sys
import warnings
import zipfile
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.decode.decoders import npy_layout
from streamload.images import Resize
from streamload.images.files import image_size, read_with_pillow
from streamload.images.jpeg import frame_and_scan, is_jpeg
from streamload.pack.sources.source import SourceFile, is_image

_END_OF_IMAGE = b"\xff\xd9"
_ORIENTATION = 0x0112  # a tag of EXIF
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def load(member: SourceFile) -> bytes:
    """Return the bytes of a member. Raises ValueError with the reason if it cannot be packed."""
    if member.field is None:
        raise ValueError("its type differs from most files in the class folders, or its extension names no field")
    data = member.content
    try:
        data = read_regular(member.path) if data is None else data
    except OSError as exc:
        raise ValueError(f"it cannot be read: {exc.strerror or exc}") from exc
    if data is None:
        raise ValueError("it is not a regular file")
    if member.size not in (-1, len(data)):
        raise ValueError(f"it had {member.size:,} bytes when packing began, but has {len(data):,} now")
    if is_image(member.field):
        check_image_file(data)
    else:
        _check_content(member.field.rpartition(".")[2], data)
    return data


def read_regular(path: str) -> bytes | None:
    """Return a file's bytes; None for a pipe or device. Raises OSError, also for a folder."""
    # Without O_NONBLOCK, opening a named pipe would block forever.
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None


def _check_content(extension: str, data: bytes) -> None:
    try:
        if extension in ("json", "jsn"):
            json.loads(data)
        elif extension == "npy":
            if len(data) < (end := npy_layout(memoryview(data)).end):
                raise ValueError(f"the array is cut short: it has {len(data):,} of {end:,} bytes")
        elif extension in ("pt", "pth") and not data.startswith(_OLD_TORCH):  # nothing is unpickled
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                if not any(name.endswith("data.pkl") for name in archive.namelist()):
                    raise ValueError("torch.save did not write it")
    except (zipfile.BadZipFile, OSError, NotImplementedError) as exc:
        raise ValueError(f"the file is damaged or cut short: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is not {extension.upper()} ({exc})") from exc


def check_image_file(data: bytes) -> None:
    """Raise ValueError for a damaged image, without decoding its pixels.

    A JPEG needs an end-of-image marker after the start of its scan; Pillow checks the structure of other formats.
    """
    view = memoryview(data)
    if not data:
        raise ValueError("it is empty")
    if is_jpeg(view):
        image_size(view)
        if not data.endswith(_END_OF_IMAGE) and data.find(_END_OF_IMAGE, frame_and_scan(view)[3]) < 0:
            raise ValueError("the JPEG is cut short: its end-of-image marker is missing")  # a thumbnail's is ignored
    elif data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise ValueError("the WEBP is cut short")
    else:
        read_with_pillow(view, lambda image: image.verify(), sys.maxsize)


@dataclass(frozen=True, slots=True)
class Resizing:
    """Resize larger images to a shorter side of `size` pixels, and encode them as JPEG (4:2:0 or grey).

    The EXIF orientation is applied; transparency, metadata, colour profiles and later frames are dropped.
    """

    size: int
    quality: int

    def __call__(self, field: str, data: bytes) -> tuple[str, bytes]:
        """Return the field and bytes to store, unchanged for a small image. Raises ValueError for a damaged image."""
        import simplejpeg

        prefix, dot, _ = field.rpartition(".")
        view = memoryview(data)
        if min(image_size(view)) <= self.size:
            return field, data
        pixels = _upright(Resize(self.size).from_encoded(view), data)
        is_grey = bool((pixels == pixels[..., :1]).all())
        colours, spaces = (pixels[..., :1], ("GRAY", "Gray")) if is_grey else (pixels, ("RGB", "420"))
        encoded = simplejpeg.encode_jpeg(np.ascontiguousarray(colours), self.quality, *spaces, fastdct=False)
        return f"{prefix}{dot}jpg", bytes(encoded)


def _upright(pixels: NDArray[np.uint8], data: bytes) -> NDArray[np.uint8]:
    """Apply the EXIF orientation in `data`, the encoded image; ignore damaged metadata."""
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
