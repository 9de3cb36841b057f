"""Four processes on one disk cache, killed at random instants: what is visible is right, and little is done twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from cache_filling import FILE_NAMES_AT, cached_names, file_of, identity_of, read_through
from matrix import exhaustive

from streamload.fetch.disk_cache import DiskCache

PROGRAM = Path(__file__).parents[1] / "support" / "cache_filling.py"
N_PROCESSES = 4
N_SHARDS = 24
ONE = identity_of(0).bytes + 4 * 8  # with its checksums
KILLS = 6
LONGEST_S = 60.0


class Node:
    """The processes of a node, each started again when it was killed."""

    def __init__(self, folder: Path, cache_bytes: int, seed: int, epochs: int) -> None:
        self.log = folder / "log"
        self.cache = str(folder / "cache")
        self._command = [sys.executable, str(PROGRAM), self.cache, str(cache_bytes), str(N_SHARDS)]
        self._last = [str(epochs), str(self.log)]
        self._random = random.Random(seed)
        self.running = [self._start() for _ in range(N_PROCESSES)]

    def _start(self) -> subprocess.Popen[str]:
        command = [*self._command, str(self._random.random()), *self._last]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def kill_one(self) -> None:
        self._work_on(self._random.randrange(1, 4))
        time.sleep(self._random.random() * 0.01)
        number = self._random.randrange(N_PROCESSES)
        process = self.running[number]
        process.kill()
        self._end(process, killed=True)
        self.running[number] = self._start()

    def _work_on(self, lines: int) -> None:
        """Wait until so many more shards were fetched, or all processes have ended."""
        wanted = self._lines() + lines
        deadline = time.monotonic() + LONGEST_S
        while self._lines() < wanted and any(process.poll() is None for process in self.running):
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def _lines(self) -> int:
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def _end(self, process: subprocess.Popen[str], *, killed: bool = False) -> None:
        _, complaint = process.communicate(timeout=LONGEST_S)
        assert complaint == ""
        assert process.returncode == 0 or (killed and process.returncode == -9)

    def end(self) -> None:
        for process in self.running:
            self._end(process)

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()


def run(folder: Path, cache_bytes: int, seed: int, epochs: int, kills: int) -> tuple[str, Counter[str]]:
    """The cache's folder, and how often each shard was fetched."""
    node = Node(folder, cache_bytes, seed, epochs)
    try:
        for _ in range(kills):
            node.kill_one()
        node.end()
    finally:
        node.stop()
    return node.cache, Counter(node.log.read_text().splitlines())


def check_visible(folder: str) -> set[int]:
    """Every visible file is right; gives their numbers."""
    numbers = {identity_of(number).file_name: number for number in range(N_SHARDS)}
    for name in cached_names(folder):
        with open(os.path.join(folder, FILE_NAMES_AT, name), "rb") as file:
            assert file.read() == file_of(identity_of(numbers[name]))
    return {numbers[name] for name in cached_names(folder)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
def test_a_death_costs_the_shard_in_hand(tmp_path: Path, seed: int) -> None:
    cache, fetched = run(tmp_path, 1 << 30, seed, epochs=2, kills=KILLS)
    assert fetched.total() <= N_SHARDS + KILLS
    check_visible(cache)
    again = DiskCache(cache, 1 << 30, part_bytes=4096)
    assert os.listdir(os.path.join(cache, FILE_NAMES_AT, "partial")) == []
    for number in range(N_SHARDS):
        read_through(again, identity_of(number))
    assert check_visible(cache) == set(range(N_SHARDS))


@pytest.mark.parametrize("seed", [0, *(exhaustive((seed,)) for seed in range(1, 4))])
def test_files_are_right_and_bounded_while_others_are_evicted(tmp_path: Path, seed: int) -> None:
    room = N_SHARDS // 2
    cache, _ = run(tmp_path, room * ONE, seed, epochs=3, kills=KILLS)
    assert len(check_visible(cache)) <= room + 1, "one that is renamed while another process lists may be overlooked"
    assert len(check_visible(cache)) >= room - N_PROCESSES
    again = DiskCache(cache, room * ONE, part_bytes=4096)
    for number in range(N_SHARDS):
        read_through(again, identity_of(number))
    assert len(check_visible(cache)) == room
