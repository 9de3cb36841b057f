"""Starting our processes: what is left when one cannot be started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamload.workers import launch

FORKED = """
import os, signal, socket, sys
from streamload.workers import launch

def run(socket_number, words, progress):
    peer = socket.socket(fileno=socket_number)
    listed = [name for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)]
    extra = sorted(set(map(int, listed)) - {{0, 1, 2, socket_number, words, progress}})
    peer.send(repr(extra).encode())
    {ending}

kept_open = open(os.devnull)
started = launch.start_workers(2, run)
print(*(child.socket.recv(1000).decode() for child in started))
launch.end_all(started, 5.0)
for child in started:
    print(child.end(0.0).partition("\\n")[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forks on Linux only")
@pytest.mark.parametrize(
    ("ending", "how"),
    [
        ("peer.recv(1); os._exit(7)", "ended with status 7"),  # the other fork must not hold this one's socket open
        ("signal.pause()", "was killed by SIGKILL (the kernel kills processes if memory runs out)"),
        ("raise ValueError('out of luck')", "ended with status 1"),
    ],
)
def test_a_fork_has_nothing_of_the_process_and_ends_as_a_subprocess_does(ending: str, how: str) -> None:
    program = FORKED.format(ending=ending).replace("5.0", "0.2" if "SIGKILL" in how else "5.0")
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[] []", how, how]
    assert done.stderr.count("out of luck") == (2 if "ValueError" in ending else 0)


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
    assert child.end(10.0) == "ended with status 0"
    child.close()


def test_how_a_process_ended_is_reported_with_its_last_words() -> None:
    child = launch.launch("streamload.nothing")
    os.write(child.words, b"out of luck")
    assert child.end(10.0) == "ended with status 1\nout of luck"
    child.close()
