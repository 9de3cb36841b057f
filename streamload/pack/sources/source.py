"""A source: samples with keys, members and labels, however they are listed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeGuard

from streamload.text import counted

_JPEG = ("jpg", "jpeg", "jpe", "jfif")
IMAGE_FIELDS = dict.fromkeys(_JPEG, "jpg") | {name: name for name in ("png", "webp", "bmp", "gif", "tif", "tiff")}
"""The extensions of images, and the field that each is stored under."""

ARRAY_FIELDS = {"npy": "npy", "pt": "pt", "pth": "pth"}
"""The extensions of files that hold one array or tensor each, and the field that each is stored under."""

SAMPLE_FIELDS = IMAGE_FIELDS | ARRAY_FIELDS
"""Both."""

COLUMNS_FIELD = "json"
"""The field of a table's other columns."""

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
    """A file that is a member of a sample.

    Attributes:
        path: its path.
        field: the field that it is stored as, or None if its extension does not belong in this source.
        decodable: whether loaders have to decode it by default; if not, only what is damaged for certain is a fault.
    """

    path: str
    field: str | None
    decodable: bool = True


class ArrayRow(NamedTuple):
    """A row of an array that is a member of a sample, stored as npy.

    Attributes:
        path: the file of the array.
        field: the field that it is stored as.
        array: the name of the array in its file, "" if it has none.
        row: its number.
        size: the bytes of its npy file.
    """

    path: str
    field: str
    array: str
    row: int
    size: int


class SourceSample(NamedTuple):
    """One sample, whose content is read when it is packed.

    Attributes:
        key: its unique key.
        members: what is read.
        label: the number of its class, stored as the field `cls` behind the members, or None.
        values: more fields and their content, stored behind the label.
    """

    key: str
    members: tuple[SourceFile | ArrayRow, ...]
    label: int | None = None
    values: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """The content of a source.

    Attributes:
        samples: in packing order without a shuffle.
        classes: the names of the classes by label; None if labels are numbers without names, or there are none.
        noun: the word for a sample in messages.
        notes: what was skipped, and what looks like a mistake; one line each.
        parts: the positions in `samples` of each split that the user defined, or None.
        fields: what a sample has besides label and columns: for each of its members the fields that it may be stored
            as. None if each sample has one member.
        in_memory: whether each process that packs has to hold all of it in memory.
    """

    samples: tuple[SourceSample, ...]
    classes: tuple[str, ...] | None
    noun: str = "image"
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Sequence[int]] | None = field(default=None)
    fields: tuple[tuple[str, ...], ...] | None = None
    in_memory: bool = False


class KeyedSamples:
    """Creates the samples of one source that have a file each, with unique keys.

    Args:
        fields: the extensions that belong in the source, and the field of each.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields
        self._taken: set[str] = set()

    def sample(self, path: str, relative: str, label: int, values: tuple[tuple[str, bytes], ...] = ()) -> SourceSample:
        """The sample of the file at `path`, with a key made of its path relative to the dataset's root."""
        key = self.unique(safe_key(relative, self._fields))
        return SourceSample(key, (SourceFile(path, field_of(path, self._fields)),), label, values)

    def unique(self, key: str) -> str:
        """The key, with a number appended if another sample has it, such as `a.jpg` and `a.png` in one folder."""
        number, candidate = 1, key
        while candidate in self._taken:
            number += 1
            candidate = f"{key}-{number}"
        self._taken.add(candidate)
        return candidate


def field_of(path: str, fields: Mapping[str, str]) -> str | None:
    """The field for a file's extension, or None."""
    return fields.get(os.path.splitext(path)[1][1:].lower())


@cache
def field_named(extension: str) -> str | None:
    """The field for an extension of any kind, such as `JPEG` or `mask.png`, or None if there can be none."""
    pieces = extension.lower().split(".")
    pieces[-1] = IMAGE_FIELDS.get(pieces[-1], pieces[-1])
    field = ".".join(pieces)
    reserved = field.startswith("__") and field.endswith("__")
    return field if all(pieces) and field.isprintable() and not reserved else None


def is_image(field: str) -> bool:
    """Whether a field such as `png` or `mask.png` is an image by its extension."""
    return field.rpartition(".")[2] in IMAGE_FIELDS


def other_kinds_advice(paths: Sequence[str]) -> str | None:
    """How to pack files that are not packed so, such as sound or text; None if there are none."""
    extensions = {os.path.splitext(path)[1][1:].lower() for path in paths} - SAMPLE_FIELDS.keys() - {""}
    if not extensions:
        return None
    kinds = ", ".join(f".{extension}" for extension in sorted(extensions)[:_NAMED])
    return (
        f"class folders and --labels are for images, .npy and .pt files, and not for {kinds}; to pack any files, "
        "list their paths and labels in a .csv, or give --stems: those that share a name are a sample without a label"
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
    return key_of(stem if extension[1:].lower() in fields else relative)


def key_of(stem: str) -> str:
    """A path without its extension as a key: without a dot in its last component, and valid as a name in a tar."""
    if _PLAIN.fullmatch(stem):
        return stem
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
