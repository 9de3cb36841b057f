"""Map the last extension of a field's name to the kind of the field, for writing and reading alike.

WebDataset's names keep their meanings, with three exceptions: pickles (`pyd`, `pkl`, `pickle`) stay bytes, since
reading them runs code; its tensor format (`ten`, `tb`) is unknown; so is `class`, which holds names as often as
numbers. Other names, such as `caption`, are additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from streamload.arguments import alternatives, normal_name


class Kind(Enum):
    """The content of a field."""

    IMAGE = auto()
    """An encoded image."""
    TEXT = auto()
    """Text in UTF-8."""
    INTEGER = auto()
    """One decimal integer as text."""
    JSON = auto()
    MSGPACK = auto()
    CBOR = auto()
    ARRAY = auto()
    """One NumPy array."""
    ARRAYS = auto()
    """NumPy arrays by name."""
    SAFETENSORS = auto()
    TORCH = auto()
    """A file that `torch.save` wrote."""
    PICKLE = auto()
    """Read and written only as bytes."""


IMAGE_FORMATS = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "JPEG"),
    **dict.fromkeys(("png", "apng"), "PNG"),
    **dict.fromkeys(("tif", "tiff"), "TIFF"),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "PPM"),
    "webp": "WEBP",
    "bmp": "BMP",
    "gif": "GIF",
    "avif": "AVIF",
}
"""Extensions of images, with Pillow's names for the formats. The first bytes decide how an image is read."""

_TEXT = ("txt", "text", "transcript", "caption", "jsonl", "csv", "tsv", "xml", "html", "htm", "md", "yaml", "yml")

KIND_OF: dict[str, Kind] = {
    **dict.fromkeys(IMAGE_FORMATS, Kind.IMAGE),
    **dict.fromkeys(_TEXT, Kind.TEXT),
    **dict.fromkeys(("cls", "cls2", "count", "index", "inx", "id"), Kind.INTEGER),
    **dict.fromkeys(("json", "jsn"), Kind.JSON),
    **dict.fromkeys(("msgpack", "msg", "mp"), Kind.MSGPACK),
    "cbor": Kind.CBOR,
    "npy": Kind.ARRAY,
    "npz": Kind.ARRAYS,
    "safetensors": Kind.SAFETENSORS,
    **dict.fromkeys(("pt", "pth"), Kind.TORCH),
    **dict.fromkeys(("pkl", "pickle", "pyd"), Kind.PICKLE),
}
"""Kinds by extension, in lower case. Fields with other extensions hold bytes."""

Handler = Callable[[str, Any], Any]
"""A WebDataset decoder: a function of the extension, such as ".jpg", and bytes, which returns None to decline."""

Decode = bool | Mapping[str, Callable[[Any], Any] | Handler | Sequence[Handler]] | Handler | Sequence[Handler]
"""The argument `decode`; once checked, handlers are a tuple."""


def decodes_as_built_in(field: str, decode: Decode = True) -> bool:
    """Return True if a field's decoder is built in; a faster one may then replace it."""
    if not isinstance(decode, Mapping):
        return decode is True
    names = {name for key in decode for name in alternatives(key)}
    return normal_name(field) not in names and last_extension(normal_name(field)) not in names


def applies_to(key: str, field: str) -> bool:
    """Return True if a decoder for this key (fields or extensions) is used for a field."""
    names, field = alternatives(key), normal_name(field)
    return any(not {each, last_extension(each)}.isdisjoint(names) for each in (field, field.removesuffix(".gz")))


def is_image(field: str) -> bool:
    """Return True if a field is decoded as an image by default."""
    return KIND_OF.get(last_extension(normal_name(field))) is Kind.IMAGE


def is_array(field: str) -> bool:
    """Return True if a field is decoded as an npy file by default."""
    return KIND_OF.get(last_extension(normal_name(field))) is Kind.ARRAY


def last_extension(field: str) -> str:
    """Return the extension that decides how a field is decoded."""
    return field.rpartition(".")[2]
