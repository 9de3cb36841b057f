"""`shardify` killed at any step or instant, and stopped by the system or from the terminal."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from image_folders import images, pack
from processes import children

from streamload.errors import WorkerError
from streamload.index.unfinished import STAGING
from streamload.pack import packing, work


def command(*arguments: object, program: list[str] | None = None) -> list[str]:
    return [sys.executable, "-W", "error", *(program or ["-m", "streamload.cli.shardify"]), *map(str, arguments)]


def test_a_limit_of_the_file_system_in_a_worker_is_one_message(tmp_path: Path) -> None:
    source, dest = images(tmp_path, 20), tmp_path / "dest"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))

    arguments = command(source, dest, "--max-count", 20, "--workers", 2)
    done = subprocess.run(arguments, capture_output=True, text=True, preexec_fn=limited)
    assert done.returncode == 1
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if not line.startswith("packing")] == [
        f"error: {dest}: File too large"
    ]
    assert not dest.exists()


def test_a_worker_that_dies_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = packing.frame

    def framed_and_killed(task: work.Task, descriptors: tuple[int, ...]) -> bytes:
        for worker in children("streamload.pack.worker"):
            worker.kill()
        return bytes(real(task, descriptors))

    monkeypatch.setattr(packing, "frame", framed_and_killed)  # what is sent to a worker
    status, _, err = pack(images(tmp_path), tmp_path / "dest", "--max-count", 2, "--workers", 2)
    assert status == 1
    assert "error: a worker process was killed by SIGKILL" in err
    assert not (tmp_path / "dest").exists()
    assert issubclass(WorkerError, Exception)


def test_a_real_ctrl_c_to_the_whole_group(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    # It never ends by itself, so that it is surely at work when the signal comes. The sleeps are short because a signal
    # that comes just before a system call that waits is seen only after it.
    program = (
        "import time, streamload.pack.packing as packing, streamload.cli.shardify as shardify\n"
        "def join(*_):\n"
        "    print('at work', flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "packing.JoinTask = join\n"
        "shardify.main()\n"
    )
    arguments = command(source, dest, "--max-count", 5, "--workers", 2, "--resize", 4, program=["-c", program])
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "at work\n"
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert next(line for line in err.splitlines() if not line.startswith("packing")).startswith("interrupted: ")
    assert out == ""
    assert os.listdir(dest) == [STAGING]
