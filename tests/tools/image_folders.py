"""Small ImageFolders for the tests of the command line."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

FORMATS = {
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".png": "PNG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".tif": "TIFF",
}


def image_bytes(number: int, extension: str = ".jpg") -> bytes:
    """A whole image, different for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (9, 11, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, FORMATS[extension.lower()])
    return buffer.getvalue()


def image_folder(root: Path, *names: str) -> Path:
    """A folder with these images, each of the kind of its extension."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(number, path.suffix))
    return root


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, by its relative path."""
    return {
        os.path.relpath(os.path.join(top, name), folder): Path(top, name).read_bytes()
        for top, _, names in os.walk(folder)
        for name in names
    }
