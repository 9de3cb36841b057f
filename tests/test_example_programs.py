"""Examples of data, the demonstration in small and the benchmark of loaders run as they stand, and say what they do."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from streamload import TarDataset

_ROOT = Path(__file__).parent.parent
_EXAMPLES = _ROOT / "examples"
_SHARDIFY = Path(sys.executable).with_name("shardify")

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clip.py", "169 pairs selected, 10 full batches, 2 broken images"),
        ("embeddings.py", "400 of 400 labels right"),
        ("sound.py", "12 of 12 recordings right"),
    ],
)
def test_an_example_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(_EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == said


def main_of(name: str) -> Any:
    return runpy.run_path(str(_EXAMPLES / f"{name}.py"))["main"]


def test_segmentation_finds_the_disc(tmp_path: Path) -> None:
    """With masks cropped apart from their images, three quarters of the pixels would be right."""
    assert main_of("segmentation")(str(tmp_path), num_workers=0) > 0.97


def test_detection_shows_boxes_where_things_are(tmp_path: Path) -> None:
    """Boxes that were moved otherwise than their images would be as dark as these are on the whole."""
    means = main_of("detection")(str(tmp_path), num_workers=1)
    assert means["square"] > 0.7
    assert means["circle"] > 0.5
    assert means["pictures"] < 0.4
    kinds = [TarDataset(tmp_path / f"from-{name}", decode=False) for name in ("voc", "coco", "yolo")]
    for voc, *others in zip(*kinds, strict=True):
        for other in others:
            assert json.loads(other["json"]) == json.loads(voc["json"])
            assert (other["__key__"], other["jpg"]) == (voc["__key__"], voc["jpg"])


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
def test_a_run_that_is_killed_and_resumed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    _write_squares(tmp_path / "images", classes=4, images=60)
    command = [
        sys.executable,
        os.fspath(_EXAMPLES / "digits" / "run_demo.py"),
        "--images",
        "images",
        "--images-per-shard",
        "60",
    ]
    command += ["--epochs", "1", "--batch-size", "8", "--checkpoint-every", "6", "--kill-at-step", "15"]
    done = subprocess.run(
        [*command, "--least-accuracy", "0.5"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "27 steps; steps 13 to 15 were lost in the kill and redone" in done.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / ".demo/resumed/steps.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 16), *range(13, 28)]
    assert sorted(os.listdir(tmp_path)) == [".demo", "images"]
