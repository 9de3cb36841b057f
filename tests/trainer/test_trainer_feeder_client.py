"""Calls to a feeder: each gets its own answer, and what belongs to a pass is left for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers

from streamload import StreamLoader
from streamload.errors import WorkerError
from streamload.feeder.messages import Answer, Call
from streamload.trainer.feeder_client import call_feeder


class Scripted:
    """A feeder that sends some messages before its answer, and dies after it."""

    def __init__(self, *before: Any) -> None:
        self.messages: deque[Any] = deque(before)

    def send(self, message: Call) -> None:
        self.messages.append(Answer(message.number, message.arguments))

    def receive(self, _: float | None) -> Any:
        if not self.messages:
            raise WorkerError("the feeder is dead")
        return self.messages.popleft()

    def put_back(self, messages: Iterable[Any]) -> None:
        self.messages.extendleft(reversed(list(messages)))


def test_a_call_leaves_a_pass_its_messages_and_takes_no_answer_to_an_abandoned_call() -> None:
    feeder: Any = Scripted("first batch", Answer(-1, "of a call that Ctrl-C ended"), "second batch")
    assert call_feeder(feeder, "look_at", 1, 2) == (1, 2)
    assert list(feeder.messages) == ["first batch", "second batch"]


def test_an_index_in_memory_is_refused_to_workers(tmp_path: Path) -> None:
    folder = write_numbers(tmp_path, [5])
    with pytest.raises(ValueError, match="only this process can read 'memory://index': it lies in its memory"):
        StreamLoader(folder, num_workers=1, index="memory://index")
