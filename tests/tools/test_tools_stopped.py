"""`shardify` killed at any step or instant, and stopped by the system or from the terminal."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from image_folders import files_below, images, pack, packed_samples
from processes import children

from streamload.errors import WorkerError
from streamload.index.unfinished import STAGING
from streamload.pack import packing, work
from streamload.write.shard_file import ShardFile

MANY = ["--max-count", "3", "--split", "train=0.8,val=0.2"]

KILLED_AT_A_STEP = """
import os, signal, sys
left = int(sys.argv.pop())
changing = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree"}

def count(event, arguments):
    global left
    if event in changing or (event == "open" and arguments[2] & os.O_CREAT):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

from streamload.cli.shardify import main
sys.addaudithook(count)
main()
"""


def command(*arguments: object, program: list[str] | None = None) -> list[str]:
    return [sys.executable, "-W", "error", *(program or ["-m", "streamload.cli.shardify"]), *map(str, arguments)]


@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.exhaustive), ["--resize", "8"]])
def test_killed_at_any_step_and_resumed_it_ends_with_the_same_bytes(tmp_path: Path, options: list[str]) -> None:
    source, dest = images(tmp_path, 6), tmp_path / "dest"
    assert pack(source, tmp_path / "whole", *MANY, *options)[0] == 0
    whole = files_below(tmp_path / "whole")
    chosen, kills = random.Random(5), 0
    while kills < 4:
        arguments = [source, dest, *MANY, *options, "--resume", "--workers", 1, chosen.randint(1, 90)]
        done = subprocess.run(command(*arguments, program=["-c", KILLED_AT_A_STEP]), capture_output=True, text=True)
        if done.returncode == 0:  # it had fewer steps left
            assert files_below(dest) == whole
            kills += 1
            for path in sorted(dest.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        else:
            assert done.returncode == -signal.SIGKILL, done.stderr
            kills += 1
    assert pack(source, dest, *MANY, *options, "--resume")[0] == 0
    assert files_below(dest) == whole


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_killed_at_random_instants_with_workers(tmp_path: Path, times: int) -> None:
    source, dest = images(tmp_path, 24), tmp_path / "dest"
    whole_folder = tmp_path / "whole"
    began = time.monotonic()
    subprocess.run(command(source, whole_folder, *MANY, "--workers", 2), check=True, capture_output=True)
    took_s = time.monotonic() - began
    whole = files_below(whole_folder)
    chosen = random.Random()
    for _ in range(times):
        with subprocess.Popen(
            command(source, dest, *MANY, "--workers", 2, "--resume"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                _, err = process.communicate(timeout=took_s * chosen.uniform(0.3, 1))
            except subprocess.TimeoutExpired:
                workers = psutil.Process(process.pid).children()
                process.kill()
                process.communicate()
                assert psutil.wait_procs(workers, timeout=20)[1] == []
            else:
                assert process.returncode == 0, err
                assert files_below(dest) == whole
                for path in sorted(dest.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
        if dest.exists():
            published = [name for name in files_below(dest) if name.endswith(".tar") and STAGING not in name]
            assert all(files_below(dest)[name] == whole[name] for name in published)
    assert pack(source, dest, *MANY, "--workers", 2, "--resume")[0] == 0
    assert files_below(dest) == whole


def test_a_full_disk_is_one_message_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    real, room = ShardFile.append, [7]

    def append(self: ShardFile, *arguments: object) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= 1
        real(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "append", append)
        status, out, err = pack(source, dest, "--max-count", 2, "--workers", 1)
    assert (status, out) == (1, "")
    assert [line for line in err.splitlines() if not line.startswith("packing")] == [
        f"error: {dest}: No space left on device; make room there; what is finished is kept: run the same command "
        "with --resume to go on, or with --overwrite to start over"
    ]
    assert not list(dest.glob("*.tar"))
    assert not list(dest.rglob("*.partial"))
    assert pack(source, dest, "--max-count", 2, "--resume")[0] == 0
    assert len(packed_samples(dest)) == 12


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
