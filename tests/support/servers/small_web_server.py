"""A web server on threads of this process: over IPv6 or TLS, for those who log in, or that sends them elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from servers.threaded_server import Answer, ThreadedServer, part_of


class SmallWebServer(ThreadedServer):
    """Serves parts of files as long as the `with` block lasts.

    Args:
        files: their contents by path.
        host: see `ThreadedServer`.
        certificate: see there.
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
        super().__init__(host, certificate)
        self.requested: list[tuple[str, str | None]] = []
        self.files = files
        self._authorization = authorization
        self._moved_to = moved_to

    def answer(self, method: str, address: str, headers: Mapping[str, str], _: bytes) -> Answer:
        """What is requested of a file, if it may be."""
        given = headers.get("Authorization")
        self.requested.append((address, given))
        content = self.files.get(unquote(urlsplit(address).path))
        if self._moved_to is not None:
            return 302, {"Location": f"{self._moved_to}{address}"}, b""
        if self._authorization not in (None, given):
            return 401, {}, b""
        if content is None:
            return 404, {}, b""
        known = {"ETag": '"v"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        requested = headers.get("Range")
        if method == "HEAD" or requested is None:
            return 200, known, content
        start, part = part_of(content, requested)
        return 206, known | {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}, part
