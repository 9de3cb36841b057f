"""Starting our processes: what is left when one cannot be started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
first, second = early.launched
print(type(first.process).__name__, first.socket.recv(1000).decode(), second.socket.recv(1000).decode())
early.end(5.0)
print(first.process.returncode, second.process.returncode)
"""


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


SHOWS_ARGUMENTS = """
import socket, sys
def main(number, *_):
    socket.socket(fileno=number).sendall(ascii(sys.argv).encode())
"""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["train.py", "--size", "4 8", "\n\0\udcff\ud800"], ["train.py", "--size", "4 8", "\n\0\udcff\ud800"]),
        ((Path("train.py"), "x" * (1 << 20)), ["train.py", "x" * (1 << 20)]),
        (None, [""]),
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
