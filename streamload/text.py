"""Format counts and lists of names, escape text for printing, and warn."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence

_MOST_LISTED = 20
# Control characters (except tabs and line feeds), line separators, changes of direction, and surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: int, noun: str) -> str:
    """Format a number of things: `1 shard`, `2,000 shards`, `3 batches`, `0 entries`."""
    if noun.endswith("y") and noun[-2] not in "aeo":
        plural = f"{noun[:-1]}ies"
    else:
        plural = f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    """Join escaped names: `jpg, cls`. Of more than 20, show 20, names without a dot first, and add `and 1,234 more`."""
    if len(names) <= _MOST_LISTED:
        return printable(", ".join(names))
    shown = sorted(names, key=lambda name: "." in name)[:_MOST_LISTED]
    return f"{printable(', '.join(shown))} and {len(names) - _MOST_LISTED:,} more"


def printable(text: str) -> str:
    """Escape characters that would act on a terminal or reorder the line."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def warn_at_caller(message: str) -> None:
    """Issue a UserWarning located at the nearest caller outside this package."""
    frame, frames_of_ours = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "streamload":
        frame, frames_of_ours = frame.f_back, frames_of_ours + 1
    warnings.warn(message, UserWarning, stacklevel=frames_of_ours + 1)
