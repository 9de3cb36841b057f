"""The examples of data, as they stand: captions and scores, embeddings, sound, segmentation, detection."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from streamload import TarDataset

_EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_segmentation_finds_the_disc(tmp_path: Path) -> None:
    """With masks cropped apart from their images, three quarters of the pixels would be right."""
    assert main_of("segmentation")(str(tmp_path), num_workers=0) > 0.97


@pytest.mark.exhaustive
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
