"""What a field holds, by the last extension of its name: one table, for writing and for reading.

Names and meanings are WebDataset's where it has them. Of those that WebDataset reads, pickles (`pyd`, `pkl`, `pickle`)
are left out, since reading them runs code, and so is its own tensor format (`ten`, `tb`). `class` is left out too:
WebDataset writes it from anything and reads it as bytes, and files of that name hold names as often as numbers.
"""

from __future__ import annotations

from enum import Enum, auto


class Kind(Enum):
    """What is in a field."""

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
    """What `torch.save` wrote."""
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
}
"""Images, and the name that Pillow has for the format. When they are read, the first bytes decide, not the name."""

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
"""By extension, in lower case. All others hold bytes."""
