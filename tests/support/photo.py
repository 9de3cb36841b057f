"""Pictures and their files: a photograph, files by Pillow, PNG made by hand."""

from __future__ import annotations

import inspect
import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from streamload.decode.rows import UserFunction


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def called(operation: Any, image: Any, seed: int = 0, **options: Any) -> Any:
    """What an operation makes, with a generator if it takes one."""
    if "rng" in inspect.signature(operation).parameters:
        options["rng"] = rng(seed)
    return operation(image, **options)


def from_encoded(operation: Any, data: bytes, seed: int = 0, out: Any = None) -> Any:
    """What an operation, or a chain of them, makes of a file."""
    function, generator = UserFunction(operation), rng(seed)
    value = function.from_encoded(memoryview(data), generator, out)
    return value if function.rest is None else function.rest(value, generator, out)


def encoded(pixels: NDArray[Any], file_format: str = "JPEG", mode: str | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image if mode in (None, image.mode) else image.convert(mode)).save(file, file_format, **options)
    return file.getvalue()


def png_file(height: int, width: int, bits: int, colour_type: int, rows: bytes = b"") -> bytes:
    """A PNG of any kind, also of those that no library writes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def photo(height: int, width: int) -> NDArray[np.uint8]:
    """Smooth shapes, edges and some grain, as a photograph has."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    shades = [np.sin(7 * x + 3 * y), np.cos(11 * y - 4 * x * y), ((x - 0.5) ** 2 + (y - 0.3) ** 2 < 0.05) * 1.0]
    grain = np.random.default_rng(1).normal(0, 0.02, (height, width, 3))
    return (np.clip(np.stack(shades, axis=2) / 2.5 + 0.5 + grain, 0, 1) * 255).astype(np.uint8)
