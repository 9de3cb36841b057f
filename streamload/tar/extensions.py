"""What a field holds, by the last extension of its name: one table, for writing and for reading.

Names and meanings are WebDataset's where it has them. Of those that WebDataset reads, pickles (`pyd`, `pkl`, `pickle`)
are left out, since reading them runs code, and so is its own tensor format (`ten`, `tb`). `class` is left out too:
WebDataset writes it from anything and reads it as bytes, and files of that name hold names as often as numbers.
"""

from __future__ import annotations

__all__ = [
    "ARRAY",
    "ARRAYS",
    "CBOR",
    "IMAGE_FORMATS",
    "INTEGER",
    "JSON",
    "MSGPACK",
    "PICKLE",
    "SAFETENSORS",
    "TEXT",
    "TORCH",
]

TEXT = frozenset(
    {"txt", "text", "transcript", "caption", "jsonl", "csv", "tsv", "xml", "html", "htm", "md", "yaml", "yml"}
)
"""Text in UTF-8."""

INTEGER = frozenset({"cls", "cls2", "count", "index", "inx", "id"})
"""One decimal integer as text."""

JSON = frozenset({"json", "jsn"})
MSGPACK = frozenset({"msgpack", "msg", "mp"})
CBOR = frozenset({"cbor"})
ARRAY = frozenset({"npy"})
ARRAYS = frozenset({"npz"})
SAFETENSORS = frozenset({"safetensors"})

TORCH = frozenset({"pt", "pth"})
"""What `torch.save` wrote."""

PICKLE = frozenset({"pkl", "pickle", "pyd"})
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
