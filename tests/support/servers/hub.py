"""A Hugging Face hub with one dataset repository, on threads of this process: what its filesystem class asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from servers.threaded_server import Answer, ThreadedServer, part_of

_COMMIT = "0" * 40


class Hub(ThreadedServer):
    """Serves `datasets/me/numbers` as long as the `with` block lasts.

    Args:
        files: their contents by their paths in the repository.

    Attributes:
        ranges: path and Range of each request for a file.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__()
        self.files = files
        self.ranges: list[tuple[str, str | None]] = []

    def answer(self, method: str, address: str, headers: Mapping[str, str], _: bytes) -> Answer:
        """The repository, a folder of it, or a part of a file."""
        path = unquote(urlsplit(address).path)
        json_headers = {"Content-Type": "application/json"}
        if path in ("/api/datasets/me/numbers", "/api/datasets/me/numbers/revision/main"):
            return 200, json_headers, json.dumps({"id": "me/numbers", "sha": _COMMIT, "private": False}).encode()
        if path.startswith("/api/datasets/me/numbers/tree/main"):
            folder = path.removeprefix("/api/datasets/me/numbers/tree/main").strip("/")
            entries = self._entries(folder)
            missing = {"X-Error-Code": "EntryNotFound"}
            return (200, json_headers, json.dumps(entries).encode()) if entries else (404, missing, b"{}")
        content = self.files.get(path.removeprefix("/datasets/me/numbers/resolve/main/"))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound" if "/me/numbers/" in path else "RepoNotFound"}, b"{}"
        requested = headers.get("Range") or headers.get("range")
        self.ranges.append((path, requested))
        if requested is None:
            return 200, {}, content
        start, part = part_of(content, requested)
        return 206, {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}, part

    def _entries(self, folder: str) -> list[dict[str, object]]:
        inside = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name, content in self.files.items():
            first, slash, _ = name.removeprefix(inside).partition("/")
            if not name.startswith(inside):
                continue
            oid = hashlib.sha1(content).hexdigest()
            file: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": oid}
            folder_entry: dict[str, object] = {"type": "directory", "path": inside + first, "oid": _COMMIT}
            entries[inside + first] = folder_entry if slash else file
        return list(entries.values())
