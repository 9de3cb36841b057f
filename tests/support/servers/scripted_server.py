"""A server of one object whose answers are scripted."""

from __future__ import annotations

from collections.abc import Mapping

from servers.threaded_server import Answer, ThreadedServer, part_of

CONTENT = bytes(range(256)) * 2000
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>told-secret</Message></Error>"


class ScriptedServer(ThreadedServer):
    """Its faults are used up one by one, and then the answers are right.

    A fault is `<status> <code>`, or one of `whole`, `open`, `other`, `short`, `cut`, `replaced` (cut, and then there is
    another version), `unsized` (half of it, and nothing tells how much it is). An empty `etag` or `changed`, which is
    the time of the last modification, is not sent.
    """

    def __init__(self, *faults: str, etag: str = '"v1"') -> None:
        super().__init__()
        self.faults = list(faults)
        self.etag = etag
        self.changed = "Sat, 01 Jan 2022 00:00:00 GMT"
        self.requests: list[str] = []

    def answer(self, method: str, address: str, headers: Mapping[str, str], _: bytes) -> Answer:
        """What comes next."""
        self.requests.append(f"{method} {address}\n{headers}".lower())
        fault = self.faults.pop(0) if self.faults else ""
        if fault[:1].isdigit():
            status, code = fault.split()
            return int(status), {}, _ERROR.format(code=code).encode()
        known = {"ETag": self.etag, "Last-Modified": self.changed}
        requested = "" if fault == "whole" else headers.get("Range", "")
        start, body = part_of(CONTENT, requested)
        if requested:
            shift = 1 if fault == "other" else 0
            total = "*" if fault == "open" else len(CONTENT)
            known["Content-Range"] = f"bytes {start + shift}-{start + len(body) - 1 + shift}/{total}"
        if fault in ("cut", "replaced", "unsized"):
            known["Content-Length"] = "" if fault == "unsized" else str(len(body))
            body = body[: len(body) // 2]
        if fault == "replaced":
            self.etag = '"v2"'
        return 206 if requested else 200, known, body[:-10] if fault == "short" else body
