"""Starting our processes: what is left when one cannot be started."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from streamload.environment import launch


def test_workers_that_cannot_be_started_now_are_left_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = launch.launch_worker, []

    def twice() -> launch.WorkerChild:
        if len(started) == 2:
            raise OSError("no more processes")
        started.append(real())
        return started[-1]

    monkeypatch.setattr(launch, "launch_worker", twice)
    early = launch.EarlyWorkers(5)
    early.start(1)
    assert len(started) == 1
    early.start()
    assert early.launched == started
    assert len(started) == 2
    for worker in started:
        worker.child.socket.close()
        assert worker.child.end(5.0) == 0, "it ends by itself when its socket is closed"
        os.close(worker.child.words)
        os.close(worker.progress)


def test_workers_that_nobody_takes_over_have_one_grace_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in their imports when a loader is closed at once; one after the other would outlast the feeder."""
    now_s, graces_s = [5.0], []

    def slow_end(child: launch.Child, grace_s: float) -> int:
        assert all(worker.child.socket.fileno() == -1 for worker in early.launched), "all have been told by then"
        graces_s.append(grace_s)
        now_s[0] += grace_s
        return -9

    def launched() -> launch.WorkerChild:
        ours, theirs = socket.socketpair()
        theirs.close()
        return launch.WorkerChild(launch.Child(subprocess.Popen(["true"]), ours, -1), -1)

    monkeypatch.setattr(launch, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(launch.Child, "end", slow_end)
    monkeypatch.setattr(launch, "launch_worker", launched)
    early = launch.EarlyWorkers(3)
    early.start()
    early.end(0.5)
    assert graces_s == [0.5, 0.0, 0.0]
    for worker in early.launched:
        worker.child.process.wait()


def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.sys, "executable", "/nowhere/python")
    for start in (lambda: launch.launch("streamload.nothing"), launch.launch_worker):
        with pytest.raises(FileNotFoundError):
            start()


def test_how_a_process_ended_is_reported_with_its_last_words() -> None:
    child = launch.launch("streamload.nothing")
    status = child.end(10.0)
    os.write(child.words, b"out of luck")
    assert child.how_it_ended(status) == "ended with status 1\nout of luck"
    assert (
        child.how_it_ended(-9)
        == "was killed by SIGKILL, as the kernel does to processes where memory runs out\nout of luck"
    )
    assert child.how_it_ended(-15) == "was killed by SIGTERM\nout of luck"
    child.socket.close()
    os.close(child.words)
