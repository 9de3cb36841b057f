"""Finds or starts the one process that the ranks of a machine share: by an abstract socket, which no file names.

Whoever binds the name first starts the process, which takes over the listening socket; the others connect to it. Both
sides look at the other one's user, as the kernel knows it. A process that ends gives the name free. It is nobody's
child: the rank that has started it may end before it, and would not wait for it. Linux only.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Protocol

from streamload.environment.launch import Child, launch
from streamload.errors import WorkerError

__all__ = ["AnyChild", "Listener", "can_share", "detach", "join", "rendezvous_name"]

Socket = socket.socket

_CREDENTIALS = struct.Struct("3i")
_WELCOME = struct.Struct("q")
_RETRY_S = 0.02
_DEADLINE_S = 120.0
"""Against hangs only: a feeder imports for a second before it answers."""

_BACKLOG = 512
_MOST_DEATHS_AT_START = 2


class _StrangerError(Exception):
    """The process at the other end is not trusted."""


class _DiedAtStartError(Exception):
    """The process that was started has ended, and how."""


class AnyChild(Protocol):
    """A process that serves this one, whoever started it; see `Child`."""

    @property
    def socket(self) -> Socket:
        """Our end of the connection."""

    @property
    def words(self) -> int:
        """A descriptor of the memory in which it leaves its last words."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def is_stopped(self) -> bool:
        """See `Child.is_stopped`."""

    def request_stack(self) -> int:
        """See `Child.request_stack`."""

    def stack(self, requested: int) -> str:
        """See `Child.stack`."""

    def wait(self, timeout_s: float) -> int | None:
        """See `Child.wait`."""

    def end(self, grace_s: float) -> int | None:
        """See `Child.end`."""

    def disown(self) -> None:
        """See `Child.disown`."""

    def how_it_ended(self, status: int) -> str:
        """See `Child.how_it_ended`."""


def can_share() -> bool:
    """Whether this system has abstract sockets."""
    return sys.platform == "linux"


def rendezvous_name(*parts: str) -> str:
    """The abstract name for ranks of this user that have these in common, and see the same processes and files.

    Containers may share a network, and so abstract names, where the number of a process means another one in each.
    """
    digest = hashlib.sha256("\0".join([str(os.getuid()), *_namespaces("self"), *parts]).encode()).hexdigest()[:32]
    return f"\0streamload-{os.getuid()}-{digest}"


def _namespaces(process: int | str) -> list[str]:
    """What a process sees of others, of files and of users: the same for two only outside of containers, or in one."""
    return [os.readlink(f"/proc/{process}/ns/{kind}") for kind in ("pid", "mnt", "user")]


def _peer(sock: socket.socket) -> int:
    """The number of the process at the other end; of a listening socket's, of the one that called `listen` last.

    What it sends is unpickled here, so it must be one that could as well write to the memory of this process: of this
    user, and in the same container. The name alone does not show that: others of the network may see it.

    Raises:
        _StrangerError: it is another one.
        OSError: it has ended.
    """
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    with suppress(PermissionError):
        if user == os.getuid() and process > 0 and _namespaces(process) == _namespaces("self"):
            return int(process)
    raise _StrangerError


class Listener:
    """The process's side: takes in those who come.

    Args:
        descriptor: of a listening socket.
        words: of the memory for last words, which they get too.

    Attributes:
        socket: the listening one.
    """

    def __init__(self, descriptor: int, words: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.socket.setblocking(False)
        self.socket.listen(_BACKLOG)  # so that those who connect see this process, not the one that has started it
        self._words = words

    def accept(self) -> tuple[socket.socket, int] | None:
        """A connection and the number of the process that has made it; None where nobody waits.

        Processes of other users and containers are turned away.
        """
        while True:
            try:
                found, _ = self.socket.accept()
            except BlockingIOError:
                return None
            with suppress(OSError, _StrangerError):  # the former: it has gone meanwhile
                process = _peer(found)
                _send_welcome(found, self._words)
                return found, process
            found.close()


def detach(sock: socket.socket, words: int) -> None:
    """Go on as a process that is nobody's child, and tell who has started it. To be called before anything else.

    Args:
        sock: leads to whoever has started this process.
        words: of the memory for last words.
    """
    if os.fork():
        os._exit(0)
    _send_welcome(sock, words)


def _send_welcome(sock: socket.socket, words: int) -> None:
    socket.send_fds(sock, [_WELCOME.pack(os.getpid())], [words])


def join(name: str, module: str, *arguments: int) -> SharedChild:
    """Connect to the process of a name, which is started if there is none.

    Args:
        name: from `rendezvous_name`.
        module: what it runs; it gets its listening socket before the arguments, see `launch`, and calls `detach`.
        arguments: numbers for it.

    Raises:
        OSError: it cannot be started.
        WorkerError: it ends as it starts, the name is another user's, or whoever has it does not answer.
    """
    deadline_s = monotonic() + _DEADLINE_S
    died = 0
    while True:
        try:
            child = _start(name, module, arguments) or _connect_to_running(name)
        except _DiedAtStartError as error:
            died += 1
            if died == _MOST_DEATHS_AT_START:
                raise WorkerError(f"the feeder process {error}, {died} times as it started") from None
            continue
        if child is not None and child.hold():
            return child
        if child is not None:
            child.forget()
        if monotonic() > deadline_s:
            raise WorkerError(f"the feeder that other ranks of this machine have started (socket {name[1:]}) is silent")
        sleep(_RETRY_S)


def _start(name: str, module: str, arguments: tuple[int, ...]) -> SharedChild | None:
    """The process, started; None where another rank has the name, or it ends before it says so.

    Raises:
        _DiedAtStartError: it ends even before that.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        listener.listen(_BACKLOG)
        child = launch(module, *arguments, descriptors=(listener.fileno(),))
    status = child.process.wait()  # the process goes on as a fork of that, see `detach`
    how = child.how_it_ended(status)
    os.close(child.words)
    if status:
        child.socket.close()
        raise _DiedAtStartError(how)
    return _welcomed(child.socket)


def _connect_to_running(name: str) -> SharedChild | None:
    """The process that another rank has started; None where it has not begun to listen, or ends."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(name)
        _peer(sock)
    except (ConnectionError, FileNotFoundError):  # or the rank has ended that has started it
        sock.close()
        return None
    except _StrangerError:
        sock.close()
        raise WorkerError(
            f"the process that has the socket {name[1:]} is another user's, or in another container, or may not be "
            "looked at (/proc/PID/ns), as one that has changed its user; leave out feeders="
        ) from None
    except BaseException:
        sock.close()
        raise
    return _welcomed(sock)


def _welcomed(sock: socket.socket) -> SharedChild | None:
    """The process that a connection leads to; None where it ends before it says so."""
    try:
        sock.settimeout(_DEADLINE_S)
        data, descriptors, _, _ = socket.recv_fds(sock, _WELCOME.size, 1)
        sock.settimeout(None)
    except (ConnectionError, TimeoutError):
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    if len(data) < _WELCOME.size or not descriptors:  # it has ended before it saw this rank
        sock.close()
        return None
    (number,) = _WELCOME.unpack(data)
    process = _NobodysChild(number)
    return SharedChild(process, Child(process, sock, descriptors[0]))


class _NobodysChild:
    """A process that is no child of this one, with what `Child` needs of a `subprocess.Popen`.

    Attributes:
        pid: its number.
        returncode: 0 once it has ended: how, nobody knows.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd: int | None = None
        with suppress(OSError):  # it has ended, or is in another container
            self._pidfd = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired if it has not ended after so many seconds."""
        if self.returncode is None:
            if self._pidfd is not None and not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a feeder", timeout or 0.0)
            self.returncode = 0
            self.forget()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def forget(self) -> None:
        """Close its descriptor."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


@dataclass(slots=True)
class SharedChild:
    """A process that serves this one and others; it ends with the last of them. See `AnyChild`.

    Attributes:
        process: it.
        child: the same, and what leads to it.
    """

    process: _NobodysChild
    child: Child
    _held: int = -1

    def hold(self) -> bool:
        """Count as one of those it serves, until `end`; False where it is being ended."""
        try:
            self._held = os.open(f"/proc/self/fd/{self.child.words}", os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def forget(self) -> None:
        """Close what is open here, and leave it alone."""
        self.child.socket.close()
        os.close(self.child.words)
        self._leave()

    @property
    def socket(self) -> Socket:
        """Our end of the connection."""
        return self.child.socket

    @property
    def words(self) -> int:
        """A descriptor of the memory in which it leaves its last words."""
        return self.child.words

    @property
    def pid(self) -> int:
        """Its number."""
        return self.process.pid

    @property
    def is_stopped(self) -> bool:
        """See `Child.is_stopped`."""
        return self.child.is_stopped

    def request_stack(self) -> int:
        """See `Child.request_stack`."""
        return self.child.request_stack()

    def stack(self, requested: int) -> str:
        """See `Child.stack`."""
        return self.child.stack(requested)

    def wait(self, timeout_s: float) -> int | None:
        """See `Child.wait`."""
        return self.child.wait(timeout_s)

    def how_it_ended(self, status: int) -> str:
        """See `Child.how_it_ended`."""
        return self.child.how_it_ended(status).replace("ended with status 0", "has ended", 1)

    def end(self, grace_s: float) -> int | None:
        """Wait for its end at most so long, then kill it, where nobody else is served; its exit status."""
        if self._is_last():
            status: int | None = self.child.end(grace_s)
        else:
            status = self.child.wait(0)
        self._leave()
        return status

    def disown(self) -> None:
        """See `Child.disown`."""
        self._leave()

    def _is_last(self) -> bool:
        """Whether nobody else holds it; of several that leave at once, one finds that."""
        fcntl.flock(self._held, fcntl.LOCK_UN)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _leave(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        self.process.forget()
