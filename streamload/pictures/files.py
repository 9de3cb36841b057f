"""Pictures as files: on its own because sheets and charts are written alike, and refused before work is done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from streamload.errors import without_secrets
from streamload.storage.local_files import replace_file

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["check_picture_path", "save_picture"]

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_MOST_PIXELS = {"PNG": 1 << 31, "JPEG": 65_500, "WEBP": 16_383}


def check_picture_path(argument: str, path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written, before there is a picture.

    Raises:
        ValueError: its name does not end in .png, .jpg or .webp, or it is a url.
        OSError: its folder does not exist or may not be written.
    """
    given = os.fspath(path)
    if "://" in given:
        raise ValueError(f"{argument}={without_secrets(given)!r} is a url; name a file on a local disk")
    if os.path.splitext(given)[1].lower() not in _FORMATS:
        raise ValueError(f"{argument}={given!r} must end in .png, .jpg or .webp, which says what is written")
    folder = os.path.dirname(os.path.abspath(given))
    if not os.path.isdir(folder):
        raise FileNotFoundError(2, "there is no such folder; make it first", folder)
    if os.path.isdir(given):
        raise IsADirectoryError(21, "this is a folder; name a file in it", given)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "this folder may not be written; name a file elsewhere", folder)


def save_picture(picture: Image, path: str | os.PathLike[str]) -> None:
    """Write a picture to a file, which is replaced at once.

    Raises:
        ValueError: it has more pixels in a column or row than its format takes.
        OSError: the file cannot be written.
    """
    given = os.fspath(path)
    kind = _FORMATS[os.path.splitext(given)[1].lower()]
    if max(picture.size) > _MOST_PIXELS[kind]:
        raise ValueError(
            f"the picture has {picture.width} x {picture.height} pixels, and {kind} takes {_MOST_PIXELS[kind]:,} on a "
            "side; draw fewer samples, more columns, or a .png"
        )
    options: dict[str, Any] = {"optimize": True} if kind == "PNG" else {"quality": 90}
    try:
        replace_file(given, lambda file: picture.save(file, kind, **options), durable=False)
    except OSError as error:  # it names a temporary file
        raise type(error)(error.errno, error.strerror or str(error), given) from error
