"""An S3 server that takes objects, whole or in parts, and refuses some of the requests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from servers.threaded_server import Answer, ThreadedServer

_HEADERS = {"ETag": '"v"'}


class UploadServer(ThreadedServer):
    """As long as the `with` block lasts.

    Attributes:
        refusals: how many requests are still refused.
        refuses: only those in whose address this stands.
        status: with which status.
        objects: what was written, by path.
        taken: the method and address of each request that was not refused.
        refused: the same of those that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusals = 0
        self.refuses = ""
        self.status = 503
        self.objects: dict[str, bytes] = {}
        self.taken: list[str] = []
        self.refused: list[str] = []
        self._parts: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, method: str, address: str, _: Mapping[str, str], body: bytes) -> Answer:
        """Keep what is uploaded, or refuse it."""
        with self._lock:
            if self.refusals and self.refuses in address:
                self.refusals -= 1
                self.refused.append(f"{method} {address}")
                return self.status, _HEADERS, b"<Error><Code>by the test</Code></Error>"
            self.taken.append(f"{method} {address}")
            path, requested = urlsplit(address).path, parse_qs(urlsplit(address).query, keep_blank_values=True)
            if "uploads" in requested:
                begun = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
                return 200, _HEADERS, begun
            if "partNumber" in requested:
                self._parts[int(requested["partNumber"][0])] = body
            elif method == "POST":
                self.objects[path] = b"".join(self._parts[number] for number in sorted(self._parts))
                complete = b'<CompleteMultipartUploadResult><ETag>"v"</ETag></CompleteMultipartUploadResult>'
                return 200, _HEADERS, complete
            else:
                self.objects[path] = body
            return 200, _HEADERS, b""
