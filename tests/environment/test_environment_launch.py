"""Starting our processes: what is left when one cannot be started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from streamload.memory.unnamed import new_memory
from streamload.workers import launch

FORKED = """
import os, signal, socket, sys
from streamload.workers import launch
from streamload.memory.unnamed import new_memory

def run(socket_number, words, progress):
    peer = socket.socket(fileno=socket_number)
    listed = [name for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
    extra = sorted(set(map(int, listed)) - {{0, 1, 2, socket_number, words, progress}})
    peer.send(repr(extra).encode())
    {ending}

kept_open = open(os.devnull)
early = launch.EarlyWorkers()
early.start(2, run)
first, second = (worker.child for worker in early.launched)
print(type(first.process).__name__, first.socket.recv(1000).decode(), second.socket.recv(1000).decode())
early.end(5.0)
print(first.process.returncode, second.process.returncode)
"""


@pytest.fixture
def another_thread() -> Iterator[None]:
    """Beside which this process is not forked."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    thread.join()


def run_nothing(socket_number: int, words: int, progress: int) -> NoReturn:
    """For workers that are not forked."""
    raise AssertionError


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forks on Linux only")
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("peer.recv(1); os._exit(7)", 7),  # the other fork must not hold this one's socket open
        ("signal.pause()", -signal.SIGKILL),
        ("raise ValueError('out of luck')", 1),
    ],
)
def test_a_fork_has_nothing_of_the_process_and_ends_as_a_subprocess_does(ending: str, status: int) -> None:
    program = FORKED.format(ending=ending).replace("early.end(5.0)", f"early.end({0.2 if status < 0 else 5.0})")
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    kind, statuses = done.stdout.splitlines()
    assert kind == "Fork [] []"
    assert statuses == f"{status} {status}"
    assert done.stderr.count("out of luck") == (2 if status == 1 else 0)


@pytest.mark.usefixtures("another_thread")
def test_where_a_worker_cannot_be_started_all_are_left_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = launch.launch_worker, []

    def twice() -> launch.WorkerChild:
        if len(started) == 2:
            raise OSError("no more processes")
        started.append(real())
        return started[-1]

    monkeypatch.setattr(launch, "launch_worker", twice)
    early = launch.EarlyWorkers()
    early.start(5, run_nothing)
    assert early.launched == []
    assert [worker.child.process.returncode is None for worker in started] == [False, False]


@pytest.mark.usefixtures("another_thread")
def test_workers_that_nobody_takes_over_have_one_grace_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in their imports when a loader is closed at once; one after the other would outlast the feeder."""
    now_s, graces_s, started = [5.0], [], []

    def slow_end(child: launch.Child, grace_s: float) -> int:
        assert all(worker.child.socket.fileno() == -1 for worker in early.launched), "all have been told by then"
        graces_s.append(grace_s)
        now_s[0] += grace_s
        return -9

    def launched() -> launch.WorkerChild:
        ours, theirs = socket.socketpair()
        theirs.close()
        started.append(launch.WorkerChild(launch.Child(subprocess.Popen(["true"]), ours, new_memory(0)), new_memory(0)))
        return started[-1]

    monkeypatch.setattr(launch, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(launch.Child, "end", slow_end)
    monkeypatch.setattr(launch, "launch_worker", launched)
    early = launch.EarlyWorkers()
    early.start(3, run_nothing)
    early.end(0.5)
    assert graces_s == [0.5, 0.0, 0.0]
    for worker in started:
        worker.child.process.wait()


SHOWS_ARGUMENTS = """
import socket, sys
def main(number, *_):
    socket.socket(fileno=number).sendall(ascii(sys.argv).encode())
"""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["train.py", "--size", "4 8", "\n\0\udcff\ud800"], ["train.py", "--size", "4 8", "\n\0\udcff\ud800"]),
        (["x" * (1 << 20)], ["x" * (1 << 20)]),
        ((Path("train.py"), 48), ["train.py", "48"]),
        ([], [""]),
        (None, [""]),
        (48, [""]),
        (..., [""]),
    ],
)
def test_processes_have_the_arguments_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, found: list[str]
) -> None:
    """Whatever it has put into `sys.argv`, and where there is none, as in Python that is embedded."""
    (tmp_path / "shows_arguments.py").write_text(SHOWS_ARGUMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    if arguments is ...:
        monkeypatch.delattr(sys, "argv")
    else:
        monkeypatch.setattr(sys, "argv", arguments)
    child = launch.launch("shows_arguments")
    with child.socket.makefile("rb") as answer:
        assert answer.read() == ascii(found).encode()
    assert child.end(10.0) == 0
    child.socket.close()
    os.close(child.words)


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
