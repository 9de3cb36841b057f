"""Reading and checking a member of a sample."""

from __future__ import annotations

import io
import json
import os
import stat
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from streamload.decode.array_files import npy_layout
from streamload.images.files import check_image, readable_jpeg_header
from streamload.pack.sources.source import SourceFile, is_image

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_START_OF_SCAN = 0xDA
_END_OF_IMAGE = b"\xff\xd9"
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def fault_of(field: str, data: bytes, *, decodable: bool = True) -> str | None:
    """What is wrong with the content of a file for a field, or None.

    Args:
        field: decides on the kind by its extension; there is nothing to say of most.
        data: the content.
        decodable: it is a fault of an image too if loaders do not decode it by default.
    """
    check = _check_of(field)
    if check is fault_of_image:
        return fault_of_image(data, decodable=decodable)
    return None if check is None else check(data)


@cache
def _check_of(field: str) -> Callable[[bytes], str | None] | None:
    if is_image(field):
        return fault_of_image
    return _CHECKS.get(field.rpartition(".")[2])


def fault_of_image(data: bytes, *, decodable: bool = True) -> str | None:
    """What is wrong with an image, or None.

    The format is that of the content, not of the name: JPEG, PNG, WebP, BMP, GIF or TIFF by signature. A JPEG must have
    a valid header and an end-of-image marker after the start of its scan; of other formats Pillow checks the structure
    (for PNG the checksum of every chunk). If it has to be decodable, what loaders refuse by its header, such as 16 bits
    per channel, is a fault too. Pixels are not decoded.
    """
    if not data:
        return "it is empty"
    if data.startswith(b"\xff\xd8\xff"):
        return _fault_of_jpeg(data, decodable=decodable)
    kind = _kind(data)
    if kind is None:
        return "its content is not an image of a known kind"
    return _fault_for_pillow(data, kind) or (_refusal(data) if decodable else None)


def _refusal(data: bytes) -> str | None:
    """Why a loader would refuse an intact image, or None."""
    try:
        check_image(memoryview(data))
    except ValueError as exc:
        return _refused(exc)
    return None


def _refused(reason: ValueError) -> str:
    return f"loaders refuse it: {reason} (--stems or a table packs it as it is)"


def _kind(data: bytes) -> str | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    return "TIFF" if data.startswith(_TIFF) else None


def _fault_of_jpeg(data: bytes, *, decodable: bool) -> str | None:
    try:
        header = readable_jpeg_header(memoryview(data))
    except ValueError as exc:
        if decodable:
            return _refused(exc)
        header = None
    if header is None:
        return _fault_of_unusual_jpeg(data) or (_refusal(data) if decodable else None)
    return None if data.endswith(_END_OF_IMAGE) else _fault_of_end(data)


def _fault_of_unusual_jpeg(data: bytes) -> str | None:
    """What is wrong with a JPEG whose header may be one that only Pillow reads."""
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except LookupError:  # simplejpeg does not know the subsampling, such as 4:4:1
        return _fault_for_pillow(data, "JPEG")
    except ValueError as exc:
        return f"its JPEG header cannot be read: {exc}"
    return _fault_of_end(data) if height and width else "its JPEG header holds no image"


def _fault_of_end(data: bytes) -> str | None:
    scan = _scan_offset(data)
    if scan is None:
        return "its JPEG header holds no image"
    # In the scan a 0xFF of the data is followed by a zero, so this pair can only be the end of the image. Data that
    # cameras append is harmless; a preview in the header has a marker of its own, so the search starts at the scan.
    # Most files end with the marker, and checking the end first costs a hundredth of a search.
    whole = data.endswith(_END_OF_IMAGE) or data.find(_END_OF_IMAGE, scan) >= 0
    return None if whole else "the JPEG is cut short: its end-of-image marker is missing"


def _scan_offset(data: bytes) -> int | None:
    """The offset of the first scan, found by following the segments."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == _START_OF_SCAN:
            return position
        if marker == 0xFF:
            position += 1
        elif marker in _STANDALONE:
            position += 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None


def _fault_of_npy(data: bytes) -> str | None:
    if not data:
        return "it is empty"
    try:
        layout = npy_layout(memoryview(data))
    except ValueError as exc:
        return f"its header cannot be used: {exc}"
    if len(data) < layout.end:
        return f"the array is cut short: {len(data):,} of {layout.end:,} bytes are there"
    return None


def _fault_of_torch(data: bytes) -> str | None:
    """Check only the archive, since the content would have to be unpickled.

    Files of torch before 1.6 are a plain pickle, of which only the beginning is checked.
    """
    if not data:
        return "it is empty"
    if data.startswith(_OLD_TORCH):
        return None
    if not data.startswith(b"PK"):
        return "its content is not what torch.save writes"
    try:
        with io.BytesIO(data) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as exc:
        return f"the file is damaged or cut short: {exc}"
    return None if any(name.endswith("data.pkl") for name in names) else "its content is not what torch.save writes"


def _fault_of_json(data: bytes) -> str | None:
    try:
        json.loads(data)
    except (ValueError, RecursionError) as exc:
        return f"it is not JSON ({exc})"
    return None


def _fault_for_pillow(data: bytes, kind: str) -> str | None:
    if kind == "WEBP" and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        return "the WEBP is cut short"
    try:
        _verify(data, kind)
    except _DamagedError as exc:
        return f"the {kind} is damaged: {exc}"
    return None


def _verify(data: bytes, kind: str) -> None:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about harmless oddities, such as malformed metadata
            with io.BytesIO(data) as file, Image.open(file, formats=(kind,)) as image:
                image.verify()
    except Exception as exc:  # whatever Pillow's plugins raise: OSError, SyntaxError, struct.error, ...
        raise _DamagedError(str(exc) or type(exc).__name__) from exc


class _DamagedError(Exception):
    """Pillow refused an image."""


# By the last extension of a field that is no image.
_CHECKS = {
    "npy": _fault_of_npy,
    **dict.fromkeys(("pt", "pth"), _fault_of_torch),
    **dict.fromkeys(("json", "jsn"), _fault_of_json),
}


ANY_SIZE = -1
"""A size that is not known."""


class Fault(NamedTuple):
    """A file that cannot be packed, and why."""

    path: str
    reason: str


def load(file: SourceFile, expected_bytes: int = ANY_SIZE) -> tuple[bytes, str | None]:
    """A file's bytes, and why it cannot be packed, or None.

    Args:
        file: the file.
        expected_bytes: its size when it was listed, from which the shards were planned.
    """
    if file.field is None:
        reason = "its extension is not that of an image" if file.decodable else "it has no extension to name its field"
        return b"", reason
    try:
        data = read_regular(file.path)
    except OSError as exc:
        return b"", f"it cannot be read: {exc.strerror or exc}"
    if data is None:
        return b"", "it is not a regular file"
    if expected_bytes not in (ANY_SIZE, len(data)):
        return data, f"it had {expected_bytes:,} bytes when packing began, and has {len(data):,} now"
    return data, fault_of(file.field, data, decodable=file.decodable)


def read_regular(path: str) -> bytes | None:
    """The bytes of a file; None if it is a folder, a pipe or the like. Raises OSError."""
    # Without O_NONBLOCK, opening a named pipe would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        data = os.read(descriptor, found.st_size + 1)
        if len(data) == found.st_size:
            return data
        rest = [data]
        while piece := os.read(descriptor, 1 << 20):
            rest.append(piece)
        return b"".join(rest)
    finally:
        os.close(descriptor)
