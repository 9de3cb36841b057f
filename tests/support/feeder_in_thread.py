"""A feeder in a thread of the test's own process, so that what a test patches or watches holds there too."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

import streamload.workers.launch
from streamload.feeder.process import serve
from streamload.workers.launch import Child

_DEADLINE_S = 20.0


class ThreadAsProcess(Child):
    """A thread in place of a process; it cannot be killed."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self._thread = threading.Thread(target=lambda: asyncio.run(serve(self.theirs, self.pid, [])))
        self._thread.start()

    def wait(self, _timeout_s: float) -> int:
        self._thread.join(_DEADLINE_S)
        assert not self._thread.is_alive(), "the feeder does not end"
        return 0


def use_feeders_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders without workers start their feeders here; with workers they start a process, as ever.

    A feeder's log records go to the handlers of this process.
    """
    launch_process = streamload.workers.launch.launch

    def launch(module: str, workers: int) -> Child:
        assert module == "streamload.feeder.start"
        return launch_process(module, workers) if workers else ThreadAsProcess()

    monkeypatch.setattr("streamload.trainer.connection.launch", launch)
    monkeypatch.delattr(os, "pidfd_open", raising=False)  # nobody need be told of this process's end
    monkeypatch.setattr("streamload.feeder.process.forward_records", lambda take: None)
