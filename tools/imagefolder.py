"""The images of an ImageFolder: one folder for each class, numbered in the order of their names.

The convention is torchvision's `ImageFolder`: classes are the folders directly in the source, sorted; images lie in
them at any depth; symbolic links are followed. Hidden names are passed over and counted, other files are kept in the
list as they may be mistakes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["EXTENSIONS", "ImageFile", "ImageFolder", "ImageFolderError", "find_images"]

EXTENSIONS = {
    name: {"jpeg": "jpg"}.get(name, name) for name in ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
}
"""The extensions of images, and the field that each is stored under."""

_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class ImageFolderError(Exception):
    """The source is not an ImageFolder; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One file of a class.

    Attributes:
        path: where it lies.
        label: the number of its class.
        key: the sample's key, `<class>/<path without extension>`, unlike every other.
        field: what it is stored under, or None if its extension is not that of an image.
    """

    path: str
    label: int
    key: str
    field: str | None


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """What an ImageFolder holds.

    Attributes:
        classes: the names of the classes; the position is the label.
        files: every visible file of every class, by class and then by path.
        hidden: how many hidden files and folders were passed over.
        strays: how many files lie in the source outside of every class; none of them has the extension of an image.
    """

    classes: tuple[str, ...]
    files: tuple[ImageFile, ...]
    hidden: int
    strays: int


def find_images(source: str) -> ImageFolder:
    """List an ImageFolder without opening a file.

    Args:
        source: the folder of the class folders.

    Raises:
        ImageFolderError: it is missing, is a file, is empty, has images outside of every class, no class, or classes
            without any file.
        OSError: a folder cannot be listed.
    """
    if not os.path.isdir(source):
        reason = "is a file" if os.path.exists(source) else "does not exist"
        raise ImageFolderError(f"{source!r} {reason}; give the folder that holds one folder for each class")
    names = sorted(os.listdir(source))
    visible = [name for name in names if not name.startswith(".")]
    classes = [name for name in visible if os.path.isdir(os.path.join(source, name))]
    others = [name for name in visible if name not in set(classes)]
    loose = [name for name in others if _field_of(name) is not None]
    if loose:
        raise ImageFolderError(
            f"images lie directly in {source!r}, such as {loose[0]!r}, and so belong to no class; "
            "put them into class folders" + (", or give the folder above this one" if not classes else "")
        )
    if not classes:
        raise ImageFolderError(f"{source!r} holds no class folder; it needs one folder of images for each class")
    hidden = len(names) - len(visible)
    files: list[ImageFile] = []
    taken: set[str] = set()
    for label, name in enumerate(classes):
        paths, hidden_here = _files_below(os.path.join(source, name))
        hidden += hidden_here
        for path in sorted(paths):
            key = _unlike(taken, _safe_key(os.path.relpath(path, source)))
            taken.add(key)
            files.append(ImageFile(path, label, key, _field_of(path)))
    if not files:
        raise ImageFolderError(f"no class folder in {source!r} holds a file; there is nothing to pack")
    return ImageFolder(tuple(classes), tuple(files), hidden, len(others))


def _files_below(folder: str) -> tuple[list[str], int]:
    """The visible files below a folder, and the number of hidden names that were passed over."""
    found: list[str] = []
    hidden = 0
    waiting = [(folder, frozenset({_identity(folder)}))]
    while waiting:
        current, above = waiting.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    hidden += 1
                elif not entry.is_dir():
                    found.append(entry.path)
                elif (identity := _identity(entry.path)) not in above:  # a link to a folder above would never end
                    waiting.append((entry.path, above | {identity}))
    return found, hidden


def _identity(folder: str) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def _field_of(path: str) -> str | None:
    return EXTENSIONS.get(os.path.splitext(path)[1][1:].lower())


def _safe_key(relative: str) -> str:
    """A path as a key: without extension, without a dot in its last component, and nothing that a tar cannot name."""
    stem = os.path.splitext(relative)[0] if _field_of(relative) else relative
    folder, name = os.path.split(_UNSAFE.sub("_", stem))
    name = name.replace(".", "_")
    if name.startswith("__"):
        name = f"x{name}"
    if folder.startswith("__"):
        folder = f"x{folder}"
    return f"{folder}/{name}"


def _unlike(taken: set[str], key: str) -> str:
    """The key, with a number behind it if another file has it already, as `a.jpg` and `a.png` in one folder."""
    number, candidate = 1, key
    while candidate in taken:
        number += 1
        candidate = f"{key}-{number}"
    return candidate
