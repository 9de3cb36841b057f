"""An S3 server that takes objects, whole or in parts, and refuses some of the requests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class UploadServer:
    """On threads of this process, for as long as the `with` block lasts.

    Attributes:
        refusals: how many requests are still refused.
        refuses: only those in whose address this stands.
        status: with which status.
        objects: what was written, by path.
        taken: the method and address of each request that was not refused.
        refused: the same of those that were.
    """

    def __init__(self) -> None:
        self.refusals = 0
        self.refuses = ""
        self.status = 503
        self.objects: dict[str, bytes] = {}
        self.taken: list[str] = []
        self.refused: list[str] = []
        self._parts: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False  # so that closing waits for them
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="upload-server")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, address: str, body: bytes) -> tuple[int, str]:
        """Status and text of the answer to one request."""
        with self._lock:
            if self.refusals and self.refuses in address:
                self.refusals -= 1
                self.refused.append(f"{method} {address}")
                return self.status, "<Error><Code>by the test</Code></Error>"
            self.taken.append(f"{method} {address}")
            path, requested = urlsplit(address).path, parse_qs(urlsplit(address).query, keep_blank_values=True)
            if "uploads" in requested:
                return 200, "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            if "partNumber" in requested:
                self._parts[int(requested["partNumber"][0])] = body
            elif method == "POST":
                self.objects[path] = b"".join(self._parts[number] for number in sorted(self._parts))
                return 200, '<CompleteMultipartUploadResult><ETag>"v"</ETag></CompleteMultipartUploadResult>'
            else:
                self.objects[path] = body
            return 200, ""

    def __enter__(self) -> UploadServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, text = answer(self.command, self.path, body)
                self.send_response(status)
                self.send_header("ETag", '"v"')
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_PUT

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        return Handler
