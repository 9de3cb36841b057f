"""Messages over a socket pair: every one whole, in order, each with the descriptors that were sent with it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.memory.async_channel import AsyncChannel
from streamload.memory.channel import Channel, frame
from streamload.memory.unnamed import new_memory


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    near, far = Channel(ours), Channel(theirs)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


@contextmanager
def marked(*marks: bytes) -> Iterator[list[int]]:
    """Descriptors, each of memory that holds a mark by which it is known again."""
    descriptors = []
    for mark in marks:
        descriptors.append(new_memory(0))
        os.pwrite(descriptors[-1], mark, 0)
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def mark_of(descriptor: int) -> bytes:
    """The mark; the descriptor is closed."""
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


@contextmanager
def running(function: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# -- Channel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 18, 10_000_000])
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    payload = os.urandom(1000) * (size // 1000) + b"x" * (size % 1000)
    with channels() as (near, far), running(lambda: near.send(payload)):
        message, descriptors = far.receive()
    assert message == payload
    assert descriptors == []


def test_received_descriptors_are_not_inherited_by_started_programs() -> None:
    with channels() as (near, far), marked(b"x") as sent:
        near.send("one", sent)
        _, received = far.receive()
        inheritable = os.get_inheritable(received[0])
        os.close(received[0])
    assert not inheritable


def test_half_a_message_at_the_timeout_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    framed = frame("two halves", [])
    channel = Channel(theirs)
    try:
        ours.sendall(framed[:9])
        with pytest.raises(TimeoutError):
            channel.receive(0.01)
        ours.sendall(framed[9:])
        assert channel.receive(5)[0] == "two halves"
    finally:
        ours.close()
        channel.close()


def test_running_out_of_descriptors_is_named_as_the_cause() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with channels() as (near, far), marked(b"x") as sent:
        near.send("one", sent)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (sent[0] + 1, hard))
            with pytest.raises(OSError, match="too many open files to receive shared memory"):
                far.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- framing -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 300), max_size=6),
)
def test_descriptors_stay_with_their_message_however_the_stream_is_cut(counts: list[int], cuts: list[int]) -> None:
    """Descriptors go with the first byte of their message, wherever the bytes after it are cut."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    marks = [[b"%d/%d" % (number, part) for part in range(count)] for number, count in enumerate(counts)]
    try:
        for number, of_message in enumerate(marks):
            framed = frame(number, [0] * len(of_message))
            edges = sorted({0, len(framed), *(cut for cut in cuts if cut < len(framed))})
            with marked(*of_message) as sent:
                for start, end in pairwise(edges):
                    socket.send_fds(ours, [framed[start:end]], sent if start == 0 else [])
        received = [channel.receive() for _ in counts]
        assert [(message, [mark_of(number) for number in numbers]) for message, numbers in received] == list(
            enumerate(marks)
        )
    finally:
        ours.close()
        channel.close()


# -- AsyncChannel --------------------------------------------------------------------------------------------------


class Side:
    """An asynchronous end that keeps what it is told."""

    def __init__(self, sock: socket.socket) -> None:
        self.messages: list[tuple[Any, list[int]]] = []
        self.losses = 0
        self.changed = asyncio.Event()
        self.channel = AsyncChannel(sock, self._on_message, self._on_lost)

    def _on_message(self, message: Any, descriptors: list[int]) -> None:
        self.messages.append((message, descriptors))
        self.changed.set()

    def _on_lost(self) -> None:
        self.losses += 1
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


async def test_async_sending_does_not_wait_for_a_slow_reader_and_loses_nothing() -> None:
    payloads = [bytes([number]) * 300_000 for number in range(20)]

    ours, theirs = socket.socketpair()
    far = Channel(theirs)
    near = Side(ours)
    with marked(*(b"%d" % number for number in range(20))) as sent:
        for payload, descriptor in zip(payloads, sent, strict=True):
            near.channel.send(payload, [os.dup(descriptor)], close=True)  # returns, though the socket is full
    for number, payload in enumerate(payloads):
        message, descriptors = await asyncio.to_thread(far.receive)
        assert message == payload
        assert [mark_of(descriptor) for descriptor in descriptors] == [b"%d" % number]
    near.channel.close()
    far.close()
