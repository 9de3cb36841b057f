"""The demonstration in small: it passes, and its comparison notices every way in which a resumed run can differ."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

_DEMO = Path(__file__).parent.parent / "examples" / "digits"
_SHARDIFY = Path(sys.executable).with_name("shardify")


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demonstration's comparison of two runs."""
    monkeypatch.syspath_prepend(_DEMO)
    return importlib.import_module("proof")


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


def _write_run(folder: Path, steps: list[tuple[int, str]], accuracy: float = 0.9, weights: str = "w") -> str:
    folder.mkdir()
    lines = [json.dumps({"step": step, "batch_sha256": batch}) for step, batch in steps]
    (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({"accuracies": [0.5, accuracy], "weights_sha256": weights}))
    return os.fspath(folder)


_WHOLE = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
_RESUMED = [(1, "a"), (2, "b"), (3, "c"), (3, "c"), (4, "d")]


def test_the_comparison_accepts_steps_that_are_redone_with_the_same_samples(tmp_path: Path, proof: ModuleType) -> None:
    found = proof.compare(_write_run(tmp_path / "whole", _WHOLE), _write_run(tmp_path / "resumed", _RESUMED))
    assert found.all_the_same
    assert (found.steps, found.redone, found.accuracy) == (4, (3,), 0.9)


@pytest.mark.parametrize(
    ("run", "noticed"),
    [
        ({"steps": [(1, "a"), (2, "b"), (3, "c"), (3, "d"), (4, "c")]}, "same_order"),
        ({"steps": [(1, "a"), (2, "b"), (4, "d")]}, "same_order"),
        ({"steps": _RESUMED, "accuracy": 0.9000001}, "same_accuracy"),
        ({"steps": _RESUMED, "weights": "v"}, "same_weights"),
    ],
)
def test_the_comparison_notices_what_differs(
    tmp_path: Path, proof: ModuleType, run: dict[str, Any], noticed: str
) -> None:
    found = proof.compare(_write_run(tmp_path / "whole", _WHOLE), _write_run(tmp_path / "resumed", **run))
    assert not getattr(found, noticed)
    assert not found.all_the_same
