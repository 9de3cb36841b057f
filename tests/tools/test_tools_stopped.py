"""Packing that is stopped by the system, by the death of a process, or from the terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streamload import TarDataset, pack
from streamload.errors import StreamloadError, WorkerError

PROGRAM = """
import os, sys, time
from streamload import pack

def sample(number):
    if number >= 16 and number % 16:  # not those that are measured first
        open(os.path.join(sys.argv[1], f"began-{os.getpid()}"), "w").close()
        while True:
            time.sleep(0.01)
    return {"__key__": f"{number:02d}", "cls": number}

pack(sample, range(64), sys.argv[1] + "/dest", workers=2, max_count=8)
"""
"""Two shards are finished; then both workers hang. Nothing guards the script from being run again."""


def test_a_worker_that_dies_is_one_message(tmp_path: Path) -> None:
    def dies(number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerError, match="a worker process died; if memory is short, use fewer workers"):
        pack(dies, range(4), tmp_path / "dest", workers=2)
    assert not (tmp_path / "dest").exists()


@contextmanager
def hanging(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The program and its workers, when both hang."""
    pipe = subprocess.PIPE
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-W", "error", str(folder / "program.py"), str(folder)]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 60
            while len(began := list(folder.glob("began-*"))) < 2:
                assert time.monotonic() < deadline
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.01)
            yield process, [psutil.Process(int(path.name.partition("-")[2])) for path in began]
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.exhaustive)])
def test_no_process_is_left_and_finished_shards_are_kept(tmp_path: Path, how: signal.Signals) -> None:
    with hanging(tmp_path) as (process, workers):
        os.killpg(process.pid, how) if how == signal.SIGINT else process.kill()
        out, err = process.communicate(timeout=60)
        assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert (process.returncode, out) == (-how, "")
    if how == signal.SIGINT:
        assert err.count("Traceback") == 1, "no worker says anything"
        assert "kept: go on with --resume (resume=True)" in err
        assert not list((tmp_path / "dest").glob(".*.partial"))
    with pytest.raises(StreamloadError, match="not complete"):
        TarDataset(str(tmp_path / "dest"))
    kept = {path.name: path.stat().st_ino for path in (tmp_path / "dest").glob("*.tar")}
    program = PROGRAM.replace("while True", "while False").replace("max_count=8", "max_count=8, resume=True")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(TarDataset(str(tmp_path / "dest"))) == 64
    assert len(kept) == 2
