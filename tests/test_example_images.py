"""The examples of segmentation and detection, as they stand: image, masks and boxes still belong to each other."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(_EXAMPLES)
    return import_module


def test_segmentation_finds_the_disc(example: Any, tmp_path: Path) -> None:
    """With masks cropped apart from their images, three quarters of the pixels would be right."""
    assert example("segmentation").main(str(tmp_path), num_workers=0) > 0.97


def test_detection_shows_boxes_where_things_are(example: Any, tmp_path: Path) -> None:
    """Boxes that were moved otherwise than their images would be as dark as these are on the whole."""
    means = example("detection_voc").main(str(tmp_path), num_workers=1)
    assert means["square"] > 0.7
    assert means["circle"] > 0.5
    assert means["pictures"] < 0.4
