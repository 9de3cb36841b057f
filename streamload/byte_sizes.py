"""Numbers of bytes as people write them: 256MB, 1.5 GiB."""

from __future__ import annotations

import re

__all__ = ["parse_bytes"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]*)\s*\Z", re.IGNORECASE)


def parse_bytes(name: str, value: int | str) -> int:
    """A number of bytes, given as such or as a string with a unit: "512MiB", "20 GB", "1.5TB".

    K and KB, M and MB, ... are powers of 1000; KiB, MiB, ... of 1024.

    Args:
        name: what the user calls it, for the message.
        value: what was given.

    Raises:
        TypeError, ValueError: it is neither, or less than one byte.
    """
    advice = f'{name}={value!r} must be a positive number of bytes, or a string such as "512MiB" or "20GB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(advice)
    if isinstance(value, str):
        written = _WRITTEN.match(value)
        unit = None if written is None else _UNITS.get(written[2].lower())
        if written is None or unit is None:
            raise ValueError(advice)
        try:
            value = int(float(written[1]) * unit)
        except OverflowError:
            raise ValueError(advice) from None
    if value < 1:
        raise ValueError(advice)
    return value
