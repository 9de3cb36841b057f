"""Exchange messages with a feeder, in its process or in this one, and map its batches."""

from __future__ import annotations

import errno
import itertools
import os
import warnings
import weakref
from collections import deque
from contextlib import suppress
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from streamload.decode.failure import error_from
from streamload.decode.tasks import Forget, RowTask, ScanTask, ShardsOpened, SlotOpened
from streamload.errors import LoaderClosedError, WorkerError
from streamload.feeder.messages import (
    WAIT_REASON,
    AbandonEpoch,
    Acknowledge,
    Answer,
    Call,
    Configure,
    Failed,
    Ready,
    ReadyBatch,
)
from streamload.log_records import Logged
from streamload.memory.channel import Channel
from streamload.memory.mapped import Bytes
from streamload.memory.slots import SlotReader
from streamload.order.share import EpochStart
from streamload.workers.launch import Child, launch

if TYPE_CHECKING:
    from streamload.trainer.device import Cuda  # which imports torch
    from streamload.trainer.in_process_feeder import InProcessChannel
    from streamload.workers.caller_worker import CallerWorker

# The time for a feeder to end by itself before it is killed.
_GRACE_S = 0.7
# The longest wait for the answer to `WAIT_REASON`.
_ANSWER_S = 3.0
_numbers = itertools.count()


class Connection:
    """Exchange messages with a feeder in order, and map its batches.

    A feeder's process ends with this object: when it is closed or garbage-collected, or the interpreter exits. If the
    trainer is killed, the process ends by itself.

    Attributes:
        configured: True once a `Configure` was sent.
        death: how the process ended, if it has died.
        owner: the id of the process that made the connection; in its forks the connection is closed.
        counts: the number of samples of each shard, if the newest `Ready` has it.
        messages: arrived messages, for `receive`.
        batches: announced batches with the identities of their epochs; None follows the last batch of an epoch. The
            batches of an abandoned pass are released by the next pass.
    """

    def __init__(
        self, channel: Channel | InProcessChannel, child: Child | None = None, cuda: Cuda | None = None
    ) -> None:
        self.configured = False
        self.death: str | None = None
        self.counts: tuple[int, ...] | None = None
        self.messages: deque[Any] = deque()
        self.batches: deque[tuple[tuple[int, int, int], ReadyBatch | None]] = deque()
        self._answers: dict[int, Answer] = {}
        self._failed: Failed | None = None
        lock, fence = (None, None) if cuda is None else (cuda.lock, cuda.fence)
        self._slots = SlotReader(lock, fence)
        self._unsent: deque[Any] = deque()
        self._sending = Lock()
        self._unacknowledged = 0
        self._acknowledge_after = 1
        self._worker: CallerWorker | None = None
        self._child = child
        self._channel = channel
        self.owner = os.getpid()
        self._end = weakref.finalize(self, _end, child, channel, self._slots, self.owner)

    def make_rows(self, worker: CallerWorker) -> None:
        """Let `receive` do the tasks with `worker`, in the thread that calls it."""
        self._worker = worker
        weakref.finalize(self, worker.close)

    @property
    def closed(self) -> bool:
        """Return True if the connection was closed, or belongs to this process's parent."""
        return not self._end.alive or os.getpid() != self.owner

    @property
    def descriptor(self) -> int | None:
        """Return a descriptor that is readable if a message may have come; None if `receive` does the tasks."""
        return self._channel.fileno() if isinstance(self._channel, Channel) and self._worker is None else None

    def send(self, message: Any) -> None:
        """Send a message; if the feeder is dead, the next `receive` raises."""
        self.configured = self.configured or isinstance(message, Configure)
        if isinstance(message, EpochStart) and self._worker is not None:
            self._worker.begin(message.number)
        self._unsent.append(message)
        self.flush()

    def abandon(self, number: int) -> None:
        """Tell the feeder to abandon a pass. Safe at any moment in any thread; waits for no lock or answer."""
        if self._worker is not None:
            self._worker.leave(number)
        self._unsent.append(AbandonEpoch(number))
        self._send_unsent()

    def receive(self, timeout_s: float | None) -> Any:
        """Return the next message. All batches of earlier messages must have been leased.

        Raises:
            TimeoutError: no message came in time.
            FeederDiedError: the feeder is dead.
            LoaderClosedError: the connection is closed.
            OSError: this process has too many open files.
        """
        deadline_s = None if timeout_s is None else monotonic() + timeout_s
        while (message := self.receive_now()) is None:
            self._step(deadline_s)
        return message

    def receive_now(self) -> Any | None:
        """Return the next message if it has arrived, else None."""
        while not self.messages:
            try:
                arrived = self._channel.receive_now()
            except (EOFError, OSError) as error:
                self._raise_broken(error)
            if arrived is None:
                if self._unsent:
                    self.flush()
                return None
            self._dispatch(*arrived)
        message = self.messages.popleft()
        if isinstance(message, Ready):
            self._slots.drop(message.retired)  # not earlier, since batches of earlier messages may lie in these slots
            self._acknowledge_after = message.acknowledge_after
            self.counts = message.counts
        return message

    def _step(self, deadline_s: float | None) -> None:
        """Do a task, or wait for a message and dispatch it."""
        if self._worker is not None and (done := self._worker.step()) is not None:
            self.send(done)
            return
        try:
            arrived = self._channel.receive(None if deadline_s is None else max(0.0, deadline_s - monotonic()))
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            self._raise_broken(error)
        self._dispatch(*arrived)

    def call(self, function: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a function of the feeder, and return its result. Messages that arrive first are kept for `receive`.

        Raises:
            TimeoutError, FeederDiedError, LoaderClosedError, OSError: as for `receive`.
            Exception: the function's error, or the error that ended the feeder.
        """
        deadline_s = None if timeout_s is None else monotonic() + timeout_s
        number = next(_numbers)
        self.send(Call(number, function, arguments))
        while (answer := self._answers.pop(number, None)) is None:
            if self._failed is not None:  # no answer will come
                raise error_from(self._failed.failure)
            self._step(deadline_s)
        if answer.failure is not None:
            raise error_from(answer.failure)
        return answer.value

    def _raise_broken(self, error: EOFError | OSError) -> NoReturn:
        if self.death is None and self.closed:
            raise LoaderClosedError("the loader was closed while it waited for a batch or an answer") from error
        if self._child is None or (isinstance(error, OSError) and error.errno == errno.EMFILE):
            raise error  # there is no process, or this one has too many open files
        if self.death is None:
            is_alive = self._child.wait(_GRACE_S) is None
            ended = "has closed its connection" if is_alive else self._child.end(0.0)
            self.death = f"the feeder process {ended}"
        raise FeederDiedError(self.death) from error

    def _dispatch(self, message: Any, descriptors: list[int]) -> None:
        """Handle a message or queue it for `receive`, and map the slots that come with it."""
        if self._worker is not None and isinstance(message, RowTask | ScanTask | ShardsOpened | SlotOpened | Forget):
            self._worker.waiting.append((message, descriptors))
            return
        match message:
            case Logged():
                message.handle_if_enabled()
            case Answer():
                self._answers[message.number] = message
            case Failed():
                self._failed = message
                self.messages.append(message)
            case Ready():
                try:
                    for slot, descriptor in zip(message.opened, descriptors, strict=True):
                        self._slots.add(slot, descriptor)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                self.messages.append(message)

    def wait_reason(self) -> str:
        """Return why no batch has come; empty if unknown."""
        if self._child is None:
            return "" if isinstance(self._channel, Channel) else self._channel.wait_reason()
        try:
            return str(self.call(WAIT_REASON, timeout_s=_ANSWER_S) or "")
        except TimeoutError:
            return f"the feeder (process {self._child.pid}) does not answer: it may be stopped (SIGSTOP)"
        except WorkerError as error:  # the feeder has died meanwhile
            return error.message

    def lease(self, slot: int) -> Bytes:
        """Return the memory of the next batch. Its slot is free once the last view is gone."""
        self._unacknowledged += 1
        if self._unacknowledged >= self._acknowledge_after:  # one message per batch would cost more than all other work
            self.flush()
        return self._slots.lease(slot)

    def flush(self) -> None:
        """Acknowledge batches and released slots, and send all queued messages."""
        if self._unacknowledged:
            unacknowledged, self._unacknowledged = self._unacknowledged, 0
            self._unsent.append(Acknowledge(unacknowledged, self._slots.take_released()))
        self._send_unsent()

    def _send_unsent(self) -> None:
        """Send all queued messages, including any that another thread adds meanwhile by dropping a pass."""
        try:
            while self._unsent and self._sending.acquire(blocking=False):
                try:
                    messages = [self._unsent.popleft() for _ in range(len(self._unsent))]
                    with suppress(ConnectionError):  # the next `receive` raises FeederDiedError
                        self._channel.send_all(messages)
                finally:
                    self._sending.release()
        except BaseException:  # Ctrl-C, after which half of a message may be sent
            self._end()
            raise

    def close(self) -> None:
        """End the feeder, and kill it if it does not end soon. Idempotent."""
        child = self._child
        if child is not None and not self.configured and not self.closed and os.pread(child.progress, 1, 0) == b"\0":
            self._channel.close(ends=True)
            child.end(0.0)  # at once: it has neither work nor workers, and may be busy with imports
        self._end()
        self.messages.clear()
        self.batches.clear()
        if self._worker is not None:
            self._worker.close()

    def __del__(self) -> None:
        if getattr(self, "_end", None) is not None and self._child is not None and not self.closed:
            if self.configured:
                message = "a StreamLoader was dropped without close() or `with`; its processes are ended now"
                warnings.warn(message, ResourceWarning, source=self, stacklevel=2)
            self.close()


def start_feeder_process(workers: int, cuda: Cuda | None) -> Connection:
    """Start a feeder's process, and return the connection to it."""
    child = launch("streamload.feeder.start", workers)
    return Connection(Channel(child.socket), child, cuda)


def _end(child: Child | None, channel: Channel | InProcessChannel, slots: SlotReader, owner: int) -> None:
    is_owner = os.getpid() == owner
    try:
        channel.close(ends=is_owner)
        slots.close()
        if child is not None and is_owner:
            child.end(_GRACE_S)
    finally:
        if child is not None:
            if is_owner:
                child.end(0.0)  # if Ctrl-C ended the wait
            child.close()


class FeederDiedError(WorkerError):
    """Raised if the feeder has died; the message says how. Another feeder can take its place."""


def second_death(error: FeederDiedError) -> WorkerError:
    """Return the error for two consecutive deaths."""
    return WorkerError(
        "two feeder processes died without a batch or answer in between: if memory runs out, lower "
        "memory_budget or num_workers, or raise the limit (of the container, or `ulimit -v`). The second time, "
        f"{error.message}"
    )
