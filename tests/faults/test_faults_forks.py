"""A fork of the trainer has a copy of everything, and must leave alone what is the trainer's."""

from __future__ import annotations

import json
from pathlib import Path

from make_shards import write_numbers
from preloaded import Preloaded
from servers.faults import FaultServer

IN_FORK = """
import os, sys, time, warnings
from streamload import StreamLoader
from streamload.errors import StorageError

warnings.simplefilter("error", ResourceWarning)

def in_fork(body):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

def numbers(batches):
    return [batch[0].tolist() for batch in batches]

"""

TRAINER = """
import subprocess

started = []

class Noted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        started.append(self)
        super().__init__(*arguments, **options)

subprocess.Popen = Noted
options = dict(batch_size=4, shuffle=True, fields=("cls",))
with StreamLoader(sys.argv[1], num_workers=0, **options) as here:
    expected = [numbers(here) for _ in range(5)]
loader = StreamLoader(sys.argv[1], num_workers=1, **options)
assert numbers(loader) == expected[0]

# A fork drops a pass that has given all. Its end is told only after it was asked for: the feeder began it by itself.
batches = iter(loader)
assert numbers([next(batches), next(batches)]) == expected[1]

def drop():
    global batches
    del batches

in_fork(drop)
assert numbers(batches) == []

# A fork goes on by itself.
batches = iter(loader)
first = next(batches)

def go_on():
    try:
        next(batches)
    except RuntimeError as error:
        assert "fork" in str(error), error
    else:
        raise AssertionError("it has taken the trainer's batch")
    assert numbers(loader) == expected[3], "it has a feeder of its own"
    loader.close()

in_fork(go_on)
assert numbers([first, *batches]) == expected[2]
assert numbers(loader) == expected[3]

# A fork outlives the loader, and has a copy of its socket.
feeder = started[-1]
child = os.fork()
if child == 0:
    time.sleep(100)
loader.close()
os.kill(child, 9)
os.waitpid(child, 0)
assert feeder.returncode == 0, f"it was not told to end: {feeder.returncode}"
"""


def test_forks_leave_the_trainers_feeder_alone(preloaded: Preloaded, tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "shards", [8])
    program = IN_FORK + TRAINER
    ended = preloaded.run(program, source)
    assert (ended.status, ended.output) == (0, "")


WITHOUT_WORKERS = """
import json, signal

signal.alarm(60)

def begin():
    loader.set_epoch(0)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]

for url, workers in json.loads(sys.argv[1]):
    loader = StreamLoader(url, batch_size=4, fields=("cls",), num_workers=workers)
    batches = iter(loader)
    first = numbers([next(batches)])
    in_fork(begin)
    assert first + numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.close()
"""


def test_a_fork_reads_by_itself(preloaded: Preloaded, tmp_path: Path) -> None:
    """Threads do not go along into a fork, and what waits for one of a storage library would wait forever."""
    source = write_numbers(tmp_path / "shards", [8])
    program = IN_FORK + WITHOUT_WORKERS
    with FaultServer(tmp_path / "shards") as server:
        url = f"{server.url}/part000-000000.tar"
        cases = [(source, 0), (url, 1), (url, 0)]
        ended = preloaded.run(program, json.dumps(cases))
    assert (ended.status, ended.output) == (0, "")
