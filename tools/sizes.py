"""Numbers of bytes and times as people write and read them."""

from __future__ import annotations

import re

from streamload.wording import counted

__all__ = ["counted", "parse_bytes", "shown_bytes", "shown_time"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """`256MB`, `1.5 GB`, `100KiB` or `4096` to bytes; KB, MB, ... are powers of 1000, KiB, MiB, ... of 1024.

    Raises:
        ValueError: it is not a positive number with such a unit.
    """
    match = _BYTES.match(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write bytes with a unit, as in 256MB, 1GB or 100KiB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


def shown_bytes(size: float) -> str:
    """Bytes in the unit that suits them, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def shown_time(seconds: float) -> str:
    """Seconds as `12 s`, `3:04` or `1:02:03`; under ten with a decimal."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
