"""`timeout`: the error says what holds up the batch: stage, shard, sample, process, and the line of the user's code."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from hanging import HUNG, hang_in_c, hang_in_python, slowly
from matrix import exhaustive
from processes import children
from servers.faults import FaultServer, Script

from streamload import ShardWriter, StreamLoader
from streamload.errors import WorkerError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hold-ups") / "shards"
    with ShardWriter(place, max_count=25) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:04d}", "cls": number})
    return place


def message_of(loader: StreamLoader) -> str:
    with pytest.raises(WorkerError) as caught:
        list(loader)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "function"),
    [
        exhaustive(({"transform": {"cls": hang_in_python}}, hang_in_python)),
        ({"decode": {"cls": hang_in_c}}, hang_in_c),
    ],
)
def test_a_hung_function_is_named_with_its_sample_and_its_line(
    folder: Path, options: dict[str, Any], function: Any
) -> None:
    with StreamLoader(folder, 10, fields=("cls",), num_workers=2, timeout=3, **options) as loader:
        message = message_of(loader)
    assert re.search(r"no batch came within timeout=3 s; worker \d \(process \d+\) is at work, decoding or tr", message)
    assert f"shard '{folder}/shard-000000.tar', sample '{HUNG:04d}'" in message
    line = function.__code__.co_firstlineno + (2 if function is hang_in_python else 1)
    assert re.search(rf'File ".*hanging.py", line ({line}|{line - 1}) in {function.__name__}', message)


def stopped(loader: StreamLoader, module: str) -> str:
    """Stop one of the loader's processes after its first batch; what the loop gets then."""
    batches = iter(loader)
    next(batches)
    (target,) = children(module)
    os.kill(target.pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError) as caught:
            list(batches)
    finally:
        if psutil.pid_exists(target.pid):
            os.kill(target.pid, signal.SIGCONT)
    return str(caught.value).replace(str(target.pid), "PID")


@pytest.mark.parametrize("which", list(map(exhaustive, [("worker 0",), ("the feeder",)])))
def test_a_stopped_process_is_named(folder: Path, which: str) -> None:
    options: dict[str, Any] = {"fields": ("cls",), "num_workers": 1, "timeout": 4, "transform": {"cls": slowly}}
    with StreamLoader(folder, 5, **options) as loader:
        message = stopped(loader, "streamload.feeder" if which == "the feeder" else "streamload.workers")
        assert f"{which} (process PID) is stopped, by a signal (SIGSTOP) or a debugger" in message


@pytest.mark.parametrize("workers", [0, exhaustive((1,))])
def test_a_stalled_server_is_named(folder: Path, workers: int) -> None:
    with FaultServer(folder, Script(silent_share=1.0, only=".tar")) as server:
        url = f"{server.url}/shard-000000.tar"
        with StreamLoader(url, 10, fields=("cls",), num_workers=workers, timeout=1) as loader:
            message = message_of(loader)
    assert re.search(rf"the storage: a request for '{url}' from byte 0 on has taken \d.\d s, in which 0 bytes", message)
