"""Starts each run as a process of its own, ends it if it hangs, and watches the memory of its tree if asked to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from workloads import Workload

PROGRAM = Path(__file__).with_name("measure.py")
LONGEST_RUN_S = 180.0
LONGEST_PREPARATION_S = 600.0
SAMPLING_S = 0.1


class RunFailedError(Exception):
    """A run ended with an error, or did not end; the text says which."""


def run(what: str, loader: str, workload: Workload, seconds: float) -> dict[str, float]:
    """`what` of measure.py, in a fresh process; what it found, and for "memory" the peak of its tree in bytes.

    Raises:
        RunFailedError: it failed or took too long. Nothing of it is left then.
    """
    command = [sys.executable, str(PROGRAM), what, loader, workload.name, str(workload.root)]
    command += [str(workload.samples), str(seconds)]
    longest = LONGEST_PREPARATION_S if what == "prepare" else LONGEST_RUN_S
    return run_command(command, longest, sample=what == "memory")


def run_command(command: list[str], longest: float, *, sample: bool = False) -> dict[str, float]:
    """What a program has written as its last line, which is JSON; see `run`."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True) as process:
            try:
                peak = _watch(process, longest, sample)
            finally:
                with contextlib.suppress(ProcessLookupError):  # whatever it has left
                    os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        errors.seek(0)
        said = errors.read().strip().splitlines()
        if process.returncode != 0:
            raise RunFailedError(said[-1] if said else f"exit status {process.returncode}")
        result: dict[str, float] = json.loads(output.read().splitlines()[-1])
    return result | ({"peak_bytes": peak} if sample else {})


def _watch(process: subprocess.Popen[bytes], longest: float, sample: bool) -> int:
    """Wait for the process; the most memory that its tree had, if that is to be sampled."""
    peak = 0
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLING_S if sample else deadline - time.monotonic())
            return peak
        if sample:
            peak = max(peak, tree_pss(process.pid))
    raise RunFailedError(f"it did not end in {longest:.0f} s")


def tree_pss(root: int) -> int:
    """Bytes of memory of a process and all below it; what several have mapped is divided among them (PSS)."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return total
