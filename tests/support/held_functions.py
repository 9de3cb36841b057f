"""Functions for `map` on a cluster: one says what it works on and waits until it may go on; one meets a full disk."""

from __future__ import annotations

import errno
import os
import time
import uuid
from typing import Any

FOLDER = ""
"""Set by who maps with it, and pickled with it."""


def held(sample: dict[str, Any]) -> dict[str, Any] | None:
    """In later shards, the first sample waits for a file `go`; some samples are left out."""
    number = int(sample["__key__"][1:])
    if FOLDER and number % 10 == 0:
        with open(os.path.join(FOLDER, f"began-{number}-{uuid.uuid4().hex}"), "w"):
            pass
        while number >= 30 and not os.path.exists(os.path.join(FOLDER, "go")):
            time.sleep(0.02)
    return None if number % 7 == 3 else {"txt": f"{number}", "npy": sample["npy"]}


def on_a_full_disk(sample: dict[str, Any]) -> dict[str, Any]:
    """What writing to one raises."""
    raise OSError(errno.ENOSPC, "No space left on device", "/tmp/somewhere")
