"""Programs that begin with torch and streamload imported, which takes longer than what most programs of tests do.

They are forks of one process that has imported them and done nothing else, so each is a process of its own, with a
session, a `__main__` and an end of the interpreter of its own. Tests of how a program starts or finds its modules start
a Python instead, see `launched.py`. Run as a program, this is that process: it reads what to start from a socket, and
answers with numbers and exit statuses.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import types
from contextlib import suppress
from typing import IO, Any

from launched import Ended

from streamload.memory.unnamed import new_memory
from streamload.workers.launch import die_with

_MOST_MESSAGE_BYTES = 128 << 10


class Program:
    """A program that was started, with what tests use of a `subprocess.Popen`.

    Attributes:
        pid: its number, and that of its session and its process group.
        stdin: for what it reads.
        stdout: what it writes.
        returncode: its exit status, negative for a signal, once it has been looked for.
    """

    def __init__(self, preloaded: Preloaded, pid: int, stdin: IO[str], stdout: IO[str], errors: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._preloaded, self._errors = preloaded, errors

    def wait(self) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = self._preloaded.status_of(self.pid)
        return self.returncode

    def kill(self) -> None:
        """Send it SIGKILL, unless it has been waited for: then the number may be another process's."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """What it has written to stdout and stderr until its end, and that of all who have its stdout."""
        self.stdin.close()
        with self.stdout, self._errors:
            output = self.stdout.read()
            self.wait()
            self._errors.seek(0)
            return output, self._errors.read()


class Preloaded:
    """The process from which programs are forked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._statuses: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, program: str, *arguments: object, merged: bool = False) -> Program:
        """Start a program as `python -c` does, with the folder, the environment and the `sys.path` of this process.

        Args:
            program: its text.
            arguments: its `sys.argv[1:]`.
            merged: write its stderr to its stdout.
        """
        told = {
            "program": program,
            "argv": ["-c", *map(str, arguments)],
            "path": sys.path,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        (to_read, stdin), (stdout, to_write) = os.pipe(), os.pipe()
        errors = new_memory(0)
        given = [to_read, to_write, to_write if merged else errors]
        socket.send_fds(self._socket, [json.dumps(told).encode()], given)
        os.close(to_read)
        os.close(to_write)
        pid = None
        while pid is None:
            pid = self._take()
        return Program(self, pid, open(stdin, "w"), open(stdout), open(errors))

    def run(self, program: str, *arguments: object) -> Ended:
        """Start a program and wait for its end."""
        running = self.start(program, *arguments, merged=True)
        output, _ = running.communicate()
        return Ended(running.wait(), output)

    def status_of(self, pid: int) -> int:
        """The exit status of a program, when it has ended."""
        while pid not in self._statuses:
            self._take()
        return self._statuses.pop(pid)

    def close(self) -> None:
        """End all."""
        self._socket.close()
        self._process.wait()

    def _take(self) -> int | None:
        """The number of a program, if it has been started; the status of one that has ended is noted."""
        message = self._socket.recv(_MOST_MESSAGE_BYTES)
        assert message, "the process from which programs are forked has ended"
        pid, status = json.loads(message)
        if status is None:
            return int(pid)
        self._statuses[pid] = status
        return None


def _serve(sock: socket.socket) -> dict[str, Any]:
    """Fork for each message; what to do, in a fork. It ends with the socket."""

    def tell_ends(*_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                sock.send(json.dumps([ended[0], os.waitstatus_to_exitcode(ended[1])]).encode())

    signal.signal(signal.SIGCHLD, tell_ends)
    gc.freeze()  # else the first collection in each fork copies all pages with objects
    own = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(sock, _MOST_MESSAGE_BYTES, 3)
        if not message:
            sys.exit()
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with(own)
            sock.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, max(descriptors) + 1)
            told: dict[str, Any] = json.loads(message)
            return told
        for descriptor in descriptors:
            os.close(descriptor)
        sock.send(json.dumps([pid, None]).encode())


def _become(told: dict[str, Any]) -> None:
    """Run a program as `__main__`."""
    os.setsid()
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    tempfile.tempdir = None
    sys.argv, sys.path[:] = told["argv"], told["path"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(told["program"], "<string>", "exec"), vars(main))


if __name__ == "__main__":
    import torch  # noqa: F401

    from streamload import StreamLoader  # noqa: F401

    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
