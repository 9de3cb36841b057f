"""What comes from a feeder: a call gets its own answer, and an epoch all messages in order."""

from __future__ import annotations

import pytest

from streamload.decode.failure import failure_of
from streamload.errors import StorageError
from streamload.feeder.messages import Answer, Failed
from streamload.trainer.inbox import Inbox


def test_a_call_leaves_the_epoch_its_messages_and_gets_no_answer_to_an_abandoned_call() -> None:
    inbox = Inbox()
    inbox.expect(1)
    inbox.expect(2)
    inbox.forget(1)  # Ctrl-C has ended it
    for message in ("first batch", Answer(1, "abandoned"), "second batch", Answer(2, "its own")):
        inbox.put(message)
    assert inbox.answer(2) == Answer(2, "its own")
    assert inbox.answer(1) is None
    assert [inbox.take(), inbox.take(), inbox.take()] == ["first batch", "second batch", None]


def test_messages_that_are_put_back_come_first() -> None:
    inbox = Inbox()
    inbox.put("third")
    inbox.put_back(["first", "second"])
    assert len(inbox) == 3
    assert [inbox.take(), inbox.take(), inbox.take()] == ["first", "second", "third"]


def test_a_failure_of_the_feeder_ends_the_call_and_is_left_for_the_epoch() -> None:
    inbox = Inbox()
    inbox.expect(1)
    assert inbox.answer(1) is None
    failed = Failed(failure_of(StorageError("it is gone", url="a.tar")))
    inbox.put(failed)
    with pytest.raises(StorageError, match="it is gone"):
        inbox.answer(1)
    assert inbox.take() is failed
