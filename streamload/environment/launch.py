"""Starts our processes: plain subprocesses, each on one end of a socket pair.

It imports nothing slow, so that the feeder can start its workers before it imports what it needs itself.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from streamload.memory.unnamed import new_memory

__all__ = [
    "PROGRESS_BYTES",
    "STACK_S",
    "Child",
    "EarlyWorkers",
    "WorkerChild",
    "die_with",
    "launch",
    "launch_worker",
    "write_stack_on_request",
]

PROGRESS_BYTES = 16
"""Two numbers: what a worker is working on."""

_WORDS_SHOWN = 4000
_PR_SET_PDEATHSIG = 1
_STACK_SIGNAL = signal.SIGUSR2
STACK_S = 0.2
"""How long a process may take to write its stack after `request_stack`."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process that was started.

    Attributes:
        process: the process.
        socket: our end of the pair.
        words: a descriptor of the memory in which it leaves its last words.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket
    words: int

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger; False where the system does not say."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as status:
                return status.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False

    def request_stack(self) -> int:
        """Have it write what its threads are doing, if it has called `write_stack_on_request`; for `stack`."""
        written_bytes = os.fstat(self.words).st_size
        self.process.send_signal(_STACK_SIGNAL)
        return written_bytes

    def stack(self, requested: int) -> str:
        """What it has written since a request; empty where it could not, as when it is stopped."""
        return os.pread(self.words, _WORDS_SHOWN, requested).decode(errors="replace").strip()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, negative for a signal; None if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_s: float) -> int:
        """Wait for it at most so long, then kill it; its exit status."""
        status = self.wait(grace_s)
        if status is None:
            self.process.kill()
            status = self.process.wait()
        return status

    def disown(self) -> None:
        """Forget it in a fork of the process that started it, which cannot wait for it."""
        self.process.returncode = 0

    def how_it_ended(self, status: int) -> str:
        """Status and last words, ready to follow its name."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            how += ", as the kernel does to processes where memory runs out"
        size_bytes = os.fstat(self.words).st_size
        words = os.pread(self.words, _WORDS_SHOWN, max(0, size_bytes - _WORDS_SHOWN)).decode(errors="replace").strip()
        return f"{how}\n{words}" if words else how


@dataclass(frozen=True, slots=True)
class WorkerChild:
    """A worker that was started; `progress` is a descriptor of `PROGRESS_BYTES` of memory that it writes to."""

    child: Child
    progress: int


def launch(module: str, *arguments: int, descriptors: tuple[int, ...] = ()) -> Child:
    """Run `python -m module SOCKET LAST_WORDS PARENT DESCRIPTOR... ARGUMENT...`, with this process as the parent.

    It starts with SIGINT blocked: Ctrl-C goes to the whole group and is for the first of these processes to decide on.

    Args:
        module: what to run.
        arguments: numbers for it.
        descriptors: passed on to it; they stay open here.
    """
    ours, theirs = socket.socketpair()
    words = new_memory(0)
    inherited = (theirs.fileno(), words, *descriptors)
    numbers = (theirs.fileno(), words, os.getpid(), *descriptors, *arguments)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, numbers)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
    except BaseException:
        ours.close()
        os.close(words)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return Child(process, ours, words)


def launch_worker() -> WorkerChild:
    """Start a worker; it waits for its setup."""
    progress = new_memory(PROGRESS_BYTES)
    try:
        return WorkerChild(launch("streamload.workers.worker_start", descriptors=(progress,)), progress)
    except BaseException:
        os.close(progress)
        raise


class EarlyWorkers:
    """Workers that are started before there is a pool to take them over.

    Args:
        wanted: how many to start.

    Attributes:
        launched: those that could be started. The pool starts the others, and reports failures.
    """

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self.launched: list[WorkerChild] = []

    def start(self, most: int | None = None) -> None:
        """Start the missing ones, until at most `most` run."""
        with suppress(OSError):
            while len(self.launched) < (self._wanted if most is None else min(most, self._wanted)):
                self.launched.append(launch_worker())

    def end(self, grace_s: float) -> None:
        """End all that no pool has taken over, and kill those that have not ended within `grace_s` altogether."""
        for worker in self.launched:
            worker.child.socket.close()
        deadline_s = monotonic() + grace_s
        for worker in self.launched:
            worker.child.end(max(0.0, deadline_s - monotonic()))


def write_stack_on_request(words: int) -> None:
    """Have this process answer `request_stack`, also while it is in a function of C that never returns.

    Args:
        words: the descriptor of its last words.
    """
    faulthandler.register(_STACK_SIGNAL, file=words)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it dies, whatever it is doing. Linux only.

    Elsewhere the process notices at its next read from its socket.
    """
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(0)


def child_environment() -> dict[str, str]:
    """The environment of our processes: it finds what this process finds, and does not start threads for BLAS.

    `PYTHONPATH` carries this process's `sys.path`, so that streamload is found however the user's program found it.
    """
    path = os.pathsep.join(itertools.chain(entry or os.getcwd() for entry in sys.path))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**threads, **os.environ, "PYTHONPATH": path}
