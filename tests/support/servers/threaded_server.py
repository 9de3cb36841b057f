"""A web server on threads of this process; whoever derives from it says what each request is answered."""

from __future__ import annotations

import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers and body; headers without a value are not sent, also not the length."""


def part_of(content: bytes, requested: str) -> tuple[int, bytes]:
    """Where a part begins that a Range header asks for, and its bytes; the whole without one."""
    first, _, last = requested.removeprefix("bytes=").partition("-")
    start = int(first or 0)
    return start, content[start : int(last) + 1 if last else len(content)]


class ThreadedServer(ABC):
    """Serves as long as the `with` block lasts.

    Args:
        host: "127.0.0.1" or "::1".
        certificate: a file with a certificate and its key, to speak TLS with.

    Attributes:
        address: host and port.
        url: with the address, for those who speak no TLS.
    """

    def __init__(self, host: str = "127.0.0.1", certificate: Path | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Threads that are no daemons are waited for when the server is closed.
        kind = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": False})
        self._server = kind((host, 0), self._handler())
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        self.url = f"http://{self.address}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="threaded-server")

    @abstractmethod
    def answer(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to one request; called on the thread of its connection."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, headers, body = answer(self.command, self.path, self.headers, given)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    if value:
                        self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_PUT = do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Nobody reads it."""

        return Handler
