"""Remote shards without workers: another process fetches, and the user's functions are called here, as they are."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from places import Place
from servers.faults import FaultServer

from streamload import StreamLoader
from streamload.errors import TransformError

SIZES = [[200] * 10] * 3


def loader_of(server: FaultServer, transform: Any, **options: Any) -> StreamLoader:
    urls = Place(server.url).urls("plain", range(3))
    return StreamLoader(urls, 5, fields=("cls",), num_workers=0, transform={"cls": transform}, pad=False, **options)


def labels(batches: Any) -> list[int]:
    return [label for (batch,) in batches for label in batch.tolist()]


class LockedError(Exception):
    """It cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


def test_functions_are_called_in_the_callers_thread(server: FaultServer) -> None:
    called: list[tuple[int, int]] = []

    def note(label: int) -> int:
        called.append((os.getpid(), threading.get_ident()))
        return label

    with loader_of(server, note) as loader:
        assert sorted(labels(loader)) == list(range(30))
    assert called == [(os.getpid(), threading.get_ident())] * 30


@pytest.mark.usefixtures("feeders_in_threads")
def test_what_they_raise_is_raised_itself_with_its_frames(server: FaultServer) -> None:
    raised: list[LockedError] = []

    def fail(label: int) -> int:
        if label == 7:
            raised.append(LockedError())
            raise raised[0]
        return label

    with loader_of(server, fail) as loader:
        batches = iter(loader)
        assert labels([next(batches)]) == list(range(5))
        with pytest.raises(TransformError) as caught:
            next(batches)
        assert caught.value.__cause__ is raised[0]
        assert raised[0].__traceback__ is not None, "a debugger finds the frames"
        del batches
        assert loader.state_dict()["position"] == 5


@pytest.mark.usefixtures("feeders_in_threads")
def test_a_sample_that_is_left_out_is_counted(server: FaultServer) -> None:
    def fail(label: int) -> int:
        if label % 10 == 7:
            raise LockedError
        return label

    with loader_of(server, fail, on_error="skip") as loader:
        assert labels(loader) == [label for label in range(30) if label % 10 != 7]
        assert ["LockedError: held" in str(error.__cause__) for error in loader.skipped] == [True] * 3


@pytest.mark.usefixtures("feeders_in_threads")
def test_an_interrupt_leaves_the_pass_and_the_next_one_is_whole(server: FaultServer) -> None:
    interrupts = [KeyboardInterrupt]

    def interrupt(label: int) -> int:
        if label == 7 and interrupts:
            raise interrupts.pop()
        return label

    with loader_of(server, interrupt) as loader:
        with pytest.raises(KeyboardInterrupt):
            list(loader)
        assert labels(loader) == list(range(30))


@pytest.mark.usefixtures("feeders_in_threads")
def test_nothing_is_done_any_more_for_a_pass_that_was_left(server: FaultServer) -> None:
    """A task of it waits in the socket at that moment, and its memory may be gone."""
    called: list[int] = []

    def note(label: int) -> int:
        called.append(label)
        return label

    with loader_of(server, note) as loader:
        for _ in range(3):
            for batch in loader:
                assert labels([batch]) == list(range(5))
                assert called == list(range(len(called))), "it begins with what was asked for"
                break
            called.clear()
        assert labels(loader) == list(range(30))
    assert called == list(range(30))
