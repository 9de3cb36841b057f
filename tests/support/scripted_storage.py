"""A storage whose answers a test writes down, with waits by the loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from streamload.errors import ShardChangedError, StorageError

__all__ = ["Answer", "RangeRequest", "ScriptedStorage"]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one request goes.

    Attributes:
        wait_s: until it is answered.
        piece_s: before each piece after the first.
        piece_bytes: how large they are.
        breaks_after: so many bytes of the body come, then `error`, or the end where there is none.
        hangs: instead of breaking or ending, nothing more comes.
        error: raised instead of an answer, or where the body breaks.
        more: bytes behind what was asked for.
        etag, total_bytes: what it claims; None: what is true.
    """

    wait_s: float = 0.0
    piece_s: float = 0.0
    piece_bytes: int = 10
    breaks_after: int | None = None
    hangs: bool = False
    error: Exception | None = None
    more: bytes = b""
    etag: str | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request: when, and for what."""

    at_s: float
    start: int
    end: int | None
    etag: str | None


class ScriptedStorage:
    """Serves one object under every url; `script` says how the request of a number (from 0) goes."""

    def __init__(self, content: bytes, script: Callable[[int], Answer] = lambda _: Answer(), etag: str = "v1") -> None:
        self.content = content
        self.etag = etag
        self.script = script
        self.requested: list[RangeRequest] = []
        self.bodies: list[ScriptedBody] = []

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> ScriptedBody:
        answer = self.script(len(self.requested))
        self.requested.append(RangeRequest(asyncio.get_running_loop().time(), start, end, etag))
        await asyncio.sleep(answer.wait_s)
        if answer.error is not None and answer.breaks_after is None:
            raise answer.error
        if etag is not None and etag != self.etag:
            raise ShardChangedError("precondition failed", url=url)
        if start >= len(self.content):
            raise StorageError("range not satisfiable", url=url)
        answer = replace(answer, etag=answer.etag or self.etag, total_bytes=answer.total_bytes or len(self.content))
        self.bodies.append(ScriptedBody(self.content[start:end] + answer.more, answer))
        return self.bodies[-1]


class ScriptedBody:
    """An answer of `ScriptedStorage`."""

    def __init__(self, content: bytes, answer: Answer) -> None:
        self.total_bytes = answer.total_bytes
        self.etag = answer.etag
        self.closed = False
        self._content = content if answer.breaks_after is None else content[: answer.breaks_after]
        self._answer = answer

    @property
    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._content), self._answer.piece_bytes):
            if start:
                await asyncio.sleep(self._answer.piece_s)
            yield self._content[start : start + self._answer.piece_bytes]
        if self._answer.hangs:
            await asyncio.sleep(10**9)
        if self._answer.error is not None:
            raise self._answer.error

    async def aclose(self) -> None:
        self.closed = True
