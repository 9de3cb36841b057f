"""The demonstration in small: it passes, and its comparison notices every way in which a resumed run can differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

_DEMO = Path(__file__).parent.parent / "examples" / "digits"
_SHARDIFY = Path(sys.executable).with_name("shardify")


def _write_squares(folder: Path, classes: int, images: int) -> None:
    """An ImageFolder of noise with a bright square, whose place is the class."""
    generator = np.random.default_rng(5)
    for label in range(classes):
        (folder / f"place{label}").mkdir(parents=True)
        for number in range(images):
            pixels = generator.integers(0, 60, (28, 28), dtype=np.uint8)
            row, column = 4 + 12 * (label // 2), 4 + 12 * (label % 2)
            pixels[row : row + 8, column : column + 8] += 180
            Image.fromarray(pixels).save(folder / f"place{label}" / f"{number}.png")


@pytest.mark.timeout(300)  # it imports torch three times, one after the other
@pytest.mark.skipif(not _SHARDIFY.exists(), reason="the command shardify is not installed beside this Python")
@pytest.mark.exhaustive
def test_a_run_that_is_killed_and_resumed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    _write_squares(tmp_path / "images", classes=4, images=60)
    command = [sys.executable, os.fspath(_DEMO / "run_demo.py"), "--images", "images", "--images-per-shard", "60"]
    command += ["--epochs", "1", "--batch-size", "8", "--checkpoint-every", "6", "--kill-at-step", "15"]
    done = subprocess.run(
        [*command, "--least-accuracy", "0.5"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "27 steps; steps 13 to 15 were lost in the kill and redone" in done.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / ".demo/resumed/steps.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 16), *range(13, 28)]
    assert sorted(os.listdir(tmp_path)) == [".demo", "images"]
