"""The example that trains on pairs of images and captions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_EXAMPLE = Path(__file__).parent.parent / "examples" / "clip.py"


def test_pairs_are_selected_and_broken_images_replaced(tmp_path: Path) -> None:
    command = [sys.executable, os.fspath(_EXAMPLE), "--shards", "shards"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "169 pairs selected, 10 full batches, 2 broken images"
