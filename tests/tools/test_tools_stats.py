"""`streamload stats` as a user runs it, and what `Normalize.of` reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import encoded, run
from remote_places import Place

from streamload import ShardWriter, StreamLoader, images
from streamload.cli import main as streamload
from streamload.errors import ShardNotFoundError

LABELS = [0] * 30 + list(range(1, 24))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """53 samples in three shards: label 0 thirty times, 23 others once, and a text in every other sample."""
    folder = tmp_path_factory.mktemp("stats") / "data"
    with ShardWriter(folder, max_count=25) as writer:
        for number, label in enumerate(LABELS):
            text = {"txt": "x" * (number + 1)} if number % 2 == 0 else {}
            writer.write({"__key__": f"{number:03d}", "npy": np.zeros(4, np.uint8), "cls": label, **text})
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of two kinds and many sizes, some of them grey, each with a mask."""
    random = np.random.default_rng(0)
    mask = encoded(np.zeros((4, 4), np.uint8))
    with ShardWriter(tmp_path / "photos", max_count=70) as writer:
        for number in range(150):
            shape = (10 + number % 7, 12) if number % 10 == 0 else (10 + number % 7, 12, 3)
            pixels = random.integers(10 + number % 50, 256 - number % 20, shape, dtype=np.uint8)
            image = {"jpg": encoded(pixels, "JPEG")} if number % 3 else {"png": encoded(pixels)}
            writer.write({"__key__": f"{number:04d}", **image, "mask.png": mask, "cls": number % 4})
    return tmp_path / "photos"


def stats_of(*arguments: object) -> dict[str, Any]:
    status, out, _ = run(streamload.app, "stats", "--json", *arguments)
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def refused(*arguments: object) -> str:
    status, out, err = run(streamload.app, "stats", *arguments)
    assert (status > 0, out, err.count("error:")) == (True, "", 1)
    return err


def test_stats_counts_samples_fields_and_labels(dataset: Path) -> None:
    found = stats_of(dataset)
    assert (found["shards"], found["samples"]) == (3, 53)
    assert found["bytes"] == sum(path.stat().st_size for path in dataset.glob("*.tar"))
    assert found["samples_per_shard"] == {"min": 3, "max": 25}
    assert found["fields"]["txt"] == {"samples": 27, "bytes": sum(range(1, 54, 2)), "min_bytes": 1, "max_bytes": 53}
    assert found["fields"]["npy"]["samples"] == found["fields"]["cls"]["samples"] == 53
    assert found["labels"][0] == {"label": 0, "samples": 30}
    assert sorted(each["label"] for each in found["labels"]) == list(range(24))


def test_stats_are_the_same_without_an_index_and_from_a_bucket(dataset: Path, bucket: Place) -> None:
    for path in dataset.glob("*.tar"):
        shutil.copy(path, bucket.folder)
    with_index = stats_of(dataset)
    assert stats_of(bucket.folder) == stats_of(bucket.url, *bucket.options) == with_index
    shutil.copytree(dataset / ".streamload", bucket.folder / ".streamload")
    assert stats_of(bucket.url, *bucket.options) == with_index


def test_stats_of_labels_that_are_no_numbers_say_so(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "data", max_count=2) as writer:
        for number, label in enumerate((b"1", b"1", b"cat", b"2")):
            writer.write({"__key__": f"{number}", "cls": label})
    found = stats_of(tmp_path / "data")
    assert (found["labels"], found["samples_of_shards_without_labels"]) == ([{"label": 1, "samples": 2}], 2)
    assert "not counted: 2 samples of shards" in run(streamload.app, "stats", tmp_path / "data")[1]


def test_pixels_agree_with_numpy_and_normalize_reads_them(photos: Path, tmp_path: Path) -> None:
    found = stats_of(photos, "--pixels", "--workers", 2)["pixels"]
    assert found == json.loads((photos / "statistics.json").read_text())
    assert found["fields"] == ["jpg", "png"]
    with StreamLoader(photos, 1, fields=("jpg;png",), num_workers=0, collate_fn=lambda each: each[0][0]) as loader:
        pixels = np.concatenate([image.reshape(-1, 3) for image in loader]) / 255
    assert found["pixels"] == len(pixels)
    for name, expected in (("mean", pixels.mean(0)), ("std", pixels.std(0)), ("min", pixels.min(0))):
        np.testing.assert_allclose(found[name], expected, rtol=1e-12)
    np.testing.assert_allclose(found["max"], pixels.max(0), rtol=1e-12)
    normalize = images.Normalize.of(photos)
    assert (list(normalize.mean), list(normalize.std)) == (found["mean"], found["std"])
    assert images.Normalize.of(photos / "statistics.json") == normalize
    own = tmp_path / "own.json"
    assert stats_of(photos, "--pixels", "--workers", 1, "--output", own)["pixels"] == found
    assert own.read_bytes() == (photos / "statistics.json").read_bytes()
    status, out, _ = run(streamload.app, "stats", photos, "--pixels", "--output", own)
    assert (status, out.splitlines()[-1]) == (0, f"saved in {own}")


@pytest.mark.exhaustive
def test_pixels_in_a_bucket(bucket: Place, photos: Path) -> None:
    shutil.copytree(photos, bucket.folder, dirs_exist_ok=True)
    status, out, _ = run(streamload.app, "stats", bucket.url, "--pixels", *bucket.options)
    assert status == 0
    assert f"saved in {bucket.url}/statistics.json" in out
    found = images.Normalize.of(bucket.url, storage_options=bucket.storage_options)
    assert found == images.Normalize.of(bucket.folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pixels"], "no field holds images; the fields are: "),
        (["--pixels", "--output", "found.txt"], "must end in .json"),
        (["--output", "found.json"], "give --pixels too"),
    ],
)
def test_wrong_usage_is_one_message(dataset: Path, arguments: list[str], said: str) -> None:
    assert said in refused(dataset, *arguments)
    assert not list(dataset.glob("*statistics*"))


def test_shards_of_several_folders_need_a_place_for_the_result(photos: Path, dataset: Path) -> None:
    assert "shards of several folders, or on a web server, need --output" in refused(photos, dataset, "--pixels")


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "data") as writer:
        writer.write({"__key__": "torn", "png": b"no image"})
    assert "sample 'torn'" in refused(tmp_path / "data", "--pixels")
    assert not (tmp_path / "data/statistics.json").exists()


def test_normalize_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFoundError, match=r"`streamload stats SHARDS --pixels --output .*s.json` makes it"):
        images.Normalize.of(tmp_path)
    (tmp_path / "statistics.json").write_text("{}")
    with pytest.raises(ValueError, match="was not written by `streamload stats --pixels`"):
        images.Normalize.of(tmp_path)
