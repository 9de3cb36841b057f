"""The memory of a tree of processes, with what they share in unnamed files that none of them may have mapped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import TracebackType

import psutil

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+) *(.*)$")
_BLOCK_BYTES = 512


@dataclass(frozen=True)
class TreeMemory:
    """Bytes of memory.

    Attributes:
        private: of each process by its number, parents first, without what `files` counts; what several have mapped
            is divided among them (PSS).
        files: of all memory files that one of them has open, mapped or not.
    """

    private: dict[int, int] = field(default_factory=dict)
    files: int = 0

    @property
    def total(self) -> int:
        """Of everything."""
        return sum(self.private.values()) + self.files


def tree_memory(root: int) -> TreeMemory:
    """What a process and all below it take now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
        files = dict(found for pid in tree for found in _memory_files(pid))
        return TreeMemory({pid: _pss_without(pid, files.keys()) for pid in tree}, sum(files.values()))
    return TreeMemory()


def _memory_files(pid: int) -> Iterator[tuple[int, int]]:
    """The inode and the bytes in memory of each memory file that a process has open."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{number}").startswith("/memfd:"):
                    status = os.stat(f"{folder}/{number}")
                    yield status.st_ino, status.st_blocks * _BLOCK_BYTES


def _pss_without(pid: int, inodes: Collection[int]) -> int:
    """A process's PSS without its mappings of some memory files."""
    total, counts = 0, True
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps") as file:
        for line in file:
            if line.startswith("Pss:"):
                total += counts * int(line.split()[1]) << 10
            elif (mapping := _MAPPING.match(line)) is not None:
                inode, name = mapping.groups()
                counts = not (name.startswith("/memfd:") and int(inode) in inodes)
    return total


@contextlib.contextmanager
def halted(root: int) -> Iterator[None]:
    """All processes below one stand still: what one hands over to another is not counted in both, nor in neither."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(root).children(recursive=True)
    _signal(children, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(children, signal.SIGCONT)


def _signal(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@dataclass
class MemoryWatch:
    """Samples the memory of a tree on a thread, for as long as the `with` block lasts.

    The processes below the uppermost one are halted for each sample.

    Attributes:
        root: its uppermost process.
        pause_s: between two samples.
        peak: the sample with the largest total.
        samples: how many there were.
    """

    root: int
    pause_s: float = 0.05
    peak: TreeMemory = field(default_factory=TreeMemory)
    samples: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(self.pause_s):
            with halted(self.root):
                found = tree_memory(self.root)
            self.peak = max(self.peak, found, key=lambda each: each.total)
            self.samples += 1

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
