"""What `shardify` says of files that it cannot pack, or that no loader could decode."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from image_folders import image_bytes, image_folder, pack
from PIL import Image


def sixteen_bits() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("loose", [False, True])
def test_sound_and_captions_are_for_a_shard_writer(tmp_path: Path, loose: bool) -> None:
    source = tmp_path / "source"
    for name in ("cat/1.wav", "cat/1.txt", "bee/1.wav", "bee/1.txt"):
        path = source / (name.replace("/", "_") if loose else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"RIFF")
    status, _, err = pack(source, tmp_path / "dest", "--workers", 1)
    assert status == (2 if loose else 1)
    assert "repair" not in err
    assert 'streamload.ShardWriter(DEST) as writer: writer.write({"__key__": "0001", "txt": its bytes, "wav"' in err


def test_images_that_no_loader_decodes_are_named_or_left_out(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", "cat/1.jpg", "bee/1.png")
    (source / "cat" / "depth.png").write_bytes(sixteen_bits())
    (source / "cat" / "2.png").write_bytes(image_bytes(7, ".png"))
    status, _, err = pack(source, tmp_path / "dest", "--workers", 1)
    assert (status, "depth.png: loaders refuse it: the PNG image has 16 bits a channel" in err) == (1, True)
    assert "1 of 4 files" in err
    status, out, _ = pack(source, tmp_path / "dest", "--workers", 1, "--skip-bad")
    assert (status, "3 samples" in out) == (0, True)
