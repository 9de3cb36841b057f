"""Read and check the members of samples."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
import zipfile

from streamload.decode.array_files import npy_layout
from streamload.images.files import check_image, image_size, read_with_pillow
from streamload.images.jpeg import is_jpeg
from streamload.pack.sources.source import SourceFile, is_image

_STANDALONE = frozenset({0x01, 0xFF, *range(0xD0, 0xD8)})
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = b"\xff\xd9"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def load(member: SourceFile) -> bytes:
    """Return the bytes of a member. Raises ValueError, which says why it cannot be packed."""
    if member.field is None:
        missing = "it has no extension to name its field"
        raise ValueError("it is of another kind than most files in the class folders" if member.decodable else missing)
    data = member.content
    try:
        data = read_regular(member.path) if data is None else data
    except OSError as exc:
        raise ValueError(f"it cannot be read: {exc.strerror or exc}") from exc
    if data is None:
        raise ValueError("it is not a regular file")
    if member.size not in (-1, len(data)):
        raise ValueError(f"it had {member.size:,} bytes when packing began, and has {len(data):,} now")
    if is_image(member.field):
        check_image_file(data, decodable=member.decodable)
    else:
        _check_content(member.field.rpartition(".")[2], data)
    return data


def read_regular(path: str) -> bytes | None:
    """Return the bytes of a file; None for a folder or a pipe. Raises OSError."""
    # Without O_NONBLOCK, opening a named pipe would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _check_content(extension: str, data: bytes) -> None:
    if extension in ("npy", "pt", "pth") and not data:
        raise ValueError("it is empty")
    end, is_torch = 0, True
    try:
        if extension in ("json", "jsn"):
            json.loads(data)
        elif extension == "npy":
            end = npy_layout(memoryview(data)).end
        elif extension in ("pt", "pth") and not data.startswith(_OLD_TORCH):  # nothing is unpickled
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                is_torch = any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, NotImplementedError) as exc:
        raise ValueError(f"the file is damaged or cut short: {exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"it is not {extension.upper()} ({exc})") from exc
    if not is_torch:
        raise ValueError("torch.save did not write it")
    if len(data) < end:
        raise ValueError(f"the array is cut short: {len(data):,} of {end:,} bytes are there")


def check_image_file(data: bytes, *, decodable: bool = True) -> None:
    """Raise ValueError for a damaged image; with `decodable`, also for one that loaders refuse. Decodes no pixels.

    A JPEG needs an end-of-image marker after the start of its scan; Pillow checks the structure of other formats.
    """
    view = memoryview(data)
    if not data:
        raise ValueError("it is empty")
    if is_jpeg(view):
        if not decodable:
            image_size(view)
        if not data.endswith(_END_OF_IMAGE) and data.find(_END_OF_IMAGE, _first_scan(data)) < 0:
            raise ValueError("the JPEG is cut short: its end-of-image marker is missing")
    elif data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise ValueError("the WEBP is cut short")
    else:
        read_with_pillow(view, lambda image: image.verify(), sys.maxsize)
    try:
        if decodable:
            check_image(view)
    except ValueError as exc:
        raise ValueError(f"loaders refuse it: {exc} (--stems or a table packs it as it is)") from exc


def _first_scan(data: bytes) -> int:
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == _START_OF_SCAN:
            return position
        if marker in _STANDALONE:
            position += 1 if marker == 0xFF else 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return len(data)
