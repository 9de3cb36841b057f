"""Looks at this test's processes, which may end at any moment, and waits for what they do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

_WAIT_S = 60.0
"""Against hangs only: on a busy machine anything may take seconds."""


def children(module: str = "streamload") -> list[psutil.Process]:
    """The processes that this one and its children have started as `python -m MODULE`, with this in the module's name.

    Paths on the command line say nothing: a checkout's own may have any name in them.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if module in _module(child.cmdline()):
                found.append(child)
    return found


def kill_one(module: str) -> bool:
    """Kill a process of this name, if there is one."""
    for child in children(module)[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
            return True
    return False


def _module(command: list[str]) -> str:
    """What stands behind `-m`."""
    behind = command.index("-m") + 1 if "-m" in command else len(command)
    return command[behind] if behind < len(command) else ""


def alive(pid: int) -> bool:
    """Whether this process runs; one that has ended and was not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> bool:
    """Whether none of these processes runs."""
    return not any(map(alive, pids))


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it has come true."""
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
