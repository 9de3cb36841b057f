"""Starts our processes, each on one end of a socket pair: subprocesses, and forks of a feeder that has just begun.

To import what a worker needs takes longer than anything else until the first batch. So the first workers are forks of
the feeder, made when these modules are loaded and it has no thread, no open file and no user code yet. With another
thread, on other systems than Linux, and for later workers, they are subprocesses.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import NamedTuple, NoReturn

from streamload.memory.unnamed import new_memory

PROGRESS_BYTES = 16
"""Two numbers: what a worker is working on."""

_WORDS_SHOWN = 4000
_PR_SET_PDEATHSIG = 1
_STACK_SIGNAL = signal.SIGUSR2
STACK_S = 0.2
"""How long a process may take to write its stack after `request_stack`."""

# How often it is looked whether a fork has ended.
_LOOK_UP_S = 0.002


class Fork:
    """A fork of this process, with what `Child` needs of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline_s = None if timeout is None else monotonic() + timeout
        while self.returncode is None:
            found, status = os.waitpid(self.pid, 0 if deadline_s is None else os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif deadline_s is not None and monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            else:
                sleep(_LOOK_UP_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has been waited for: the number may be another process's."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Child(NamedTuple):
    """A process that was started.

    Attributes:
        process: the process.
        socket: our end of the pair.
        words: a descriptor of the memory for its last words.
        progress: of a worker a descriptor of `PROGRESS_BYTES` of memory that it writes to; else -1.
    """

    process: subprocess.Popen[bytes] | Fork
    socket: socket.socket
    words: int
    progress: int = -1

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger; False if the system does not say."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as status:
                return status.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False

    def request_stack(self) -> int:
        """Have it write what its threads are doing, for `stack`, after `write_stack_on_request`."""
        written_bytes = os.fstat(self.words).st_size
        self.process.send_signal(_STACK_SIGNAL)
        return written_bytes

    def stack(self, requested: int) -> str:
        """Return what it has written since a request; empty if it could not, as when it is stopped."""
        return os.pread(self.words, _WORDS_SHOWN, requested).decode(errors="replace").strip()

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, negative for a signal; None if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_s: float) -> int:
        """Wait for it up to `grace_s`, then kill it; return its exit status."""
        status = self.wait(grace_s)
        if status is None:
            self.process.kill()
            status = self.process.wait()
        return status

    def disown(self) -> None:
        """Forget it in a fork of the process that started it, which cannot wait for it."""
        self.process.returncode = 0

    def how_it_ended(self, status: int) -> str:
        """Return status and last words, to follow its name."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if status == -signal.SIGKILL:
            how += ", as the kernel does to processes where memory runs out"
        size_bytes = os.fstat(self.words).st_size
        words = os.pread(self.words, _WORDS_SHOWN, max(0, size_bytes - _WORDS_SHOWN)).decode(errors="replace").strip()
        return f"{how}\n{words}" if words else how


def launch(module: str, *arguments: int, descriptors: tuple[int, ...] = ()) -> Child:
    """Start a process that calls `module.main(SOCKET, LAST_WORDS, PARENT, DESCRIPTOR..., ARGUMENT...)`.

    It starts with SIGINT blocked: Ctrl-C goes to the whole group, and the trainer decides on it. `sys.path` and
    `sys.argv` are this process's, but not in its command line: `pkill -f train.py` is not meant for it. `descriptors`
    stay open here.
    """
    child = os.path.join(os.path.dirname(__file__), "child.py")
    with open(new_memory(0), "wb", buffering=0) as program:
        path = [entry or os.getcwd() for entry in sys.path]
        program.write(pickle.dumps((path, program_arguments())))
        program.seek(0)  # the process reads where this one is
        ours, theirs = socket.socketpair()
        words = new_memory(0)
        numbers = (program.fileno(), theirs.fileno(), words, os.getpid(), *descriptors, *arguments)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", child, "-m", module, *map(str, numbers)],
                pass_fds=(program.fileno(), theirs.fileno(), words, *descriptors),
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


def program_arguments() -> list[str]:
    """Return the program's `sys.argv`. Embedded Python may have none, and a program may put anything there."""
    found: object = getattr(sys, "argv", None)
    return list(map(str, found if isinstance(found, Iterable) else ())) or [""]  # as libraries expect, Ray among them


def launch_worker() -> Child:
    """Start a worker; it waits for its setup."""
    progress = new_memory(PROGRESS_BYTES)
    try:
        return launch("streamload.workers.worker_start", descriptors=(progress,))._replace(progress=progress)
    except BaseException:
        os.close(progress)
        raise


def fork_worker(run: Callable[[int, int, int], NoReturn]) -> Child:
    """Fork a worker, which has no descriptor of this process, and dies with it.

    Args:
        run: called there with the descriptors of its socket, its last words and its progress.
    """
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    words, progress = new_memory(0), new_memory(PROGRESS_BYTES)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        os.close(words)
        os.close(progress)
        raise
    if pid == 0:
        _run_as_worker(partial(run, theirs.fileno(), words, progress), parent, {theirs.fileno(), words, progress})
    theirs.close()
    return Child(Fork(pid), ours, words, progress)


def _run_as_worker(run: Callable[[], NoReturn], parent: int, descriptors: set[int]) -> NoReturn:
    """Run in a fork. The objects that refer to what it closes belong to frames that it never leaves."""
    try:
        die_with(parent)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > sys.stderr.fileno() and descriptor not in descriptors:
                with suppress(OSError):  # one of them was that of the folder
                    os.close(descriptor)
        _show_as("streamload.workers.worker")
        if (numpys := sys.modules.get("numpy.random")) is not None:
            numpys.seed()  # Python's own generator does that by itself
        run()
    finally:
        traceback.print_exc()
        os._exit(1)


def _show_as(module: str) -> None:
    """Have `ps` and `top` show this process as `python -m module`. Linux only."""
    import ctypes

    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/stat", "rb") as status:
        command, fields = line.read(), status.read().rpartition(b")")[2].split()
    begin, end = map(int, fields[45:47])
    before, found, _ = command.rpartition(b"streamload.")
    shown = before + module.encode() + b"\0"
    if found and len(shown) <= len(command) == end - begin:
        ctypes.memmove(begin, shown.ljust(len(command), b"\0"), len(command))


def _may_fork() -> bool:
    """Return True if this process has one thread: then a fork has all of it. Linux only."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


class EarlyWorkers:
    """Workers that are started before there is a pool to take them over.

    Attributes:
        launched: all of them, or none if one could not be started: the pool tries again, and reports the failure.
    """

    def __init__(self) -> None:
        self.launched: list[Child] = []

    def start(self, number: int, run: Callable[[int, int, int], NoReturn]) -> None:
        """Start workers, as forks that call `run` (see `fork_worker`) if that is safe."""
        gc.freeze()  # else the first collection in each fork copies all pages with objects
        try:
            for _ in range(number):
                self.launched.append(fork_worker(run) if _may_fork() else launch_worker())
        except OSError:
            self.end(0.0)

    def take(self) -> list[Child]:
        """Hand over the workers."""
        taken, self.launched = self.launched, []
        return taken

    def end(self, grace_s: float) -> None:
        """End all that no pool has taken over, and kill those that have not ended within `grace_s` altogether."""
        for worker in self.launched:
            worker.socket.close()
        deadline_s = monotonic() + grace_s
        for worker in self.launched:
            worker.end(max(0.0, deadline_s - monotonic()))
            os.close(worker.words)
            os.close(worker.progress)
        self.launched = []


def write_stack_on_request(words: int) -> None:
    """Have this process answer `request_stack`, even in a C function that never returns."""
    faulthandler.register(_STACK_SIGNAL, file=words)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Linux only; elsewhere it notices at its next read."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(0)


def child_environment() -> dict[str, str]:
    """Return this process's environment, and no threads for BLAS unless it says otherwise."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**threads, **os.environ}
