"""What `import streamload` does before anything of it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("what", ["import streamload", "from streamload.loader import StreamLoader"])
def test_windows_is_refused_with_what_to_use(what: str) -> None:
    program = f"import sys; sys.platform = 'win32'; {what}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: streamload runs on Linux and macOS; on Windows use WSL2"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_other_systems_are_let_in(platform: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import streamload; print(streamload.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout
