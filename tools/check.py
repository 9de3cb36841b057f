"""Whether bytes are a whole image of a kind that streamload reads, as cheaply as that can be known."""

from __future__ import annotations

import io
import warnings

__all__ = ["fault_of_image"]

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_START_OF_SCAN = 0xDA


def fault_of_image(data: bytes) -> str | None:
    """What is wrong with an image, or None.

    Whatever its name says, the content decides: JPEG, PNG, WebP, BMP, GIF and TIFF are known by their signatures. A
    JPEG's header is parsed and the end of its image must be there behind the start of its scan; of the others Pillow
    checks the structure (for PNG every chunk's checksum). Pixels are not decoded.
    """
    if not data:
        return "it is empty"
    if data.startswith(b"\xff\xd8\xff"):
        return _fault_of_jpeg(data)
    kind = _kind(data)
    return "its content is not an image of a known kind" if kind is None else _fault_for_pillow(data, kind)


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


def _fault_of_jpeg(data: bytes) -> str | None:
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as exc:
        return f"its JPEG header cannot be read: {exc}"
    scan = _scan_offset(data)
    if not height or not width or scan is None:
        return "its JPEG header holds no image"
    # In the scan a 0xFF of the data is followed by a zero, so this pair can only be the end of the image. What
    # cameras append behind it does no harm; a preview in the header has an end of its own, hence the start at the scan.
    return None if data.find(b"\xff\xd9", scan) >= 0 else "the JPEG is cut short: its end-of-image mark is missing"


def _scan_offset(data: bytes) -> int | None:
    """Where the first scan starts, found by going from segment to segment."""
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
            warnings.simplefilter("ignore")  # of oddities that do no harm, such as metadata in a strange form
            with io.BytesIO(data) as file, Image.open(file, formats=(kind,)) as image:
                image.verify()
    except Exception as exc:  # whatever Pillow's plugins meet: OSError, SyntaxError, struct.error, ...
        raise _DamagedError(str(exc) or type(exc).__name__) from exc


class _DamagedError(Exception):
    """Pillow refused an image."""
