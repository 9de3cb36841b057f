"""What tests of remote reading share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def fresh_scan_cache(own_cache_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard was scanned before: what one test has found out does not spare the next one its scans."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "scans"))
