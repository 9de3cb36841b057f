"""An HTTP server that fails on request: ranges, ETags and S3 listings, with faults drawn from a seed.

It runs in a process of its own (`python fault_server.py CONTROL MEMORY PORT`), so that neither side waits for the
other's GIL, and sends straight from unnamed memory. `faults.py` starts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import mmap
import random
import socket
import struct
import sys
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "TooManyRequests", 503: "SlowDown"}
_MOST_HEADER_BYTES = 64 << 10
_SEND_BYTES = 4 << 20
_MOST_COMMAND_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Script:
    """What goes wrong, and how often. Shares are of the GET requests for objects, drawn for each one from the seed.

    Attributes:
        seed: of all that is drawn; the n-th request has the same faults in every run.
        first_byte_s: before each answer.
        bytes_per_s: of a body, for each connection; None sends as fast as it goes.
        status, status_share: an answer of this status without the object.
        cut_share: bodies that end somewhere, with the connection; the declared length stays. At least one byte is
            sent, and bodies of one byte are whole.
        reset_share: as cut, but the connection is reset.
        sleep_share, sleep_s: answers that come so late.
        silent_share: requests that are never answered.
        wrong_range_share: answers whose Content-Range, and bytes, are others than those asked for.
        short_share: answers that hold only the first half of the range, and say so.
        whole_share: answers to a range request with status 200 and the whole object.
        swap_at: with the GET request of this number (from 0) each object becomes another one of the same size.
        only: objects whose names end with this; others have no faults but delay, rate and swap.
    """

    seed: int = 0
    first_byte_s: float = 0.0
    bytes_per_s: float | None = None
    status: int = 503
    status_share: float = 0.0
    cut_share: float = 0.0
    reset_share: float = 0.0
    sleep_share: float = 0.0
    sleep_s: float = 10.0
    silent_share: float = 0.0
    wrong_range_share: float = 0.0
    short_share: float = 0.0
    whole_share: float = 0.0
    swap_at: int | None = None
    only: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One object: where it lies in the memory."""

    offset: int
    size: int
    etag: str


KINDS = ("status", "cut", "reset", "sleep", "silent", "wrong_range", "short", "whole")


def faults_of(script: Script, number: int) -> tuple[set[str], float]:
    """The faults of the GET request of this number, and where a body is cut, from 0 to 1.

    Each kind is drawn by itself, always in the same order.
    """
    draw = random.Random(f"{script.seed}/{number}")
    faults = {kind for kind in KINDS if draw.random() < getattr(script, f"{kind}_share")}
    return faults, draw.random()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]


@dataclasses.dataclass(slots=True)
class Answer:
    """Head and body of an answer; the body is text, or a piece of the memory."""

    status: int
    headers: dict[str, str]
    text: bytes = b""
    offset: int = 0
    size: int = 0

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Server:
    """All connections, the objects, the script, and the record of what was asked."""

    def __init__(self, memory: BinaryIO, objects: dict[str, Stored], swapped: dict[str, Stored]) -> None:
        self.memory = memory
        self.objects, self.swapped = objects, swapped
        self.script = Script()
        self.forget()

    def forget(self) -> None:
        self.gets = 0
        self.sent_bytes = 0
        self.most_beside = 0
        self.beside = 0
        self.log: list[tuple[str, str, str | None]] = []
        self.spans: list[tuple[str, float, float]] = []

    async def serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        received = b""
        try:
            while True:
                while (end := received.find(b"\r\n\r\n")) < 0:
                    more = await loop.sock_recv(connection, 1 << 16)
                    if not more or len(received) > _MOST_HEADER_BYTES:
                        return
                    received += more
                request, received = _parse(received[:end]), received[end + 4 :]
                self.beside += 1
                self.most_beside = max(self.most_beside, self.beside)
                began_s = loop.time()
                try:
                    if not await self.answer(connection, request):
                        return
                finally:
                    self.beside -= 1
                    self.spans.append((request.path, began_s, loop.time()))
        except (ConnectionError, BrokenPipeError):
            return
        finally:
            connection.close()

    async def answer(self, connection: socket.socket, request: Request) -> bool:
        """Answer one request; returns whether the connection can be used again."""
        loop = asyncio.get_running_loop()
        self.log.append((request.method, request.path, request.headers.get("range")))
        faults, cut_at, swapped = set[str](), 0.0, False
        is_listing = "list-type" in request.query
        if request.method == "GET" and not is_listing:
            if request.path.endswith(self.script.only):
                faults, cut_at = faults_of(self.script, self.gets)
            swapped = self.script.swap_at is not None and self.gets >= self.script.swap_at
            self.gets += 1
        if delay_s := self.script.first_byte_s + self.script.sleep_s * ("sleep" in faults):
            await asyncio.sleep(delay_s)
        if "silent" in faults:
            await _until_closed(connection)
            return False
        answer = self.listing(request) if is_listing else self.object(request, faults, swapped)
        await loop.sock_sendall(connection, answer.head() + (b"" if request.method == "HEAD" else answer.text))
        if request.method == "HEAD" or not answer.size:
            return True
        size = answer.size
        if faults & {"cut", "reset"} and size > 1:
            size = max(1, int(cut_at * size))
        await self.send(connection, answer.offset, size)
        if size < answer.size and "cut" not in faults:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return size == answer.size

    async def send(self, connection: socket.socket, offset: int, size: int) -> None:
        loop = asyncio.get_running_loop()
        rate = self.script.bytes_per_s
        step = _SEND_BYTES if rate is None else max(1, int(min(_SEND_BYTES, rate * 0.01)))
        began_s = loop.time()
        for start in range(0, size, step):
            count = min(step, size - start)
            await loop.sock_sendfile(connection, self.memory, offset + start, count, fallback=False)
            self.sent_bytes += count
            if rate is not None:
                await asyncio.sleep(began_s + (start + count) / rate - loop.time())

    def object(self, request: Request, faults: set[str], swapped: bool) -> Answer:
        stored = (self.swapped if swapped else self.objects).get(request.path.lstrip("/"))
        if "status" in faults:
            code = _CODES.get(self.script.status, "InternalError")
            return _text(self.script.status, f"<Error><Code>{code}</Code><Message>by the script</Message></Error>")
        if stored is None:
            return _text(404, "<Error><Code>NoSuchKey</Code></Error>")
        if request.headers.get("if-match", stored.etag) not in (stored.etag, "*"):
            return _text(412, "<Error><Code>PreconditionFailed</Code></Error>")
        headers = {"ETag": stored.etag, "Accept-Ranges": "bytes", "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        requested = request.headers.get("range")
        if requested is None or "whole" in faults:
            return Answer(200, headers | {"Content-Length": str(stored.size)}, offset=stored.offset, size=stored.size)
        start, end = _range(requested, stored.size)
        if start >= end:
            return _text(416, "", {"Content-Range": f"bytes */{stored.size}"})
        if "wrong_range" in faults:
            start, end = (start - 1, end - 1) if start else (min(start + 1, end - 1), min(end + 1, stored.size))
        if "short" in faults:
            end = start + (end - start + 1) // 2
        headers |= {"Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{stored.size}"}
        return Answer(206, headers, offset=stored.offset + start, size=end - start)

    def listing(self, request: Request) -> Answer:
        """S3's ListObjectsV2, in one page, with `prefix` and `delimiter`."""
        bucket = request.path.strip("/")
        prefix, delimiter = (request.query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        found: dict[str, Stored | None] = {}
        for name, stored in sorted(self.objects.items(), key=lambda item: item[0]):
            key = name.removeprefix(f"{bucket}/")
            if key != name and key.startswith(prefix):
                head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
                found[f"{prefix}{head}{mark}" if mark else key] = None if mark else stored
        entries = "".join(_entry(key, stored) for key, stored in found.items())
        head = f"<Name>{escape(bucket)}</Name><KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        return _text(200, f'<ListBucketResult xmlns="{space}">{head}{entries}</ListBucketResult>')

    def report(self) -> dict[str, Any]:
        return {
            "requests": len(self.log),
            "sent_bytes": self.sent_bytes,
            "most_beside": self.most_beside,
            "log": self.log,
            "spans": self.spans,
        }


def _entry(name: str, stored: Stored | None) -> str:
    if stored is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{escape(name)}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(stored.etag)}</ETag><Size>{stored.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _text(status: int, text: str, headers: dict[str, str] | None = None) -> Answer:
    content = text.encode()
    return Answer(
        status, {"Content-Type": "application/xml", "Content-Length": str(len(content))} | (headers or {}), content
    )


def _parse(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    parts = urlsplit(target)
    return Request(method, unquote(parts.path), parse_qs(parts.query, keep_blank_values=True), headers)


def _range(requested: str, size: int) -> tuple[int, int]:
    first, _, last = requested.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


async def _until_closed(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(connection, 1 << 16):
        pass


def stored_objects(
    memory: BinaryIO, sizes: dict[str, int], aliases: dict[str, str]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """The objects lie one after the other in the memory, and behind them all swapped ones (each byte inverted).

    An alias is one more name of an object.
    """
    offset, total = 0, sum(sizes.values())
    objects, swapped = {}, {}
    with mmap.mmap(memory.fileno(), 2 * total or 1) as mapped, memoryview(mapped) as view:
        for name, size in sizes.items():
            with view[offset : offset + size] as content:
                digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            objects[name] = Stored(offset, size, f'"{digest}"')
            swapped[name] = Stored(total + offset, size, f'"swapped-{digest}"')
            offset += size
    for alias, name in aliases.items():
        objects[alias], swapped[alias] = objects[name], swapped[name]
    return objects, swapped


async def main(control: socket.socket, memory: BinaryIO, port: int) -> None:
    """Serve until the control socket ends. Each line there is a command; each is answered by a line."""
    reader, writer = await asyncio.open_connection(sock=control, limit=_MOST_COMMAND_BYTES)
    names = json.loads(await reader.readline())
    server = Server(memory, *stored_objects(memory, names["sizes"], names["aliases"]))
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    listener.setblocking(False)
    tasks: set[asyncio.Task[None]] = set()

    async def accept() -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = loop.create_task(server.serve(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    accepting = loop.create_task(accept())
    writer.write(json.dumps({"port": listener.getsockname()[1]}).encode() + b"\n")
    while line := await reader.readline():
        command = json.loads(line)
        if "script" in command:
            server.script = Script(**command["script"])
            server.forget()
        writer.write(json.dumps(server.report()).encode() + b"\n")
    accepting.cancel()
    listener.close()
    writer.close()


if __name__ == "__main__":
    with open(int(sys.argv[2]), "rb") as unnamed:
        asyncio.run(main(socket.socket(fileno=int(sys.argv[1])), unnamed, int(sys.argv[3])))
