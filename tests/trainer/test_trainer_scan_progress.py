"""How far scans are before a first batch: on a terminal, in a log, and from a real feeder."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from streamload import ShardWriter, StreamLoader
from streamload.feeder.messages import Scanning
from streamload.trainer.scan_progress import ScanProgress


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error from now on; not in a fixture, after which pytest puts its own there."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    return terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds from now on."""
    now = [100.0]
    monkeypatch.setattr("streamload.trainer.scan_progress.monotonic", lambda: now[0])
    return now


def test_a_bar_comes_after_two_seconds_and_goes_with_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    terminal = use_terminal(monkeypatch)
    progress = ScanProgress(shows=True)
    progress.update(Scanning(10, 300))
    clock[0] += 1.5
    progress.update(Scanning(20, 300))
    assert terminal.getvalue() == "", "short work shows nothing"
    clock[0] += 1.0
    progress.update(Scanning(123, 300))
    assert "scanning shards without an index" in terminal.getvalue()
    assert "123/300" in terminal.getvalue()
    progress.update(None)
    shown = terminal.getvalue()
    assert shown.endswith("\x1b[2K"), "the line is cleared"
    progress.update(None)
    progress.update(Scanning(124, 300))
    assert terminal.getvalue() == shown, "the next wait is another one"


@pytest.mark.parametrize("on_terminal", [False, True])
def test_elsewhere_the_log_has_it(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is no terminal, or on another rank than the first."""
    if on_terminal:
        use_terminal(monkeypatch)
    caplog.set_level(logging.INFO, "streamload")
    progress = ScanProgress(shows=not on_terminal)
    for second in range(70):
        progress.update(Scanning(second, 3000))
        clock[0] += 1
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "scanned 30 of 3,000 shards that have no index",
        "scanned 60 of 3,000 shards that have no index",
    ]


class Recorded(ScanProgress):
    """What loaders have shown."""

    seen: ClassVar[list[Any]] = []

    def update(self, message: Any) -> None:
        self.seen.append(message)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_feeder_says_how_far_it_is(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardWriter(tmp_path, max_count=1, index=False) as writer:
        for number in range(60):
            writer.write({"__key__": str(number), "cls": number})
    monkeypatch.setattr("streamload.trainer.feeder_link.ScanProgress", Recorded)
    monkeypatch.setattr(Recorded, "seen", [])
    with StreamLoader(tmp_path, 20, shuffle=True, fields=("cls",), num_workers=workers) as loader:
        assert sorted(number for (batch,) in loader for number in batch.tolist()) == list(range(60))
    first = Recorded.seen[0]
    assert isinstance(first, Scanning)
    assert 1 <= first.scanned <= 60
    assert first.shards == 60
    assert not isinstance(Recorded.seen[-1], Scanning)
