"""Killed, interrupted, abandoned: the epoch ends complete, or everything ends, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from make_shards import write_numbers
from preloaded import Preloaded, Program
from processes import children, gone, wait_until
from transforms import slow

from streamload import StreamLoader
from streamload.errors import WorkerError

COUNTS = [300, 200, 400]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("faults") / "shards", COUNTS)


def loader_of(source: str, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 10,
        "fields": ("cls",),
        "shuffle": True,
        "transform": {"cls": slow},
        "num_workers": 2,
    }
    return StreamLoader(source, **{**defaults, **options})


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_workers_killed_at_random_instants(source: str, kills: int, caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(source, num_workers=0, transform=None) as loader:
        expected = [batch[0].tolist() for batch in loader]
    generator = random.Random(20)
    kill_before = set(generator.sample(range(len(expected) - 5), kills))
    got, killed = [], set[int]()
    with loader_of(source) as loader:
        for step, batch in enumerate(loader):
            got.append(batch[0].tolist())
            if step in kill_before:
                time.sleep(generator.random() * 0.02)
                assert wait_until(lambda: not killed >= pids_of_workers())
                victim = generator.choice(sorted(pids_of_workers() - killed))
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
        restarted = loader.statistics().restarted_workers
    assert got == expected
    assert len(killed) == kills
    assert restarted >= kills - 2, "there are two at a time, so that many had been replaced before the last were killed"
    logged = [record.getMessage() for record in caplog.records if "a worker process has died" in record.getMessage()]
    assert all("it was killed by SIGKILL" in each for each in logged)
    assert len(logged) >= kills - 2, "memory may be running out, which nobody would look up in the statistics"


def pids_of_workers() -> set[int]:
    return {worker.pid for worker in children("workers.worker")}


@pytest.mark.exhaustive
def test_a_transform_that_ends_every_worker_ends_the_pass(source: str) -> None:
    def deadly(value: int) -> int:
        os._exit(5)

    with loader_of(source, transform={"cls": deadly}, on_error="skip") as loader:
        with pytest.raises(WorkerError, match="16 workers died .* without finishing a task.*ended with status 5"):
            list(loader)


def test_garbage_collection_without_close(source: str) -> None:
    loader: StreamLoader | None = loader_of(source)
    assert loader is not None
    iterator = iter(loader)
    kept = next(iterator)[0]
    values = kept.tolist()
    assert children()
    with pytest.warns(ResourceWarning, match="without close"):
        del loader, iterator
        gc.collect()
    assert wait_until(lambda: not children())
    assert kept.tolist() == values, "what was delivered stays valid"


SCRIPT = """
import os, sys, time, psutil
from streamload import StreamLoader

def slow(value):
    time.sleep(0.005)
    return value

loader = StreamLoader(sys.argv[1], 10, True, fields=("cls",), transform={"cls": slow}, num_workers=2)
for step, batch in enumerate(loader):
    if step == 2:
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    AFTER
print("done", flush=True)
"""


def start_script(preloaded: Preloaded, source: str, after: str = "pass") -> tuple[Program, list[int]]:
    """A trainer without a main guard, in a process of its own; returns it and its children's numbers."""
    script = preloaded.start(SCRIPT.replace("AFTER", after), source)
    return script, [int(number) for number in script.stdout.readline().split()]


def end(script: Program) -> tuple[int, str, str]:
    out, err = script.communicate()
    return script.wait(), out, err


@pytest.mark.parametrize("busy", ["pass", pytest.param("time.sleep(100)", marks=pytest.mark.exhaustive)])
def test_sigkill_to_the_trainer_takes_everything_with_it(preloaded: Preloaded, source: str, busy: str) -> None:
    script, pids = start_script(preloaded, source, busy if busy == "pass" else f"if step == 2: {busy}")
    assert len(pids) == 3
    os.kill(script.pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pids))
    end(script)


def test_sigkill_to_the_trainer_takes_everything_with_it_but_a_fork(preloaded: Preloaded, source: str) -> None:
    """The fork has the trainer's sockets, so that these stay open."""
    after = "if step == 3: print(os.fork() or time.sleep(1000), flush=True)"
    script, pids = start_script(preloaded, source, after)
    fork = int(script.stdout.readline())
    os.kill(script.pid, signal.SIGKILL)
    try:
        assert wait_until(lambda: gone(pids))
    finally:
        os.kill(fork, signal.SIGKILL)
        end(script)


def test_sigkill_to_the_feeder_ends_workers_that_sleep_in_user_code(source: str, tmp_path: Path) -> None:
    slept = tmp_path / "slept"

    def sleeps(value: int) -> int:
        time.sleep(0 if slept.exists() else 1000)
        return value

    with loader_of(source, transform={"cls": sleeps}) as loader:
        iterator = iter(loader)
        assert wait_until(lambda: len(children("workers.worker")) == 2)
        time.sleep(1)
        pids = [worker.pid for worker in children("workers.worker")]
        slept.touch()
        children("streamload.feeder")[0].kill()
        assert len(next(iterator)[0]) == 10
        assert wait_until(lambda: gone(pids))


NEVER_ITERATED = """
import ctypes, os, sys, time, psutil
from streamload import StreamLoader

ctypes.CDLL(None).prctl(36, 1)  # orphans become children of this process, as of the first one of a container
for workers in (0, 2):
    loader = StreamLoader(sys.argv[1], 10, num_workers=2)
    while workers and len(psutil.Process().children(recursive=True)) < 3:
        time.sleep(0.01)
    time.sleep(0.5 if workers else 0.0)
    loader.close()
    assert not psutil.Process().children(), workers
"""


def test_a_loader_that_is_never_iterated_leaves_no_process(preloaded: Preloaded, source: str) -> None:
    ended = preloaded.run(NEVER_ITERATED, source)
    assert (ended.status, ended.output) == (0, "")


def test_ctrl_c_is_left_to_the_trainer(source: str) -> None:
    with loader_of(source) as loader:
        batches = iter(loader)
        next(batches)
        for process in children():
            process.send_signal(signal.SIGINT)
        assert len(list(batches)) == TOTAL // 10 - 1
        assert loader.statistics().restarted_workers == 0


def test_ctrl_c_ends_everything_with_one_traceback(preloaded: Preloaded, source: str) -> None:
    script, pids = start_script(preloaded, source)
    os.killpg(script.pid, signal.SIGINT)  # a terminal sends it to the whole group
    assert wait_until(lambda: gone(pids))
    status, out, err = end(script)
    assert status != 0
    assert "done" not in out
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt" in err


KILL_FEEDER = """
    if step == 4:
        feeder, = (child for child in psutil.Process().children() if "streamload.feeder.start" in child.cmdline())
        feeder.kill()
        print("killed", flush=True)
"""


def session_of(pid: int) -> int:
    """The session of a process, which may end at any moment."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize(
    "delay_s", [0.3, *(pytest.param(delay_s, marks=pytest.mark.exhaustive) for delay_s in (0.0, 0.05, 0.1, 0.8, 1.2))]
)
def test_ctrl_c_while_another_feeder_starts(preloaded: Preloaded, source: str, delay_s: float) -> None:
    script, _ = start_script(preloaded, source, KILL_FEEDER)
    assert script.stdout.readline() == "killed\n"
    time.sleep(delay_s)
    os.killpg(script.pid, signal.SIGINT)
    status, out, err = end(script)
    assert status != 0
    assert "done" not in out
    assert err.count("Traceback") == 1
    assert wait_until(lambda: not [pid for pid in psutil.pids() if session_of(pid) == script.pid])


@pytest.mark.parametrize("ending", ["break", pytest.param("sys.exit()", marks=pytest.mark.exhaustive)])
def test_interpreter_exit_without_close(preloaded: Preloaded, source: str, ending: str) -> None:
    script, pids = start_script(preloaded, source, f"if step == 4: {ending}")
    status, _, err = end(script)
    assert (status, err) == (0, "")
    assert wait_until(lambda: gone(pids))
