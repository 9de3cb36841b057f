"""A source: files with keys, fields and labels, however they are listed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

from streamload.text import counted

__all__ = [
    "ARRAY_FIELDS",
    "IMAGE_FIELDS",
    "SAMPLE_FIELDS",
    "SPLIT_NAME",
    "KeyedFiles",
    "Source",
    "SourceError",
    "SourceFile",
    "field_of",
    "is_label",
    "numbered_labels",
    "numbers_of_classes",
    "other_kinds_advice",
    "safe_key",
]

_JPEG = ("jpg", "jpeg", "jpe", "jfif")
IMAGE_FIELDS = dict.fromkeys(_JPEG, "jpg") | {name: name for name in ("png", "webp", "bmp", "gif", "tif", "tiff")}
"""The extensions of images, and the field that each is stored under."""

ARRAY_FIELDS = {"npy": "npy", "pt": "pt", "pth": "pth"}
"""The extensions of files that hold one array or tensor each, and the field that each is stored under."""

SAMPLE_FIELDS = IMAGE_FIELDS | ARRAY_FIELDS
"""Both."""

SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""The names that a split may have, since its folder has the same."""

_NAMED = 5
_LEAST_LABEL, _LARGEST_LABEL = -(1 << 63), (1 << 63) - 1
_LABEL_DIGITS = len(str(_LARGEST_LABEL))  # Python refuses to make a number of very many
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_NAME = r"[^_./\x00-\x1f\x7f\ud800-\udfff][^./\x00-\x1f\x7f\ud800-\udfff]*"
_PLAIN = re.compile(f"{_NAME}(?:/{_NAME})*")


class SourceError(Exception):
    """The source cannot be packed as it is; the message says why and what to do."""


class SourceFile(NamedTuple):
    """The file of one sample.

    Attributes:
        path: its path.
        label: the number of its class.
        key: the sample's unique key.
        field: the field that it is stored as, or None if its extension does not belong in this source.
        columns: JSON of a table's other columns, stored as the field `json`, or None.
    """

    path: str
    label: int
    key: str
    field: str | None
    columns: bytes | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The content of a source.

    Attributes:
        files: in packing order without a shuffle.
        classes: the names of the classes by label; None if labels are numbers without names.
        noun: the word for a file in messages.
        notes: what was skipped, and what looks like a mistake; one line each.
        parts: the positions in `files` of each split that the user defined, or None.
    """

    files: tuple[SourceFile, ...]
    classes: tuple[str, ...] | None
    noun: str = "image"
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Sequence[int]] | None = field(default=None)


class KeyedFiles:
    """Creates the files of one source with unique keys.

    Args:
        fields: the extensions that belong in the source, and the field of each.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields
        self._taken: set[str] = set()

    def file(self, path: str, relative: str, label: int, columns: bytes | None = None) -> SourceFile:
        """The file at `path`, with a key made of its path relative to the dataset's root."""
        key = self._unique(safe_key(relative, self._fields))
        return SourceFile(path, label, key, field_of(path, self._fields), columns)

    def _unique(self, key: str) -> str:
        """The key, with a number appended if another file has it, such as `a.jpg` and `a.png` in one folder."""
        number, candidate = 1, key
        while candidate in self._taken:
            number += 1
            candidate = f"{key}-{number}"
        self._taken.add(candidate)
        return candidate


def field_of(path: str, fields: Mapping[str, str]) -> str | None:
    """The field for a file's extension, or None."""
    return fields.get(os.path.splitext(path)[1][1:].lower())


def other_kinds_advice(paths: Sequence[str]) -> str | None:
    """What to do with files that are not packed, such as sound or text; None if there are none."""
    extensions = {os.path.splitext(path)[1][1:].lower() for path in paths} - SAMPLE_FIELDS.keys() - {""}
    if not extensions:
        return None
    kinds = ", ".join(f".{extension}" for extension in sorted(extensions)[:_NAMED])
    fields = ", ".join(f'"{extension}": its bytes' for extension in sorted(extensions)[:2])
    return (
        f"shardify packs images, .npy and .pt files, and not {kinds}; pack other samples with ShardWriter: with "
        f'streamload.ShardWriter(DEST) as writer: writer.write({{"__key__": "0001", {fields}, "cls": 0}})'
    )


def safe_key(relative: str, fields: Mapping[str, str]) -> str:
    """A path as a key: without its extension, without a dot in its last component, and valid as a name in a tar.

    Args:
        relative: the file's path relative to the dataset's root; `..` and a leading slash are removed.
        fields: the extensions to remove.
    """
    plain, _, extension = relative.rpartition(".")
    if extension.lower() in fields and _PLAIN.fullmatch(plain):
        return plain  # as nearly all are; the rest of this function takes five times as long
    stem, extension = os.path.splitext(relative)
    if extension[1:].lower() not in fields:
        stem = relative
    folders = [piece for piece in _UNSAFE.sub("_", stem).split("/") if piece not in ("", ".", "..")]
    name = folders.pop().replace(".", "_") if folders else "_"
    if name.startswith("__"):
        name = f"x{name}"
    if folders and folders[0].startswith("__"):
        folders[0] = f"x{folders[0]}"
    return "/".join((*folders, name))


def is_label(value: object) -> TypeGuard[str | int]:
    """Whether a value of a table or mapping can be a label: an integer or the name of a class."""
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def numbers_of_classes(names: Sequence[str], classes: Sequence[str], where: Callable[[int], str]) -> list[int]:
    """The number of each name, which is its position in `classes`.

    Raises:
        SourceError: a name is not among them; `where` describes the place of a name, by its position.
    """
    number_of = {name: number for number, name in enumerate(classes)}
    for position, name in enumerate(names):
        if name not in number_of:
            raise SourceError(
                f"{where(position)} is {name!r}, which --classes does not have ({counted(len(classes), 'class')}); "
                "correct it, or give a classes.json that has all classes, such as that of all data packed together"
            )
    return [number_of[name] for name in names]


def numbered_labels(
    labels: Sequence[str | int],
    where: Callable[[int], str],
    *,
    as_names: bool = False,
    classes: tuple[str, ...] | None = None,
) -> tuple[list[int], tuple[str, ...] | None]:
    """Labels as numbers, and the names of the classes if the labels are names.

    Integers stay as they are. Anything else is a name, and classes are numbered in the order of their names, as in an
    ImageFolder.

    Args:
        labels: as read.
        where: describes the place of a label, by its position.
        as_names: treat integers as names.
        classes: the given names by number, or None; with it, integers are names too.

    Raises:
        SourceError: a name is unknown; an integer has more than 64 bits; or most labels are numbers and some are not
            integers, in which case treating all of them as names would change the number of every class.
    """
    if classes is not None:
        return numbers_of_classes([str(label) for label in labels], classes, where), classes
    if not as_names and all(isinstance(label, int) or _is_number(label) for label in labels):
        numbers = [int(label) for label in labels]
        for number in numbers:
            if not _LEAST_LABEL <= number <= _LARGEST_LABEL:
                raise SourceError(f"the label {number} is too large; a label has 64 bits, one of them for its sign")
        return numbers, None
    names = [str(label) for label in labels]
    if not as_names:
        _refuse_odd_number(names, where)
    found = tuple(sorted(set(names)))
    return numbers_of_classes(names, found, where), found


def _refuse_odd_number(labels: Sequence[str], where: Callable[[int], str]) -> None:
    if 2 * sum(map(_is_any_number, labels)) <= len(labels):
        return
    position, odd = next((place, label) for place, label in enumerate(labels) if not _is_number(label))
    raise SourceError(
        f"{where(position)} is {odd!r}, and most labels are numbers: correct it, or give --labels-as-names if they are "
        "the names of classes; numbers that are no classes, as in regression, are written with streamload.ShardWriter"
    )


def _is_any_number(text: str) -> bool:
    """Whether a text is an integer or a float; digits after a leading zero, as in `01`, are a name."""
    if _is_number(text):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return not text.removeprefix("-").isdigit()


def _is_number(text: str) -> bool:
    """Whether a text is an integer as Python writes it: `01` is a name, and another class than `1`."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _LABEL_DIGITS):
        return False
    return str(int(text)) == text and _LEAST_LABEL <= int(text) <= _LARGEST_LABEL
