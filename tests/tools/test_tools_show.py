"""`streamload show` as a user runs it: what is on the sheet, and one message for whatever goes wrong."""

from __future__ import annotations

import gzip
import io
import shutil
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import run
from PIL import Image
from streamload_tools import main as streamload

from streamload import ShardWriter

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

GREY, RED = (100, 100, 100), (200, 10, 20)


def png(pixels: Any, palette: list[int] | None = None) -> bytes:
    image, file = Image.fromarray(pixels), io.BytesIO()
    if palette is not None:
        image.putpalette(palette)
    image.save(file, "PNG")
    return file.getvalue()


def wav(values: Any, width: int) -> bytes:
    """A tone of 1,000 frames in two channels, of the first of which these are the values."""
    file = io.BytesIO()
    scaled = np.round(np.asarray(values) * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    both = np.stack([scaled, np.full_like(scaled, 128 if width == 1 else 0)], 1).reshape(-1)
    with wave.open(file, "wb") as written:
        written.setparams((2, width, 8000, 0, "NONE", "not compressed"))
        written.writeframes(b"".join(struct.pack("<q", each)[:width] for each in both.tolist()))
    return file.getvalue()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of one grey with masks, depths and boxes; the mask's palette is not the colours that are drawn."""
    folder = tmp_path_factory.mktemp("mixed") / "shards"
    mask = np.zeros((24, 24), np.uint8)
    mask[:, 12:] = 1
    with ShardWriter(folder, max_count=4) as writer:
        for number in range(10):
            writer.write(
                {
                    "__key__": f"photo/{number:03d}",
                    "png": np.full((24, 24, 3), 100, np.uint8),
                    "mask.png": png(mask, [0, 0, 0, *RED]),
                    "depth.png": png(np.arange(576, dtype=np.uint16).reshape(24, 24)),
                    "json": {"boxes": [[3, 3, 9, 9]], "labels": [1]},
                    "cls": number % 2,
                    "txt": f"caption {number}",
                }
            )
    (folder / "classes.json").write_text('{"classes": ["cat", "dog"]}')
    return folder


def show(*arguments: object) -> str:
    status, out, err = run(streamload.app, "show", *arguments)
    assert (status, err) == (0, "")
    return out


def refused(*arguments: object) -> str:
    status, out, err = run(streamload.app, "show", *arguments)
    assert (status > 0, out) == (True, "")
    assert err.count("\n") == 1
    return err


def pixels_of(path: Path) -> Any:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def test_a_sheet_of_some_samples(mixed: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    said = show(mixed, "--output", sheet, "--samples", 4, "--columns", 2)
    assert said.startswith(f"{sheet}: 4 of 10 samples, spread evenly, 432 x ")
    pixels = pixels_of(sheet)
    assert pixels.shape[1] == 432
    grey = (pixels == GREY).all(2).sum()
    assert 4 * 90 * 190 - 4 * 3000 < grey < 4 * 96 * 192  # the left halves, but for boxes
    assert not (pixels == RED).all(2).any()  # the numbers of the classes are drawn, not their palette


def test_samples_are_chosen_evenly_at_random_or_by_a_condition(mixed: Path, tmp_path: Path) -> None:
    def sheet(*options: object) -> bytes:
        show(mixed, "--output", tmp_path / "a.png", "--samples", 3, "--fields", "txt", *options)
        return pixels_of(tmp_path / "a.png").tobytes()

    assert sheet() == sheet()
    assert len({sheet(), sheet("--seed", 1), sheet("--seed", 2), sheet("--where", "label == 1")}) == 4
    assert sheet("--seed", 1) == sheet("--seed", 1)
    assert show(mixed, "--output", tmp_path / "a.png").startswith(f"{tmp_path}/a.png: 10 samples, ")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sound_is_drawn_from_wav_of_all_widths(tmp_path: Path, width: int) -> None:
    tone = 0.8 * np.sin(np.linspace(0, 60, 1000))
    with ShardWriter(tmp_path / "sound") as writer:
        writer.write({"__key__": "one", "wav": wav(tone, width)})
        writer.write({"__key__": "two", "wav": wav(0 * tone, width)})
    show(tmp_path / "sound", "--output", tmp_path / "a.png")
    blue = (pixels_of(tmp_path / "a.png") == (48, 99, 142)).all(2)
    tops = [np.flatnonzero(blue[:, left : left + 192].any(1)) for left in (16, 224)]
    assert 75 < np.ptp(tops[0]) < 85  # all of the first channel's 56 pixels, and the line in the second's middle
    assert np.ptp(tops[1]) == 56  # two lines


@pytest.mark.parametrize("extension", ["png", "jpg", "webp"])
def test_the_extension_decides_on_the_format(mixed: Path, tmp_path: Path, extension: str) -> None:
    sheet = tmp_path / f"sheet.{extension}"
    show(mixed, "--output", sheet, "--samples", 2)
    with Image.open(sheet) as picture:
        assert picture.format == {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[extension]


def test_classes_are_named_and_must_be_numbered_alike_where_labels_are_shown(mixed: Path, tmp_path: Path) -> None:
    for name, classes in (("a", '["cat", "dog"]'), ("b", '["dog", "cat"]')):
        shutil.copytree(mixed, tmp_path / name)
        (tmp_path / name / "classes.json").write_text(f'{{"classes": {classes}}}')
    sheets = []
    for name in ("a", "b"):
        show(tmp_path / name, "--output", tmp_path / "a.png", "--fields", "cls")
        sheets.append(pixels_of(tmp_path / "a.png")[45:].tobytes())
    assert sheets[0] != sheets[1]
    both = (tmp_path / "a", tmp_path / "b", "--output", tmp_path / "a.png", "--fields")
    assert "the same label stands for different classes" in refused(*both, "cls")
    show(*both, "txt")


def test_of_compressed_shards_the_first_samples_are_shown(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    for shard in mixed.glob("*.tar"):
        (tmp_path / "packed" / f"{shard.name}.gz").write_bytes(gzip.compress(shard.read_bytes()))
    sheet, options = tmp_path / "a.png", ("--samples", 3, "--fields", "png,mask.png,txt")
    assert show(tmp_path / "packed", "--output", sheet, *options).startswith(f"{sheet}: the first 3 samples, ")
    first = pixels_of(sheet)[45:].tobytes()
    said = show(tmp_path / "packed", "--output", sheet, *options, "--seed", 1)
    assert said.startswith(f"{sheet}: 3 samples at random by seed 1, ")
    assert pixels_of(sheet)[45:].tobytes() != first


def test_an_image_of_16_bits_alone_is_shown_too(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "deep") as writer:
        writer.write({"__key__": "one", "png": png(np.arange(576, dtype=np.uint16).reshape(24, 24))})
    show(tmp_path / "deep", "--output", tmp_path / "a.png")
    assert (pixels_of(tmp_path / "a.png") == (253, 231, 37)).all(2).any()


def test_each_mistake_is_one_message(mixed: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "a.png"
    assert "--output='a.gif' must end in .png, .jpg or .webp" in refused(mixed, "--output", "a.gif")
    assert "there is no such folder; make it first" in refused(mixed, "--output", tmp_path / "no" / "a.png")
    assert "no sample has 'jpeg'; there are" in refused(mixed, "--output", sheet, "--fields", "jpeg")
    assert "no such shard or folder" in refused(tmp_path / "nothing", "--output", sheet)
    assert "label == 7" in refused(mixed, "--output", sheet, "--where", "label == 7")
    assert "is a url" in refused(mixed, "--output", "s3://bucket/a.png")
    assert not sheet.exists()
    with ShardWriter(tmp_path / "bad") as writer:
        writer.write({"__key__": "sound", "txt": "good"})
        writer.write({"__key__": "torn", "txt": "x", "wav": b"RIFF"})
    torn = refused(tmp_path / "bad", "--output", sheet)
    assert "field 'wav' cannot be decoded: not a WAV file" in torn
    assert "sample 'torn'" in torn
    assert "--fields takes those to show" in torn
    show(tmp_path / "bad", "--output", sheet, "--fields", "txt")


def test_shards_without_samples_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(bytes(1024))
    (tmp_path / "empty.tar.gz").write_bytes(gzip.compress(bytes(1024)))
    for shard in ("empty.tar", "empty.tar.gz"):
        with pytest.warns(UserWarning, match="no sample|no batch"):
            said = refused(tmp_path / shard, "--output", tmp_path / "a.png")
        assert "there is no sample in the shards" in said


def test_a_folder_that_may_not_be_written_is_one_message(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    assert "this folder may not be written; name a file elsewhere" in refused(mixed, "--output", "a.png")
