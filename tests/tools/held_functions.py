"""A function for `map` that says which shards it works on, and waits until it may go on."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

FOLDER = ""
"""Set by who maps with it."""


def held(sample: dict[str, Any]) -> dict[str, Any] | None:
    """The first sample of each shard waits for a file `go`; some samples are left out."""
    number = int(sample["__key__"][1:])
    if FOLDER and number % 10 == 0:
        with open(os.path.join(FOLDER, f"began-{number}-{uuid.uuid4().hex}"), "w"):
            pass
        while not os.path.exists(os.path.join(FOLDER, "go")):
            time.sleep(0.02)
    return None if number % 7 == 3 else {"txt": f"{number}", "npy": sample["npy"]}
