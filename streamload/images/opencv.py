"""OpenCV, imported when it is first needed and kept to the calling thread."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def opencv() -> Any:
    """Return the module `cv2`."""
    import cv2

    cv2.setNumThreads(0)  # the processors are shared out among workers already
    return cv2
