"""Warn at the line of the user's program that called this package."""

from __future__ import annotations

import inspect
import warnings


def warn_at_caller(message: str) -> None:
    """Issue a UserWarning located at the nearest caller outside this package."""
    frame, frames_of_ours = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "streamload":
        frame, frames_of_ours = frame.f_back, frames_of_ours + 1
    warnings.warn(message, UserWarning, stacklevel=frames_of_ours + 1)
