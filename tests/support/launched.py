"""Runs programs in processes of their own, also under torchrun, so that none of them outlives a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_WAIT_S = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended.

    Attributes:
        status: its exit status.
        output: all that it and its children wrote.
    """

    status: int
    output: str


def run_python(*arguments: str | os.PathLike[str], environment: Mapping[str, str] | None = None) -> Ended:
    """Run this Python with arguments, and wait for its end.

    Raises:
        subprocess.TimeoutExpired: it did not end in good time; it was killed, with all that it had started.
    """
    command = [sys.executable, *map(os.fspath, arguments)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Ended(process.returncode, output)


def torchrun(
    ranks: int, script: Path, *arguments: str | os.PathLike[str], environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a script on so many ranks of this machine, as `torchrun` does."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "0"]
    return run_python(*launcher, script, *arguments, environment=environment)
