"""How much work something is, as a number that does not depend on the machine: the lines of Python that it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_of(action: Callable[[], object]) -> int:
    """The lines that an action runs, each as often as it is run; calls and returns count as lines too."""
    lines = 0

    def count(*_: Any) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines
