"""Messages over a socket pair: every one whole, in order, each with the descriptors that were sent with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.memory.async_channel import AsyncChannel
from streamload.memory.channel import MAX_DESCRIPTORS, Channel, Frames, frame
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


def test_many_messages_that_arrive_in_one_read_are_told_apart() -> None:
    with channels() as (near, far):
        for number in range(100):
            near.send((number, "x" * (number % 7)))
        assert [far.receive()[0] for _ in range(100)] == [(number, "x" * (number % 7)) for number in range(100)]


def test_descriptors_come_with_the_message_they_were_sent_with() -> None:
    with channels() as (near, far), marked(*(b"%d" % number for number in range(10))) as sent:
        near.send("none")
        near.send("three", sent[:3])
        near.send("one", sent[3:4])
        near.send("none")
        near.send("six", sent[4:])
        received = [far.receive() for _ in range(5)]
        marks = [(message, [mark_of(number) for number in numbers]) for message, numbers in received]
        assert all(os.fstat(number) for number in sent), "they stay open on the sender's side"
    assert marks == [
        ("none", []),
        ("three", [b"0", b"1", b"2"]),
        ("one", [b"3"]),
        ("none", []),
        ("six", [b"4", b"5", b"6", b"7", b"8", b"9"]),
    ]


def test_descriptors_arrive_with_a_message_larger_than_the_socket() -> None:
    payload = os.urandom(3_000_000)
    with channels() as (near, far), marked(b"large") as sent:
        with running(lambda: near.send(payload, sent)):
            message, received = far.receive()
        assert message == payload
        assert [mark_of(number) for number in received] == [b"large"]


def test_as_many_descriptors_as_are_allowed_go_with_one_message() -> None:
    with channels() as (near, far), marked(*(b"%d" % number for number in range(MAX_DESCRIPTORS))) as sent:
        near.send("first", sent)
        near.send("second", sent)
        for _ in range(2):
            _, received = far.receive()
            assert [mark_of(number) for number in received] == [b"%d" % number for number in range(MAX_DESCRIPTORS)]


def test_more_descriptors_than_are_allowed_are_refused() -> None:
    with channels() as (near, _), pytest.raises(ValueError, match=f"{MAX_DESCRIPTORS + 1} descriptors"):
        near.send("too many", [0] * (MAX_DESCRIPTORS + 1))


def test_received_descriptors_are_not_inherited_by_programs_that_are_started() -> None:
    with channels() as (near, far), marked(b"x") as sent:
        near.send("one", sent)
        _, received = far.receive()
        inheritable = os.get_inheritable(received[0])
        os.close(received[0])
    assert not inheritable


def test_the_end_of_the_other_side_is_an_eof_error_after_the_last_message() -> None:
    with channels() as (near, far):
        near.send("last")
        near.close()
        assert far.receive()[0] == "last"
        for _ in range(2):
            with pytest.raises(EOFError):
                far.receive()


def test_a_message_cut_off_by_the_end_is_an_eof_error() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(frame("never whole", [])[:-1])
    ours.close()
    channel = Channel(theirs)
    try:
        with pytest.raises(EOFError):
            channel.receive()
    finally:
        channel.close()


def test_a_reset_connection_is_an_eof_error() -> None:
    """What the reader sees when the other side dies with messages to it unread."""
    with channels() as (near, far):
        near.send("never read")
        far.close()
        with pytest.raises(EOFError):
            near.receive()


def test_sending_to_a_closed_side_says_so() -> None:
    with channels() as (near, far):
        far.close()
        with pytest.raises(BrokenPipeError):
            near.send("nobody there")


def test_waiting_ends_at_the_timeout_and_the_channel_goes_on() -> None:
    with channels() as (near, far):
        with pytest.raises(TimeoutError):
            far.receive(0.01)
        near.send("later")
        assert far.receive(5)[0] == "later"
        with running(lambda: (time.sleep(0.05), near.send("much later"))[1]):
            assert far.receive()[0] == "much later", "the timeout of an earlier call must not hold for a later one"


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


def test_a_message_that_comes_in_drops_does_not_extend_the_timeout() -> None:
    """The timeout is of the message, not of each of its bytes."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    stop = threading.Event()

    def drip() -> None:
        for byte in frame("x" * 1000, []):
            if stop.wait(0.01):
                return
            ours.sendall(bytes([byte]))

    try:
        with running(drip):
            try:
                with pytest.raises(TimeoutError):
                    channel.receive(0.2)
            finally:
                stop.set()
    finally:
        ours.close()
        channel.close()


def test_waiting_lets_other_threads_and_signal_handlers_run() -> None:
    seen: list[str] = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append("handler"))
    main = threading.main_thread().ident
    assert main is not None
    try:
        with channels() as (near, far):

            def interrupt_then_send() -> None:
                seen.append("thread")
                while "handler" not in seen:
                    signal.pthread_kill(main, signal.SIGUSR1)
                    time.sleep(0.01)
                near.send("done")

            with running(interrupt_then_send):
                assert far.receive()[0] == "done"
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen[:2] == ["thread", "handler"]


def test_descriptors_that_nobody_took_are_closed_with_the_channel() -> None:
    """The proof is that nothing is left behind."""
    with channels() as (near, far), marked(b"one", b"two") as sent:
        near.send("taken")
        near.send("left", sent)
        assert far.receive()[0] == "taken"


def test_running_out_of_descriptors_is_named_as_the_cause() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with channels() as (near, far), marked(b"x") as sent:
        near.send("one", sent)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (sent[0] + 1, hard))
            with pytest.raises(OSError, match="too many open files to take shared memory"):
                far.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- framing -------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    messages=st.lists(st.binary(max_size=40) | st.integers() | st.none(), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_frames_are_whole_however_the_stream_is_cut(messages: list[Any], cuts: list[int]) -> None:
    stream = b"".join(frame(message, []) for message in messages)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    frames = Frames()
    found = []
    for start, end in pairwise(edges):
        frames.feed(stream[start:end], [])
        while (taken := frames.take()) is not None:
            found.append(taken)
    assert found == [(message, []) for message in messages]


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


async def test_async_messages_reach_the_other_side_in_order() -> None:
    ours, theirs = socket.socketpair()
    near, far = Side(ours), Side(theirs)
    for number in range(300):
        near.channel.send(number)
    await far.until(lambda: len(far.messages) == 300)
    far.channel.send("answer")
    await near.until(lambda: bool(near.messages))
    near.channel.close()
    far.channel.close()
    assert far.messages == [(number, []) for number in range(300)]
    assert near.messages == [("answer", [])]


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


async def test_async_sending_closes_the_descriptors_it_takes_over() -> None:
    # what was not closed would be left behind
    ours, theirs = socket.socketpair()
    near, far = Side(ours), Side(theirs)
    with marked(b"kept") as kept:
        near.channel.send("x", [new_memory(0)], close=True)
        near.channel.send("y", kept)
        await far.until(lambda: len(far.messages) == 2)
        assert mark_of(os.dup(kept[0])) == b"kept"
    for _, descriptors in far.messages:
        os.close(descriptors[0])
    near.channel.close()
    near.channel.send("after the end", [new_memory(0)], close=True)
    far.channel.close()


async def test_async_senders_may_close_their_descriptors_while_these_wait_to_be_sent() -> None:
    ours, theirs = socket.socketpair()
    far = Channel(theirs)
    near = Side(ours)
    near.channel.send(bytes(2_000_000))
    with marked(b"waits") as sent:
        near.channel.send("second", sent)
    with marked(b"takes its number"):
        await asyncio.to_thread(far.receive)
        _, received = await asyncio.to_thread(far.receive)
    assert [mark_of(number) for number in received] == [b"waits"]
    near.channel.close()
    far.close()


async def test_async_closing_closes_descriptors_that_were_not_sent_yet() -> None:
    ours, theirs = socket.socketpair()
    near = Side(ours)
    near.channel.send(bytes(2_000_000))
    near.channel.send("waits", [new_memory(0)], close=True)
    near.channel.close()
    near.channel.close()
    theirs.close()


async def test_async_loss_is_reported_once_after_the_last_message() -> None:
    ours, theirs = socket.socketpair()
    near = Side(ours)
    far = Channel(theirs)
    far.send("last")
    far.close()
    await near.until(lambda: near.losses > 0)
    assert near.messages == [("last", [])]
    near.channel.send("into the void")
    near.channel.close()
    await asyncio.sleep(0.01)
    assert near.losses == 1


async def test_async_loss_while_sending_is_reported_later_and_not_from_within_the_call() -> None:
    """Whoever sends may be in the middle of going through what it would do about a loss."""

    ours, theirs = socket.socketpair()
    near = Side(ours)
    theirs.close()
    near.channel.send("nobody there")
    assert near.losses == 0
    await near.until(lambda: near.losses > 0)
    assert near.losses == 1


async def test_async_loss_is_not_reported_after_close() -> None:
    ours, theirs = socket.socketpair()
    near = Side(ours)
    near.channel.close()
    theirs.close()
    await asyncio.sleep(0.01)
    assert near.losses == 0


async def test_async_closing_from_within_a_message_stops_the_messages() -> None:
    ours, theirs = socket.socketpair()
    seen: list[Any] = []

    def on_message(message: Any, _: list[int]) -> None:
        seen.append(message)
        channel.close()

    channel = AsyncChannel(ours, on_message, lambda: seen.append("lost"))
    far = Channel(theirs)
    for number in range(3):
        far.send(number)
    await asyncio.sleep(0.05)
    far.close()
    assert seen == [0]
