"""Describe the samples of a source: their keys, members and labels."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from streamload.pack.run import UsageError
from streamload.text import counted

# Extensions of images, and the fields that they are stored as.
IMAGE_FIELDS = dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpg") | {
    name: name for name in ("png", "webp", "bmp", "gif", "tif", "tiff", "avif")
}
ARRAY_FIELDS = ("npy", "pt", "pth")  # extensions of files with one array or tensor each
COLUMNS_FIELD = "json"  # the field of a table's other columns
SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # also the name of a folder

_SOUNDS = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_NOT_IN_FIELDS = re.compile(r"[^a-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Say how to read a source. Attributes are named like the command's options; if one is None, the source decides."""

    labels: str | None = None
    stems: bool | None = None
    follow_symlinks: bool = False
    classes: tuple[str, ...] | None = None
    label_column: str | None = None
    labels_as_names: bool = False
    path_column: tuple[str, ...] = ()
    text_column: tuple[str, ...] = ()
    keep_columns: bool = False
    split_column: str | None = None


class SourceFile(NamedTuple):
    """A member of a sample: a file, a value of a table, or a row of an array.

    Attributes:
        path: the file's path, or the place of the value in its table.
        field: the field, or None if it cannot be packed.
        content: a table's value as bytes; None for files and rows.
        size: the size when listed; -1 for a file that cannot be read.
        array: for a row, the name of its array; the row is stored as npy of `size` bytes. Otherwise None.
    """

    path: str
    field: str | None
    content: bytes | None = None
    size: int = -1
    mtime_ns: int = -1
    array: str | None = None
    row: int = 0


def file_at(path: str, field: str | None) -> SourceFile:
    """Return a file with its size and time. An unreadable file is reported when it is packed."""
    try:
        status = os.stat(path)
    except OSError:
        return SourceFile(path, field)
    return SourceFile(path, field, None, status.st_size, status.st_mtime_ns)


class SourceSample(NamedTuple):
    """A sample whose files are read when it is packed. `values` are further fields with their content."""

    key: str
    members: tuple[SourceFile, ...]
    label: int | None = None
    values: tuple[tuple[str, bytes], ...] = ()

    def meaning(self) -> tuple[object, ...]:
        """Return a tuple that determines the stored bytes, with digests in place of members' contents."""
        members = [
            member if member.content is None else member._replace(content=hashlib.sha256(member.content).digest())
            for member in self.members
        ]
        return self.key, self.label, self.values, *map(tuple, members)


@dataclass(frozen=True, slots=True)
class Source:
    """The content of a source.

    Attributes:
        samples: in packing order, unless they are shuffled.
        classes: the names of the classes by label, or None.
        notes: for the user, on choices, skipped files and likely mistakes.
        parts: the positions in `samples` of each split that the source defines, or None.
    """

    samples: tuple[SourceSample, ...]
    classes: tuple[str, ...] | None
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Sequence[int]] | None = None


def extension_of(path: str) -> str:
    """Return the extension of a file's name; of a `.gz` file, the last two (`npy.gz`)."""
    stem, _, extension = path.rpartition("/")[2].rpartition(".")
    if extension.lower() == "gz" and "." in stem:
        return f"{stem.rpartition('.')[2]}.{extension}"
    return extension if stem else ""


@cache
def field_named(extension: str) -> str | None:
    """Return the field for an extension such as `JPEG` or `mask.png`; None if it cannot be a field."""
    pieces = extension.lower().split(".")
    pieces[-1] = IMAGE_FIELDS.get(pieces[-1], pieces[-1])
    field = ".".join(pieces)
    reserved = field.startswith("__") and field.endswith("__")
    return field if all(pieces) and field.isprintable() and not reserved else None


def field_prefix(name: str) -> str:
    """Return a prefix that distinguishes the fields of a column or folder."""
    return (_NOT_IN_FIELDS.sub("_", name.lower()).strip("_") or "column") + "."


def is_image(field: str) -> bool:
    """Return True if a field such as `mask.png` is an image by its extension."""
    return field.rpartition(".")[2] in IMAGE_FIELDS


def kind_of(path: str) -> str:
    """Return `image`, `sound`, or the extension of a file."""
    extension = extension_of(path).lower()
    return "image" if extension in IMAGE_FIELDS else "sound" if extension in _SOUNDS else extension


def is_data(path: str) -> bool:
    """Return True for images, sound, arrays and tensors."""
    return kind_of(path) in ("image", "sound", *ARRAY_FIELDS)


def unique_key(stem: str, used: set[str]) -> str:
    """Return a valid key for a path without its extension, and add it to `used`."""
    names = [name for name in _UNSAFE.sub("_", stem).split("/") if name not in ("", ".", "..")] or ["_"]
    names[-1] = names[-1].replace(".", "_")
    for place in (0, -1):
        if names[place].startswith("__"):
            names[place] = f"x{names[place]}"
    key = "/".join(names)
    number, candidate = 1, key
    while candidate in used:
        number += 1
        candidate = f"{key}-{number}"
    used.add(candidate)
    return candidate


def numbers_of_classes(names: Sequence[str], classes: Sequence[str], where: Callable[[int], str]) -> list[int]:
    """Return the position of each name in `classes`. Raise UsageError for an unknown name, with its place."""
    number_of = {name: number for number, name in enumerate(classes)}
    for position, name in enumerate(names):
        if name not in number_of:
            known = counted(len(classes), "class")
            advice = "correct it, or give a classes.json with all names"
            raise UsageError(f"{where(position)} is {name!r}, which is not in --classes ({known}); {advice}")
    return [number_of[name] for name in names]
