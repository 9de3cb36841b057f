"""What `import streamload` does before anything of it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("platform", "says"), [("win32", "on Windows use WSL2"), ("darwin", "")])
def test_windows_is_refused_with_what_to_use(platform: str, says: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import streamload"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == (says != "")
    assert done.stderr.rstrip().endswith(says)
