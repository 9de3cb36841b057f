"""A feeder in a thread of the test's own process, so that what a test patches or watches holds there too."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from typing import Any

import pytest

import streamload.workers.launch
from streamload.feeder.process import serve
from streamload.memory.unnamed import new_memory
from streamload.workers.launch import Child, EarlyWorkers

_DEADLINE_S = 20.0


class ThreadAsProcess:
    """What `Child` needs of a process; it cannot be killed."""

    pid = os.getpid()

    def __init__(self, thread: threading.Thread) -> None:
        self.returncode: int | None = None
        self._thread = thread

    def wait(self, _timeout_s: float | None = None) -> int:
        self._thread.join(_DEADLINE_S)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("feeder", _DEADLINE_S)
        self.returncode = 0
        return 0

    def kill(self) -> None:
        raise AssertionError("the feeder does not end")


def use_feeders_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders without workers start their feeders here; with workers they start a process, as ever.

    A feeder's log records go to the handlers of this process.
    """
    launch_process = streamload.workers.launch.launch

    def launch(module: str, workers: int) -> Child:
        assert module == "streamload.feeder.start"
        if workers:
            return launch_process(module, workers)
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=lambda: asyncio.run(serve(theirs, os.getpid(), EarlyWorkers())))
        thread.start()
        process: Any = ThreadAsProcess(thread)
        return Child(process, ours, new_memory(0))

    monkeypatch.setattr("streamload.trainer.connection.launch", launch)
    monkeypatch.delattr(os, "pidfd_open", raising=False)  # nobody need be told of this process's end
    monkeypatch.setattr("streamload.feeder.process.forward_records", lambda take: None)
