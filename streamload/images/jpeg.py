"""Read JPEG headers, and decode no more of a picture than needed.

A JPEG's pixels are packed row by row, so a decoder can stop below the last needed row, but must start at the top.
libjpeg-turbo stops early if the header declares fewer rows, so it gets a copy of the file with such a header. The rows
are bit for bit those of the whole picture.

The inverse transform and the chroma upsampling are libjpeg-turbo's exact ones, as in Pillow. The fast ones save 3 to 7
% of the time but change pixels by up to 6 and 42 of 255, respectively.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]

_MAGIC = b"\xff\xd8\xff"
# Scales, in eighths, at which the inverse transform is cheap; 5/8 to 7/8 cost more than full size. 1/8 is left out: it
# averages values before they are clipped to 0..255, which is visible.
_CHEAP_SCALES = (2, 3, 4)

_BLOCK = 8
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)
_PROGRESSIVE_FRAMES = (0xC2, 0xC6, 0xCA, 0xCE)
_NO_FRAMES = (0xC4, 0xC8, 0xCC)
_STANDALONE = (0x01, *range(0xD0, 0xD8))
_RESTART_INTERVAL, _START_OF_SCAN = 0xDD, 0xDA
_PADDED_END = "extraneous bytes before marker 0xd9"
_DAMAGE = ("Corrupt JPEG", "Premature end")
_UNUSUAL_SCAN = "Invalid SOS parameters"
_WHOLE_SPECTRUM = bytes([0, 63, 0])


class JpegHeader(NamedTuple):
    """The header of a JPEG.

    Attributes:
        colour_space: simplejpeg's name: "RGB", "YCbCr", "Gray", "CMYK" or "YCCK".
        progressive: the picture can have many scans.
        block_rows: the number of rows decoded at a time; 0 if decoding cannot stop early.
        height_at: offset of the two-byte height in the file.
    """

    height: int
    width: int
    colour_space: str
    progressive: bool
    block_rows: int
    height_at: int


def is_jpeg(data: memoryview) -> bool:
    """Return True if the bytes begin like a JPEG."""
    return bytes(data[:3]) == _MAGIC


def jpeg_header(data: memoryview) -> JpegHeader | None:
    """Return the header of a JPEG; None for other bytes, and for a JPEG that only Pillow may be able to read."""
    import simplejpeg

    if not is_jpeg(data):
        return None
    try:
        height, width, colour_space, _ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, LookupError):  # LookupError: a subsampling without a name, such as 4:4:1
        return None
    return JpegHeader(height, width, colour_space, *frame_and_scan(data)[:3])


def frame_and_scan(data: memoryview) -> tuple[bool, int, int, int]:
    """Read `progressive`, `block_rows`, `height_at` and the first scan's offset from the markers (ITU-T T.81, B)."""
    position, end = 2, len(data) - 4
    frame = height_at = components = sampling = 0
    restarts = False
    while position < end and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
            continue
        if marker in _STANDALONE:
            position += 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES:
            if position + 10 > len(data):
                break
            frame, height_at = marker, position + 5
            components = data[position + 9]
            factors = data[position + 11 : position + 11 + 3 * components : 3]
            sampling = max((factor & 15 for factor in factors), default=0)
        elif marker == _RESTART_INTERVAL:
            restarts = True
        elif marker == _START_OF_SCAN:
            one_scan = frame in _SEQUENTIAL_FRAMES and data[position + 4] == components and not restarts
            return frame in _PROGRESSIVE_FRAMES, _BLOCK * sampling if one_scan else 0, height_at, position
        position += 2 + (data[position + 2] << 8 | data[position + 3])
    return True, 0, 0, len(data)  # unknown: treated as progressive, so that `images.files` counts the scans


def smallest_scale(header: JpegHeader, min_height: int, min_width: int) -> int:
    """Return the smallest cheap scale, in eighths, that leaves a minimum height and width; 8 if there is none."""
    for eighths in _CHEAP_SCALES:
        height, width, _ = _scaled(header.height, header.width, eighths)
        if height >= min_height and width >= min_width:
            return eighths
    return 8


def _scaled(height: int, width: int, eighths: int) -> tuple[int, int, int]:
    return -(-height * eighths // 8), -(-width * eighths // 8), 3


def decode_jpeg(
    data: memoryview, header: JpegHeader, *, eighths: int = 8, rows: int | None = None, out: Image | None = None
) -> Image | None:
    """Decode a JPEG that is neither CMYK nor YCCK; None if simplejpeg cannot decode this kind of file.

    Args:
        data: the encoded file.
        header: the file's header.
        eighths: the scale, 8 or a result of `smallest_scale`.
        rows: the number of needed rows of the full picture, from the top; the result may end after them. Damage below
            may go unnoticed, but not truncation.
        out: where to write, a C-contiguous uint8 array of the result's shape; only if `rows` is None.

    Raises:
        ValueError: the file is damaged or truncated.
    """
    declared, blocks = header.height, header.block_rows
    if rows is not None and blocks:
        # Upsampling reads one more row of chroma. If scaled, add a block, or simplejpeg might choose a smaller scale.
        needed = rows + (blocks // _BLOCK if eighths == 8 else blocks)
        if -(-needed // blocks) < -(-header.height // blocks):
            declared = needed
    if declared < header.height:
        shortened = bytearray(data)
        shortened[header.height_at : header.height_at + 2] = declared.to_bytes(2, "big")
        top = np.empty(_scaled(declared, header.width, eighths), np.uint8)
        if not _decode(shortened, top, eighths):
            return top  # else the file is damaged or unusual: decoding all of it shows which
    shape = _scaled(header.height, header.width, eighths)
    target = np.empty(shape, np.uint8) if out is None else out
    warning = _decode(data, target, eighths)
    if _UNUSUAL_SCAN in warning and (repaired := _with_usual_scans(data)) is not None:
        return decode_jpeg(repaired, header, eighths=eighths, out=out)
    if any(damage in warning for damage in _DAMAGE):
        raise ValueError(f"the JPEG file is damaged or cut off ({warning}); write the sample again")
    return None if warning else target


def _decode(data: memoryview | bytearray, target: Image, eighths: int) -> str:
    """Decode to the size of `target`. Return "", libjpeg-turbo's first warning, or why decoding is impossible."""
    import simplejpeg

    # A `min_factor` of 1 would allow 5/8, 6/8 and 7/8.
    scaling = {"min_height": target.shape[0], "min_width": target.shape[1], "min_factor": 2.0}
    try:
        simplejpeg.decode_jpeg(data, "RGB", buffer=target, **({} if eighths == 8 else scaling))
    except ValueError as exc:
        # Cameras pad files; if this is the first warning, the picture is complete.
        return "" if _PADDED_END in str(exc) else str(exc)
    return ""


def _with_usual_scans(data: memoryview) -> memoryview | None:
    """Return a copy of a sequential JPEG in which every scan names the whole spectrum; None if all do already.

    Sequential decoding ignores the spectrum in a scan's header, and some encoders write zeros there. simplejpeg reports
    only libjpeg-turbo's first warning, which would be about these zeros, so later damage would go unnoticed.
    """
    repaired, position = bytearray(data), 2
    while (position := repaired.find(b"\xff", position)) >= 0 and position + 5 <= len(repaired):
        marker = repaired[position + 1]
        if marker == 0xFF:
            position += 1
        elif marker == 0 or marker in _STANDALONE:  # 0: a byte of the picture
            position += 2
        else:
            spectrum = position + 5 + 2 * repaired[position + 4]
            if marker == _START_OF_SCAN and spectrum + 3 <= len(repaired):
                repaired[spectrum : spectrum + 3] = _WHOLE_SPECTRUM
            position += 2 + (repaired[position + 2] << 8 | repaired[position + 3])
    return None if repaired == data else memoryview(repaired)
