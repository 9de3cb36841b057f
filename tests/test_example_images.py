"""The examples of segmentation and detection, as they stand: image, masks and boxes still belong to each other."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
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


def test_sound_is_read_by_whatever_decoder_is_given(example: Any, tmp_path: Path) -> None:
    """No library reads .flac here, so a stand-in does, of bytes that only it understands."""
    sound = example("sound")

    def decode_flac(content: bytes) -> np.ndarray:
        assert content.startswith(b"fLaC")
        return np.frombuffer(content[4:], np.float32)

    for number, name in enumerate(("high/1.flac", "low/2.wav", "low/3.flac")):
        path = tmp_path / "recordings" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"fLaC" + np.full(5, number, np.float32).tobytes())
    sound.write_recording(tmp_path / "recordings" / "low" / "2.wav", np.full(5, 0.5))
    decode = {"wav": sound.decode_wav, "flac": decode_flac}
    sound.pack_recordings(tmp_path / "recordings", tmp_path / "shards")
    with sound.loader(tmp_path / "shards", 3, decode=decode, num_workers=0) as loader:
        waves, labels = next(iter(loader))
    assert labels.tolist() == [0, 1, 1]
    assert np.allclose(waves[:, 0], [0, 0.5, 2], atol=1e-4)
