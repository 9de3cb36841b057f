"""Functions that do not return; in a module that a worker imports at once."""

from __future__ import annotations

import time

HUNG = 17


def hang_in_c(data: bytes) -> int:
    return sum(range(10**13)) if data == b"%d" % HUNG else int(data)  # looks at no signal, and keeps the GIL


def slowly(value: int) -> int:
    time.sleep(0.02)
    return value
