"""`pack`: a function's samples in shards; the same bytes for any number of workers and after a kill, or nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import exhaustive
from remote_places import new_place
from servers.rclone import S3Server
from webdataset.tariterators import group_by_keys, tar_file_expander

from streamload import StreamLoader, TarDataset, pack
from streamload.errors import StreamloadError

KILLED = """
import os, signal, sys
from streamload import pack

left = int(sys.argv[3])

def kill_before(name):
    real = getattr(os, name)

    def act(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, name, act)

for name in ("replace", "unlink", "link"):
    kill_before(name)

def samples_of(number):
    for copy in range(number % 3):
        yield {"__key__": f"{number:03d}_{copy}", "txt": "x" * number, "cls": number}

pack(samples_of, range(20), sys.argv[1], workers=1, max_count=8, resume=sys.argv[2] == "resume")
"""


def sampler() -> Callable[[int], Iterator[dict[str, Any]]]:
    """A function that travels by value: a worker need not import this module, which takes seconds."""

    def samples_of(number: int) -> Iterator[dict[str, Any]]:
        for copy in range(number % 3):
            yield {"__key__": f"{number:03d}_{copy}", "npy": np.full(4, number, np.int16), "cls": number}

    return samples_of


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_samples_come_in_the_inputs_order_whatever_the_number_of_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        pack(sampler(), range(30), tmp_path / str(workers), workers=workers, max_count=8)
    assert files(tmp_path / "1") == files(tmp_path / "2")
    expected = [f"{number:03d}_{copy}" for number in range(30) for copy in range(number % 3)]
    dataset = TarDataset(str(tmp_path / "1"))
    assert [dataset[number]["__key__"] for number in range(len(dataset))] == expected
    with ExitStack() as opened:
        shards = [opened.enter_context(path.open("rb")) for path in sorted((tmp_path / "1").glob("*.tar"))]
        members = tar_file_expander([{"url": shard.name, "stream": shard} for shard in shards])
        assert [sample["__key__"] for sample in group_by_keys(members)] == expected


@pytest.mark.parametrize("moment", [45, *(exhaustive((moment,)) for moment in (5, 15, 25, 35, 55, 62, 65, 70, 75))])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path, moment: int) -> None:
    def ended(folder: str, how: str, moment: int) -> int:
        command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path / folder), how, str(moment)]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
        return done.returncode

    assert ended("whole", "new", 0) == 0
    assert ended("killed", "new", moment) == -signal.SIGKILL
    with pytest.raises(StreamloadError):
        StreamLoader(str(tmp_path / "killed"), batch_size=1)
    assert ended("killed", "resume", 0) == 0
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_a_bucket_gets_the_same_shards(rclone_s3: S3Server, tmp_path: Path) -> None:
    place = new_place(rclone_s3, tmp_path)
    pack(sampler(), range(30), place.url, workers=1, max_count=8, storage_options=place.storage_options)
    pack(sampler(), range(30), tmp_path / "here", workers=1, max_count=8)
    here = {name: content for name, content in files(tmp_path / "here").items() if name.endswith(".tar")}
    assert {name: content for name, content in place.files().items() if name.endswith(".tar")} == here


def _fails(number: int) -> Any:
    if number == 3:
        raise RuntimeError("no such sound")
    return {"__key__": str(number), "cls": number}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_fails, r"input 3 \(3\) cannot be packed: RuntimeError: no such sound.* at .*test_tools_pack.py:\d+"),
        (lambda number: number, r"input 0 \(0\) cannot be packed: TypeError: it gave a value of type int"),
        (lambda number: {"cls": number}, r"input 0 \(0\) .* needs a '__key__'"),
        (lambda number: {"__key__": str(number), "cls": 0.5}, r"input 0 \(0\) .* field 'cls'"),
        (lambda _: {"__key__": "same", "cls": 1}, "two samples have the key 'same'"),
        (lambda _: None, "gave no sample of 5 inputs"),
    ],
)
def test_a_wrong_sample_names_its_input_and_publishes_nothing(
    tmp_path: Path, function: Callable[[int], Any], message: str
) -> None:
    with pytest.raises((StreamloadError, ValueError), match=message):
        pack(function, range(5), tmp_path / "shards", workers=1)
    assert not list(tmp_path.glob("shards/*.tar"))


def test_a_function_that_fails_in_a_worker_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(StreamloadError, match=r"input 3 \(3\) cannot be packed: ZeroDivisionError"):
        pack(lambda number: {"__key__": str(number), "cls": 1 // (number - 3)}, range(5), tmp_path / "s", workers=2)


def test_reading_what_a_failed_run_has_left_says_how_a_caller_goes_on(tmp_path: Path) -> None:
    with pytest.raises(StreamloadError):
        pack(_fails, range(5), tmp_path / "shards", workers=1)
    said = r"`pack` .*was interrupted.*to go on, or with --overwrite \(overwrite=True\) to start over"
    with pytest.raises(StreamloadError, match=said):
        TarDataset(str(tmp_path / "shards"))
    pack(lambda number: {"__key__": str(number)} | {"cls": 1}, range(5), tmp_path / "shards", workers=1, overwrite=True)
    assert len(TarDataset(str(tmp_path / "shards"))) == 5


def test_other_inputs_are_not_mixed_with_those_of_a_killed_run(tmp_path: Path) -> None:
    with pytest.raises(StreamloadError):
        pack(_fails, range(5), tmp_path / "shards", workers=1)
    with pytest.raises(ValueError, match="cannot be resumed: .* overwrite=True"):
        pack(_fails, range(3), tmp_path / "shards", workers=1, resume=True)
    pack(_fails, range(3), tmp_path / "shards", workers=1, overwrite=True)
    assert len(TarDataset(str(tmp_path / "shards"))) == 3


def test_another_function_does_not_go_on_with_the_shards_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(StreamloadError):
        pack(lambda number: {"__key__": str(number), "cls": 1 // (3 - number)}, range(5), tmp_path / "s", workers=1)
    with pytest.raises(ValueError, match="cannot be resumed: function was"):
        pack(
            lambda number: {"__key__": str(number), "cls": 2 // (3 - number)},
            range(5),
            tmp_path / "s",
            workers=1,
            resume=True,
        )
