"""What this process has mapped, as the kernel tells it; where there is a `/proc`."""

from __future__ import annotations

from pathlib import Path


def is_mapped(address: int) -> bool:
    """Whether some mapping of this process holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False
