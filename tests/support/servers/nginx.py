"""A plain web server over a folder: nginx, where it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers.rclone import free_port, running

_CONFIGURATION = """
daemon off;
master_process off;
pid {work}/nginx.pid;
error_log {work}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {folder};
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class WebServer:
    """A running server.

    Attributes:
        folder: its root.
        url: its address.
    """

    folder: Path
    url: str


@contextlib.contextmanager
def serve_http(folder: Path) -> Iterator[WebServer]:
    """Serve a folder; skips the test where there is no nginx."""
    binary = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if binary is None:
        pytest.skip("needs nginx")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="nginx-", dir=folder.parent) as work:
        configuration = Path(work) / "nginx.conf"
        configuration.write_text(_CONFIGURATION.format(work=work, port=port, folder=folder))
        with running([binary, "-c", str(configuration), "-e", f"{work}/error.log"], port):
            yield WebServer(folder, f"http://127.0.0.1:{port}")
