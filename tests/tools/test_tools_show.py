"""`streamload show` as a user runs it: what is on the sheet, and one message for whatever goes wrong."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import encoded, run
from PIL import Image

from streamload import ShardWriter
from streamload.cli import main as streamload

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

GREY = (100, 100, 100)
TOP = 64
"""Where the first row begins, below the titles."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey photographs with masks of classes 0 and 1, 16-bit depths and boxes."""
    folder = tmp_path_factory.mktemp("mixed") / "shards"
    mask = np.zeros((24, 24), np.uint8)
    mask[:, 12:] = 1
    with ShardWriter(folder, max_count=4) as writer:
        for number in range(10):
            writer.write(
                {
                    "__key__": f"photo/{number:03d}",
                    "png": np.full((24, 24, 3), 100, np.uint8),
                    "mask.png": encoded(mask),
                    "depth.png": encoded(np.arange(576, dtype=np.uint16).reshape(24, 24)),
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


def test_a_sheet_has_images_masks_boxes_and_text(mixed: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    said = show(mixed, "--output", sheet, "--samples", 4, "--columns", 2)
    assert said.startswith(f"{sheet}: the first 4 samples, 432 x ")
    pixels = pixels_of(sheet)
    assert pixels.shape[1] == 432
    image = pixels[TOP:, 16:][:192, :192]
    assert 192 * 192 - 700 < (image == GREY).all(2).sum() < 192 * 192 - 300, "a box of 48 pixels a side"
    first_mask = pixels[TOP + 2 * (192 + 4) :][:192, 16 : 16 + 192]
    assert first_mask[90, 20].tolist() == [0, 0, 0]
    assert first_mask[90, 170].tolist() == [255, 255, 255], "classes of small numbers can be seen"


@pytest.mark.parametrize(
    "boxes",
    [
        {"boxes": [[3, 3, 9, 9, 1]]},
        [{"bbox": [3, 3, 6, 6], "category_id": 7}],
    ],
)
def test_boxes_are_found_in_these_forms(tmp_path: Path, boxes: Any) -> None:
    with ShardWriter(tmp_path / "boxes") as writer:
        writer.write({"__key__": "a", "png": np.full((24, 24, 3), 100, np.uint8), "json": boxes})
    show(tmp_path / "boxes", "--output", tmp_path / "a.png")
    other = (pixels_of(tmp_path / "a.png")[TOP:, 16:][:192, :192] != GREY).any(2)
    rows, columns = np.flatnonzero(other.sum(1) > 40), np.flatnonzero(other.sum(0) > 40)
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (24, 71, 24, 71)


def test_samples_are_the_first_ones_or_random_ones_by_a_seed(mixed: Path, tmp_path: Path) -> None:
    def sheet(*options: object) -> bytes:
        show(mixed, "--output", tmp_path / "a.png", "--samples", 3, "--fields", "txt", *options)
        return pixels_of(tmp_path / "a.png")[TOP:].tobytes()

    assert sheet() == sheet()
    assert len({sheet(), sheet("--seed", 1), sheet("--seed", 2), sheet("--where", "label == 1")}) == 4
    assert sheet("--seed", 1) == sheet("--seed", 1)
    said = show(mixed, "--output", tmp_path / "a.png", "--seed", 3)
    assert said.startswith(f"{tmp_path}/a.png: 10 samples at random by seed 3, ")


@pytest.mark.parametrize("extension", ["png", "jpg", "webp"])
def test_the_extension_decides_on_the_format(mixed: Path, tmp_path: Path, extension: str) -> None:
    sheet = tmp_path / f"sheet.{extension}"
    show(mixed, "--output", sheet, "--samples", 2)
    with Image.open(sheet) as picture:
        assert picture.format == {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[extension]


def test_classes_have_their_names_unless_folders_differ(mixed: Path, tmp_path: Path) -> None:
    for name, classes in (("a", '["cat", "dog"]'), ("b", '["dog", "cat"]')):
        shutil.copytree(mixed, tmp_path / name)
        (tmp_path / name / "classes.json").write_text(f'{{"classes": {classes}}}')
    sheets = []
    for name in ("a", "b"):
        show(tmp_path / name, "--output", tmp_path / "a.png", "--fields", "cls")
        sheets.append(pixels_of(tmp_path / "a.png")[TOP:].tobytes())
    assert sheets[0] != sheets[1]
    both = (tmp_path / "a", tmp_path / "b", "--output", tmp_path / "a.png", "--fields")
    assert "the same label stands for different classes" in refused(*both, "cls")
    show(*both, "txt")


def test_each_mistake_is_one_message(mixed: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "a.png"
    assert "--output 'a.gif' must end in .png, .jpg or .webp" in refused(mixed, "--output", "a.gif")
    output = tmp_path / "no" / "a.png"
    assert f"cannot read or write {output}: No such file or directory" in refused(mixed, "--output", output)
    assert "no sample has 'jpeg'; there are" in refused(mixed, "--output", sheet, "--fields", "jpeg")
    assert "no such shard or folder" in refused(tmp_path / "nothing", "--output", sheet)
    assert "label == 7" in refused(mixed, "--output", sheet, "--where", "label == 7")
    assert not sheet.exists()
    for name, field, data, message in (
        ("torn", "png", b"torn", "field 'png' cannot be decoded"),
        ("odd", "json", b'{"boxes": [[1, 2], [3]]}', "field 'json' cannot be decoded"),
        ("null", "json", b'{"boxes": null}', "field 'json' cannot be decoded"),
    ):
        with ShardWriter(tmp_path / name) as writer:
            writer.write({"__key__": "good", "txt": "x"})
            writer.write({"__key__": name, "txt": "x", field: data})
        said = refused(tmp_path / name, "--output", sheet)
        assert message in said
        assert f"sample '{name}'" in said
        assert "choose other fields with --fields" in said
        show(tmp_path / name, "--output", sheet, "--fields", "txt")
    (tmp_path / "folder.png").mkdir()
    assert "folder.png" in refused(mixed, "--output", tmp_path / "folder.png")


def test_shards_without_samples_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(bytes(1024))
    (tmp_path / "empty.tar.gz").write_bytes(gzip.compress(bytes(1024)))
    for shard in ("empty.tar", "empty.tar.gz"):
        with pytest.warns(UserWarning, match="no sample|no batch"):
            said = refused(tmp_path / shard, "--output", tmp_path / "a.png")
        assert "the shards hold no samples" in said
