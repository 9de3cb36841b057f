"""Finds the line of the user's program that a warning is about."""

from __future__ import annotations

import inspect

__all__ = ["frames_of_ours"]


def frames_of_ours() -> int:
    """How many frames, from the caller's on, lead out of this package: the user's code is behind as many."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "streamload":
        frame, level = frame.f_back, level + 1
    return level
