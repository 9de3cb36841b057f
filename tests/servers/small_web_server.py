"""A web server on threads of this process: over IPv6 or TLS, for those who log in, or that sends them elsewhere."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class SmallWebServer:
    """Serves parts of files as long as the `with` block lasts.

    Args:
        files: their contents by path.
        host: "127.0.0.1" or "::1".
        certificate: a file with a certificate and its key, to speak TLS with.
        authorization: the header that must be there.
        moved_to: where all requests are sent instead.

    Attributes:
        requested: path and Authorization of each request.
    """

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        host: str = "127.0.0.1",
        certificate: Path | None = None,
        authorization: str | None = None,
        moved_to: str | None = None,
    ) -> None:
        self.requested: list[tuple[str, str | None]] = []
        self.files = files
        self._authorization = authorization
        self._moved_to = moved_to
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": False})
        self._server = kind((host, 0), self._handler())
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="small-web-server")

    def __enter__(self) -> SmallWebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to one request."""
        given = headers.get("Authorization")
        self.requested.append((path, given))
        content = self.files.get(unquote(urlsplit(path).path))
        if self._moved_to is not None:
            return 302, {"Location": f"{self._moved_to}{path}"}, b""
        if self._authorization not in (None, given):
            return 401, {}, b""
        if content is None:
            return 404, {}, b""
        known = {"ETag": '"v"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        requested = headers.get("Range")
        if method == "HEAD" or requested is None:
            return 200, known, content
        first, _, last = requested.removeprefix("bytes=").partition("-")
        start, end = int(first), min(len(content), int(last) + 1) if last else len(content)
        return 206, known | {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}, content[start:end]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, body = answer(self.command, self.path, self.headers)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        return Handler
