"""The examples of data that are no plain images: pairs with captions and scores, embeddings, and sound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clip.py", "169 pairs selected, 10 full batches, 2 broken images"),
        ("embeddings.py", "400 of 400 labels right"),
        ("sound.py", "15 of 15 recordings right"),
    ],
)
def test_an_example_does_what_it_says(tmp_path: Path, name: str, said: str) -> None:
    command = [sys.executable, os.fspath(_EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == said
