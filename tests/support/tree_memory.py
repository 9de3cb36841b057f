"""What memory this process and all below it take."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path

import psutil


class TreeMemory:
    """The most memory that this process and all below it take in a `with` block: private, and in memory files."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:  # what is there at the end counts too: a short pass ends before the first look
            ended = self._stop.wait(0.02)
            self.peak_bytes = max(self.peak_bytes, tree_bytes())


def tree_bytes() -> int:
    """What all processes take now: anonymous memory, and every memory file once.

    Not their proportional share of libraries: that grows when another program on this machine ends.
    """
    files: dict[int, int] = {}
    private_bytes = 0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(OSError):
            private_bytes += anonymous_bytes(process.pid)
            files |= memory_files(process.pid)
    return private_bytes + sum(files.values())


def anonymous_bytes(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Anonymous: +(\d+)", rollup, re.MULTILINE)[0]) << 10


def memory_files(pid: int) -> dict[int, int]:
    """What each memory file of a process takes: parts of shards, and slots."""
    files = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(link).startswith("/memfd:"):
                status = link.stat()
                files[status.st_ino] = status.st_blocks * 512
    return files
