"""What several tests of storages need."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The certificate of an authority that nobody trusts, and a file with one that it has signed and its key."""
    folder = tmp_path_factory.mktemp("authority")
    new = "-newkey rsa:2048 -nodes -days 2"
    for command in (
        f"req -x509 {new} -subj /CN=authority -keyout own.key -out own.pem",
        f"req -x509 {new} -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=CA:FALSE "
        "-CA own.pem -CAkey own.key -keyout server.key -out server.crt",
    ):
        try:
            subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip("needs openssl 3")
    both = folder / "server.pem"
    both.write_text((folder / "server.key").read_text() + (folder / "server.crt").read_text())
    return folder / "own.pem", both
