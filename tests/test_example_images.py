"""The examples of segmentation and detection, as they stand: image, masks and boxes still belong to each other."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from streamload import TarDataset

_EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(_EXAMPLES)
    return import_module


@pytest.mark.exhaustive
def test_segmentation_finds_the_disc(example: Any, tmp_path: Path) -> None:
    """With masks cropped apart from their images, three quarters of the pixels would be right."""
    assert example("segmentation").main(str(tmp_path), num_workers=0) > 0.97


@pytest.mark.exhaustive
def test_detection_shows_boxes_where_things_are(example: Any, tmp_path: Path) -> None:
    """Boxes that were moved otherwise than their images would be as dark as these are on the whole."""
    means = example("detection").main(str(tmp_path), num_workers=1)
    assert means["square"] > 0.7
    assert means["circle"] > 0.5
    assert means["pictures"] < 0.4
    kinds = [TarDataset(tmp_path / f"from-{name}", decode=False) for name in ("voc", "coco", "yolo")]
    for voc, *others in zip(*kinds, strict=True):
        for other in others:
            assert json.loads(other["json"]) == json.loads(voc["json"])
            assert (other["__key__"], other["jpg"]) == (voc["__key__"], voc["jpg"])
