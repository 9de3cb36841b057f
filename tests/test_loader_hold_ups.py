"""The log says what holds up a batch: stage, shard, sample, process, and the line of the user's code."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from closed_when_late import ClosedWhenLate
from hanging import HUNG, hang_in_c, slowly
from make_shards import write_numbers, write_samples
from matrix import exhaustive
from processes import children
from servers.faults import FaultServer, Script

from streamload import StreamLoader
from streamload.decode.tasks import ScanTask
from streamload.errors import LoaderClosedError
from streamload.feeder.feeder import work_in_words
from streamload.index.dataset import Dataset
from streamload.index.listing import list_shards
from streamload.trainer import epoch_iterator
from streamload.workers.pool import WorkerActivity


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [{"cls": number} for number in range(50)]
    return Path(write_samples(tmp_path_factory.mktemp("hold-ups") / "shards", samples, max_count=25))


def message_of(loader: StreamLoader, monkeypatch: pytest.MonkeyPatch, after_s: float) -> str:
    with ClosedWhenLate(loader, monkeypatch, after_s) as log, pytest.raises(LoaderClosedError):
        list(loader)
    return log.message


def test_a_hung_function_is_named_with_its_sample_and_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamLoader(folder, 10, fields=("cls",), num_workers=2, decode={"cls": hang_in_c}) as loader:
        message = message_of(loader, monkeypatch, 3)
    assert re.search(r"no batch has come for \d+ s: worker \d \(process \d+\) is at work, decoding or tr", message)
    assert f"shard '{folder}/shard-000000.tar', sample '{HUNG:06d}'" in message
    line = hang_in_c.__code__.co_firstlineno + 1
    assert re.search(rf'File ".*hanging.py", line ({line}|{line - 1}) in hang_in_c', message)


def test_a_wait_of_some_seconds_is_logged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(epoch_iterator, "WAIT_LOGGED_AFTER_S", 0.1)
    monkeypatch.setattr(epoch_iterator, "_CHECK_S", 0.05)
    with StreamLoader(
        folder, 10, fields=("cls",), num_workers=1, transform={"cls": lambda _: time.sleep(0.2)}, collate_fn=len
    ) as loader:
        assert next(iter(loader)) == 10
    assert len([each for each in caplog.messages if each.startswith("no batch has come for")]) == 1


@pytest.mark.parametrize(
    ("which", "module"),
    list(map(exhaustive, [("worker 0", "streamload.workers"), ("the feeder", "streamload.feeder")])),
)
def test_a_stopped_process_is_named(folder: Path, which: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"fields": ("cls",), "num_workers": 1, "transform": {"cls": slowly}}
    with StreamLoader(folder, 5, **options) as loader:
        batches = iter(loader)
        next(batches)
        (target,) = children(module)
        os.kill(target.pid, signal.SIGSTOP)
        try:
            with ClosedWhenLate(loader, monkeypatch, 4) as log, pytest.raises(LoaderClosedError):
                list(batches)
        finally:
            if psutil.pid_exists(target.pid):
                os.kill(target.pid, signal.SIGCONT)
    assert re.search(rf"{which} \(process {target.pid}\) (is at work|does not answer)", log.message)


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_a_stalled_server_is_named(folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer(folder, Script(silent_share=1.0, only=".tar")) as server:
        url = f"{server.url}/shard-000000.tar"
        with StreamLoader(url, 10, fields=("cls",), num_workers=workers) as loader:
            message = message_of(loader, monkeypatch, 1)
    assert re.search(rf"the storage: a request for '{url}' from byte 0 on .* returned 0 bytes", message)


def test_the_log_says_how_far_scans_are(tmp_path: Path) -> None:
    tables = Dataset(list_shards(write_numbers(tmp_path, [1, 1], index=False)))
    message = work_in_words(WorkerActivity("worker 0", ScanTask(0, (1,)), -1, ""), tables)
    assert re.search(r"scanning the shard '.*\.tar' \(0 of 2 shards are scanned; .streamload", message)
