"""The remote benchmark counts what the server saw, and all memory of a tree, mapped or not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.faults import Report

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory is counted in /proc")


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    yield lambda name: __import__(name)
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_the_shares_are_of_the_most_connections_and_of_those_in_use(benchmark_module: Callable[[str], Any]) -> None:
    module = benchmark_module("remote_bucket")
    script = module.Script(first_byte_s=1.0, bytes_per_s=10.0)
    spans = [("/d/a.tar", 0.0, 3.0), ("/d/a.tar", 0.0, 2.0), ("/d/b.tar", 3.0, 4.0), ("/d/index.json", 0.0, 9.0)]
    seen = module.traffic(Report(4, 30, 3, [], spans), script)
    assert (seen.seconds, seen.most_connections, seen.connections) == (4.0, 2, 1.5)
    assert seen.share_of_most == (3 * 1.0 + 30 / 10.0) / (2 * 4.0)
    assert seen.share == (3 * 1.0 + 30 / 10.0) / (3.0 + 2.0 + 1.0)


def test_memory_files_count_once_whoever_has_them_open_or_mapped(benchmark_module: Callable[[str], Any]) -> None:
    tree_memory = benchmark_module("shared_memory").tree_memory
    size = 64 << 20
    program = (
        "import mmap, os, sys\n"
        "input()\n"
        f"memory = os.memfd_create('shared'); os.truncate(memory, {size})\n"
        f"mapped = mmap.mmap(memory, {size}); mapped[:] = bytes({size})\n"
        f"unmapped = os.memfd_create('unmapped'); os.write(unmapped, bytes({size}))\n"
        "print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        before = tree_memory(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = tree_memory(child.pid)
        child.communicate(b"\n")
    assert after.files - before.files == 2 * size
    assert 2 * size <= after.total - before.total < 2.3 * size
