"""The benchmark of feeding a GPU says that it cannot run without one, and writes what it has found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def bench_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    yield importlib.import_module("bench_gpu")
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_without_a_gpu_it_says_so(
    bench_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--folder", str(tmp_path)])
    bench_gpu.main()
    assert capsys.readouterr().out == "skipped: torch sees no CUDA device here\n"
    assert list(tmp_path.iterdir()) == []


def test_its_tables(bench_gpu: Any) -> None:
    steps = {"pictures": {"a batch that is there": [50.0, 50.0, 51.0], "DataLoader": [55.0, 54.0, 60.0]}}
    rates = {"pictures": {"slot": 20e9, "page-locked by torch": 25e9, "ordinary memory": 5e9}}
    lines = bench_gpu.report(steps, rates).splitlines()
    assert "| pictures | DataLoader | 55.00 (54.00 to 60.00) | +10.0% |" in lines
    assert "| pictures | slot | 20.00 | 0.80 |" in lines


def test_its_loaders_give_the_same_batches(bench_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `device=`, that is, and with a move that goes nowhere."""
    monkeypatch.setattr(bench_gpu, "moved", lambda batches: (tuple(batch) for batch in batches))
    monkeypatch.setattr(bench_gpu, "Files", NotLoaded)
    of = bench_gpu.replace(bench_gpu.PICTURES, samples=8, batch_size=4, shard_samples=4, root=tmp_path)
    ours, theirs = bench_gpu.Ours(of, moves=False), bench_gpu.Theirs(of)
    shapes = [[tuple(value.shape) for value in batch] for batch in ours.epoch()]
    ours.close()
    assert shapes == [[(4, 3, 224, 224), (4,)]] * 2
    assert list(theirs.epoch()) == [(1,)]
    theirs.close()


class NotLoaded:
    """In place of a DataLoader, which needs CUDA to page-lock."""

    def __init__(self, _: Any, *, pin_memory: bool) -> None:
        assert pin_memory

    def epoch(self) -> list[list[int]]:
        return [[1]]

    def close(self) -> None:
        return
