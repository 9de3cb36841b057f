"""What the feeder and its workers import in a pass: what none of them needs delays the first batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from servers.faults import FaultServer

from streamload import StreamLoader

COUNTS = [1] * 40 + [5]
TOTAL = sum(COUNTS)


@pytest.mark.exhaustive
def test_masked_arrays_of_numpy_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`np.unique` imports them, which takes 20 ms of each process."""
    scanned = write_numbers(tmp_path / "scanned", COUNTS, index=False)
    write_numbers(tmp_path / "indexed", COUNTS)
    with FaultServer(tmp_path / "indexed") as server:
        monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
        remote = f"{server.url}/part{{000..040}}-000000.tar"
        runs: list[tuple[str, dict[str, Any]]] = [
            (scanned, {"shuffle": True}),
            (remote, {"shuffle": True, "weights": [1] * TOTAL, "epoch_size": TOTAL}),
        ]
        for urls, options in runs:
            with StreamLoader(urls, 5, num_workers=1, lanes=5, **options) as loader:
                assert sum(len(batch["cls"]) for batch in loader) == TOTAL
            imported = {line.rpartition("|")[2].strip() for line in capfd.readouterr().err.splitlines()}
            assert {"streamload.feeder.process", "streamload.workers.worker", "numpy"} <= imported
            assert "numpy.ma" not in imported
