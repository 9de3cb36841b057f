"""The heap of a process of ours keeps what it has freed, where the C library can be told so."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from streamload.memory.heap import keep_freed_memory

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        pieces = [bytearray(4 << 20) for _ in range(4)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults(8)
assert keep_freed_memory(256 << 20)
faults(1)
print(before, faults(8))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides by itself")
def test_what_was_freed_is_not_faulted_in_again() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, found.stdout.split())
    assert after < before / 10
