"""Start processes on socket pairs: subprocesses, and forks of a feeder that has just started.

Imports take longer than anything else before the first batch. So the first workers are forks of the feeder, made when
it has loaded the workers' modules, but has no thread, no open file and no user code yet. Later workers are
subprocesses, as are the first ones if the feeder has another thread or the system is not Linux.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from time import monotonic, sleep
from typing import NoReturn

from streamload.memory.unnamed import new_memory

WORKER = "streamload.workers.worker_start"
"""The module to launch for a worker."""

PROGRESS_BYTES = 16
"""The size of a worker's progress, two numbers: the current row and task."""

_LAST_WORDS_BYTES = 4000
_PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR2
"""The signal that makes a process write its stack to `Child.words`, even in a C function that never returns."""
STACK_S = 0.2
"""Time for a process to write its stack."""

# Seconds between two checks of a process's status.
_LOOK_UP_S = 0.002


class Child:
    """A process that was started or forked.

    Attributes:
        pid: the process id; 0 before it is started.
        socket: this process's end of the socket pair.
        theirs: the other end, closed here once the process has it.
        words: a descriptor of memory for the process's last words (the output of a crash) and stacks.
        progress: a descriptor of `PROGRESS_BYTES` of memory, which the process writes.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.socket, self.theirs = socket.socketpair()
        self.words, self.progress = self._descriptors = [new_memory(0), new_memory(PROGRESS_BYTES)]
        self._status: int | None = None
        self._how_it_ended: str | None = None

    def request_stack(self) -> int:
        """Make the process write the stacks of its threads to its last words; return the stacks' offset there."""
        written_bytes = os.fstat(self.words).st_size
        os.kill(self.pid, STACK_SIGNAL)
        return written_bytes

    def last_words(self, start: int | None = None) -> str:
        """Return the process's last words from the offset `start` on, by default their end."""
        if start is None:
            start = max(0, os.fstat(self.words).st_size - _LAST_WORDS_BYTES)
        return os.pread(self.words, _LAST_WORDS_BYTES, start).decode(errors="replace").strip()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the process; return its exit status, negative for a signal, or None on a timeout."""
        deadline_s = monotonic() + timeout_s
        while self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the program itself has waited for all of its children
                pid, status = self.pid, 0
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif monotonic() >= deadline_s:
                return None
            else:
                sleep(_LOOK_UP_S)
        return self._status

    def end(self, grace_s: float) -> str:
        """Wait up to `grace_s`, then kill the process. Return how it ended: "was killed by ...". Idempotent."""
        if self._how_it_ended is not None:
            return self._how_it_ended
        if self.pid and self.wait(grace_s) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(inf)
        status = self._status or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            how += " (the kernel kills processes if memory runs out)"
        words = self.last_words()
        self._how_it_ended = f"{how}\n{words}" if words else how
        return self._how_it_ended

    def close(self) -> None:
        """Close the descriptors that this process shares with the child. Idempotent."""
        self.socket.close()
        self.theirs.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


def launch(module: str, *arguments: int) -> Child:
    """Start a process that calls `module.main(SOCKET, LAST_WORDS, PROGRESS, PARENT, ARGUMENT...)`.

    The process starts with SIGINT blocked: Ctrl-C reaches the whole group, and the trainer handles it. The child's
    `sys.path` and `sys.argv` are those of this process, but its command line differs, so `pkill -f train.py` does not
    match it.
    """
    script = os.path.join(os.path.dirname(__file__), "child.py")
    child, mask = Child(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with open(new_memory(0), "wb", buffering=0) as program:
            path = [entry or os.getcwd() for entry in sys.path]
            program.write(pickle.dumps((path, program_arguments())))
            program.seek(0)  # the processes share a file offset
            descriptors = program.fileno(), child.theirs.fileno(), child.words, child.progress
            numbers = map(str, (*descriptors, os.getpid(), *arguments))
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a pending Ctrl-C may raise here
            process = subprocess.Popen(
                [sys.executable, "-P", script, "-m", module, *numbers],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        child.pid, process.returncode = process.pid, 0  # the child is waited for here, not by `Popen`
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    except BaseException:
        child.end(0.0)
        child.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    child.theirs.close()
    return child


def program_arguments() -> list[str]:
    """Return the program's `sys.argv` as strings; [""] if embedded Python has none."""
    arguments: object = getattr(sys, "argv", None)
    return list(map(str, arguments if isinstance(arguments, Iterable) else ())) or [""]  # libraries expect an entry


def fork_worker(run: Callable[[int, int, int], NoReturn]) -> Child:
    """Fork a worker, which keeps only its own descriptors, and dies with this process.

    `run` is called in the fork with the descriptors of socket, last words and progress.
    """
    parent, child = os.getpid(), Child()
    try:
        child.pid = os.fork()
    except OSError:
        child.close()
        raise
    if child.pid:
        child.theirs.close()
        return child
    # Closing by number is safe: the frames that hold the owning objects are never left.
    try:
        die_with(parent)
        descriptors = child.theirs.fileno(), child.words, child.progress
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > sys.stderr.fileno() and descriptor not in descriptors:
                with suppress(OSError):  # one descriptor belonged to `listdir`
                    os.close(descriptor)
        _show_as("streamload.workers.worker")
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # a fork seeds Python's own generator by itself
        run(*descriptors)
    finally:
        traceback.print_exc()
        os._exit(1)


def _show_as(module: str) -> None:
    """Make `ps` and `top` show this process as `python -m module`. Linux only."""
    import ctypes

    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/stat", "rb") as status:
        command, fields = line.read(), status.read().rpartition(b")")[2].split()
    begin, end = map(int, fields[45:47])
    before, package, _ = command.rpartition(b"streamload.")
    shown = before + module.encode() + b"\0"
    if package and len(shown) <= len(command) == end - begin:
        ctypes.memmove(begin, shown.ljust(len(command), b"\0"), len(command))


def start_workers(number: int, run: Callable[[int, int, int], NoReturn]) -> list[Child]:
    """Start workers before there is a pool, if possible as forks. Return [] if a start fails; the pool retries."""
    gc.freeze()  # else the first collection in each fork copies all pages with objects
    started: list[Child] = []
    threads = "/proc/self/task"
    may_fork = os.path.isdir(threads) and len(os.listdir(threads)) == 1
    try:
        for _ in range(number):
            started.append(fork_worker(run) if may_fork else launch(WORKER))
    except OSError:
        end_all(started, 0.0)
        return []
    return started


def end_all(children: Sequence[Child], grace_s: float) -> None:
    """End processes; kill those that have not ended after `grace_s` in total."""
    for child in children:
        child.socket.close()
    deadline_s = monotonic() + grace_s
    for child in children:
        child.end(max(0.0, deadline_s - monotonic()))
        child.close()


def die_with(parent: int) -> None:
    """On Linux, make the kernel kill this process with its parent; elsewhere, the process ends at its next read."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(0)


def child_environment() -> dict[str, str]:
    """Return the environment, with one thread for BLAS unless a number is set."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**threads, **os.environ}
