"""Programs that end during a request to a storage: they end well, and nothing stays behind."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import fsspec.asyn
import pytest
from closed_when_late import ClosedWhenLate
from matrix import exhaustive
from preloaded import Preloaded
from processes import alive, children, wait_until
from servers.faults import FaultServer, Script

from streamload import StreamLoader
from streamload.errors import LoaderClosedError

STARTED = textwrap.dedent(
    """
    import sys
    from streamload import StreamLoader

    loader = StreamLoader(sys.argv[1], num_workers=int(sys.argv[3]), cache_dir=sys.argv[2])
    print("made", flush=True)
    sys.stdin.readline()
    next(iter(loader))
    """
)


@pytest.mark.parametrize("workers", [exhaustive((0,)), 2])
def test_a_feeder_that_waits_for_the_disk_cache_ends_with_its_trainer(
    preloaded: Preloaded, tmp_path: Path, workers: int
) -> None:
    """It asks which version there is, since the cache must know that, and is not answered."""
    with FaultServer({"a.tar": b""}) as server:
        trainer = preloaded.start(STARTED, f"{server.url}/a.tar", tmp_path / "cache", workers)
        assert trainer.stdout.readline() == "made\n"
        server.play(Script(first_byte_s=100.0))
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert wait_until(lambda: server.report().requests > 0)
        started = children("streamload.feeder") + children("workers.worker")
        assert len(started) == 1 + workers
        trainer.kill()
        trainer.communicate()
        assert wait_until(lambda: not any(alive(process.pid) for process in started))


@pytest.mark.parametrize("through_fsspec", [False, exhaustive((True,))])
def test_a_loader_without_workers_closes_while_its_storage_is_silent(
    tmp_path: Path, through_fsspec: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"filesystem": fsspec.filesystem("http")} if through_fsspec else {}
    with FaultServer({"a.tar": b""}) as server:
        with StreamLoader(f"{server.url}/a.tar", num_workers=0, cache_dir=tmp_path, **how) as loader:
            server.play(Script(first_byte_s=8.0))
            with ClosedWhenLate(loader, monkeypatch, 0.5), pytest.raises(LoaderClosedError):
                next(iter(loader))
        report = server.report()
        assert report.requests
        assert report.spans == [], "it has waited for the answer"
