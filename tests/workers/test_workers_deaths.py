"""Workers that die of the user's code: what is said, and who goes on."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest
from make_shards import write_numbers
from processes import children, wait_until

from streamload import StreamLoader
from streamload.errors import SampleError, WorkerError
from streamload.workers.launch import child_environment


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_numbers(tmp_path / "shards", [15, 15])


@pytest.mark.exhaustive
def test_two_samples_of_a_batch_that_each_kill_two_workers_are_left_out(source: str) -> None:
    def deadly(value: int) -> int:
        if value in (16, 18):
            ctypes.string_at(0)
        return value

    with StreamLoader(source, 5, fields=("cls",), transform={"cls": deadly}, on_error="skip", num_workers=2) as loader:
        found = [value for (batch,) in loader for value in batch.tolist()]
        assert found == [number for number in range(30) if number not in (16, 18)]
        assert [error.key for error in loader.skipped] == ["000016", "000018"]
        assert all(type(error) is SampleError for error in loader.skipped)
        assert all(
            str(error.url).endswith("part001-000000.tar") and error.offset is not None for error in loader.skipped
        )
        words = "the second one was killed by SIGSEGV\nFatal Python error: Segmentation fault"
        assert f"two workers died while they made this sample; {words}" in str(loader.skipped[0])


def test_a_collate_fn_that_kills_every_worker_ends_the_pass(source: str) -> None:
    with StreamLoader(source, 5, fields=("cls",), collate_fn=lambda samples: os._exit(9), num_workers=1) as loader:
        with pytest.raises(
            WorkerError, match="three workers died while they prepared or collated a batch; .* status 9"
        ):
            list(loader)


def test_a_large_batch_is_made_again_of_the_same_samples(tmp_path: Path) -> None:
    def deadly_once(value: int) -> int:
        if value == 350 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(9)
        return value

    large = write_numbers(tmp_path / "shards", [300, 300])
    with StreamLoader(large, 300, fields=("cls",), transform={"cls": deadly_once}, num_workers=1) as loader:
        assert [value for (batch,) in loader for value in batch.tolist()] == list(range(600))
        assert loader.statistics().restarted_workers == 1


def test_workers_that_die_at_every_start_end_the_pass(source: str) -> None:
    with StreamLoader(source, 5, worker_init_fn=lambda worker: os._exit(3), num_workers=1) as loader:
        with pytest.raises(WorkerError, match="3 workers died in a row; the last one, not yet ready, .* status 3"):
            list(loader)


def test_workers_killed_before_the_first_pass_are_replaced(source: str) -> None:
    with StreamLoader(source, 5, fields=("cls",), num_workers=3) as loader:
        wait_until(lambda: len(children("streamload.workers.worker")) == 3)
        for process in children("streamload.workers.worker"):
            os.kill(process.pid, signal.SIGKILL)
        assert len(list(loader)) == 6


@pytest.mark.exhaustive
def test_workers_killed_while_idle_are_replaced_with_their_numbers(source: str, tmp_path: Path) -> None:
    def note(worker: int) -> None:
        (tmp_path / f"{worker} {os.getpid()}.started").touch()

    with StreamLoader(source, 5, fields=("cls",), worker_init_fn=note, num_workers=2) as loader:
        assert len(list(loader)) == 6
        for process in children("streamload.workers"):
            os.kill(process.pid, signal.SIGINT)  # which is the trainer's
        (noted,) = tmp_path.glob("1 *.started")
        os.kill(int(noted.stem.split()[1]), signal.SIGKILL)
        assert len(list(loader)) == 6
        wait_until(lambda: len(list(tmp_path.glob("*.started"))) == 3)
    assert sorted(path.name[0] for path in tmp_path.glob("*.started")) == ["0", "1", "1"]


def test_workers_do_not_start_threads_for_linear_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert child_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert child_environment()["OMP_NUM_THREADS"] == "4", "what the user has set is left alone"
