"""What has come from a feeder and was not taken yet: messages of the epoch, and answers to calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from streamload.decode.failure import error_from
from streamload.feeder.messages import Answer, Failed, Scanning
from streamload.trainer.scan_progress import ScanProgress


class Inbox:
    """Messages in order, and awaited answers by their number.

    Args:
        progress: shows how far scans are; nothing is kept of that.
    """

    def __init__(self, progress: ScanProgress | None = None) -> None:
        self._progress = progress or ScanProgress(shows=False)
        self._messages: deque[Any] = deque()
        self._answers: dict[int, Answer | None] = {}
        self._failed: Failed | None = None

    def __len__(self) -> int:
        """How many messages are here; answers do not count."""
        return len(self._messages)

    def put(self, message: Any) -> None:
        """Add what has come. An answer that nobody awaits any more is dropped."""
        if isinstance(message, Scanning):
            self._progress.show(message)
            return
        self._progress.end()
        if not isinstance(message, Answer):
            self._messages.append(message)
        elif message.number in self._answers:
            self._answers[message.number] = message
        if isinstance(message, Failed):
            self._failed = message

    def put_back(self, messages: Iterable[Any]) -> None:
        """Have messages taken again, before any other."""
        self._messages.extendleft(reversed(list(messages)))

    def take(self) -> Any | None:
        """The next message, or None."""
        try:
            return self._messages.popleft()
        except IndexError:
            return None

    def expect(self, number: int) -> None:
        """Keep the answer to a call when it comes. To be called before the call is sent."""
        self._answers[number] = None

    def forget(self, number: int) -> None:
        """Do not keep the answer to a call any longer. Idempotent."""
        self._answers.pop(number, None)

    def answer(self, number: int) -> Answer | None:
        """The answer to a call, if it is here.

        Raises:
            Exception: what the feeder has failed with: nothing more will come.
        """
        found = self._answers.get(number)
        if found is None and self._failed is not None:
            raise error_from(self._failed.failure)
        return found

    def clear(self) -> None:
        """Drop all messages; nothing more is waited for."""
        self._messages.clear()
        self._progress.end()
