"""NumPy's numbers where a plain one is meant: `np.int64(32)`, as array arithmetic gives it, is 32."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["as_python"]


def as_python(value: Any) -> Any:
    """The Python number that a NumPy scalar stands for, so that a state which holds it is JSON; others as they are."""
    return value.item() if isinstance(value, np.generic) else value
