"""A server of one object whose answers are scripted, in the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

CONTENT = bytes(range(256)) * 2000
_HALVES = ("cut", "replaced", "unsized")
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>told-secret</Message></Error>"


@dataclass
class Script:
    """What to answer: `faults` are used up one by one, and then the answers are right.

    A fault is `<status> <code>`, or one of `whole`, `open`, `other`, `short`, `cut`, `replaced` (cut, and then there is
    another version), `unsized` (half of it, and nothing tells how much it is). An empty `etag` or `changed`, which is
    the time of the last modification, is not sent.
    """

    faults: list[str] = field(default_factory=list)
    etag: str = '"v1"'
    changed: str = "Sat, 01 Jan 2022 00:00:00 GMT"
    ignores_if_match: bool = False
    requests: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def serve(script: Script) -> AsyncIterator[Script]:
    """Answer until the block ends."""
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                script.requests.append(head)
                if not await _answer(script, head, writer):
                    break
        writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(connected(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    try:
        yield script
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks)


async def _answer(script: Script, head: str, writer: asyncio.StreamWriter) -> bool:
    fault = script.faults.pop(0) if script.faults else ""
    if fault[:1].isdigit():
        status, code = fault.split()
        body = b"" if head.startswith("HEAD") else _ERROR.format(code=code).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return True
    found = re.search(r"range: bytes=(\d+)-(\d*)", head, re.IGNORECASE)
    start, last = (int(found[1]), int(found[2] or len(CONTENT) - 1)) if found else (0, len(CONTENT) - 1)
    body = CONTENT[start : last + 1]
    lines = [f"ETag: {script.etag}"] if script.etag else []
    lines += [f"Last-Modified: {script.changed}"] if script.changed else []
    wanted = re.search(r"if-match: (.*)\r", head, re.IGNORECASE)
    if wanted and wanted[1] != script.etag and not script.ignores_if_match:
        writer.write(b"HTTP/1.1 412 X\r\nContent-Length: 0\r\n\r\n")
        return True
    if found and fault != "whole":
        shift = 1 if fault == "other" else 0
        total = "*" if fault == "open" else len(CONTENT)
        lines.append(f"Content-Range: bytes {start + shift}-{last + shift}/{total}")
    if fault == "whole":
        body = CONTENT
    if fault == "short":
        body = body[:-10]
    if fault != "unsized":
        lines.append(f"Content-Length: {len(body)}")
    status = "206 Partial" if found and fault != "whole" else "200 OK"
    sent = b"" if head.startswith("HEAD") else body[: len(body) // 2] if fault in _HALVES else body
    writer.write("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + sent)
    await writer.drain()
    if fault == "replaced":
        script.etag = '"v2"'
    return fault not in _HALVES
