"""What `shardify` says of files that it cannot pack, or that no loader could decode."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from image_folders import image_bytes, image_folder, pack
from PIL import Image


def sixteen_bits() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999).save(buffer, "PNG")
    return buffer.getvalue()


def test_other_files_in_class_folders_are_advised_how_to_be_packed(tmp_path: Path) -> None:
    for name in ("cat/1.wav", "bee/2.wav"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"RIFF")
    status, _, err = pack(tmp_path / "source", tmp_path / "dest")
    assert status == 1
    assert "repair" not in err
    assert "not for .wav; to pack any files, list their paths and labels in a .csv, or give --stems" in err
    assert pack(tmp_path / "source", tmp_path / "dest", "--stems")[0] == 0


def test_images_that_no_loader_decodes_are_named_or_left_out(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", "cat/1.jpg", "bee/1.png")
    (source / "cat" / "depth.png").write_bytes(sixteen_bits())
    (source / "cat" / "2.png").write_bytes(image_bytes(7, ".png"))
    status, _, err = pack(source, tmp_path / "dest", "--workers", 1)
    assert (status, "depth.png: loaders refuse it: the PNG image has 16 bits a channel" in err) == (1, True)
    assert "1 of 4 files" in err
    status, out, _ = pack(source, tmp_path / "dest", "--workers", 1, "--skip-bad")
    assert (status, "3 samples" in out) == (0, True)
