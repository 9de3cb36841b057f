"""`streamload stats --pixels` and `--field` as a user runs them, and what `Normalize.of` reads."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import run
from numpy.typing import NDArray
from PIL import Image
from preloaded import Preloaded
from remote_places import new_place
from servers.rclone import S3Server
from streamload_tools import main as streamload
from tree_memory import TreeMemory

from streamload import ShardWriter, StreamLoader, images
from streamload.errors import ShardNotFoundError

SAMPLES = 300


def encoded(pixels: NDArray[np.uint8], form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two kinds and many sizes, some of them grey, and embeddings far from 0."""
    folder = tmp_path_factory.mktemp("values") / "data"
    random = np.random.default_rng(0)
    with ShardWriter(folder, max_count=70) as writer:
        for number in range(SAMPLES):
            shape = (10 + number % 7, 12) if number % 10 == 0 else (10 + number % 7, 12, 3)
            pixels = random.integers(number % 50, 256 - number % 20, shape, dtype=np.uint8)
            image = {"jpg": encoded(pixels, "JPEG")} if number % 3 else {"png": encoded(pixels, "PNG")}
            embedding = (1e6 + random.normal(size=5)).astype(np.float64)
            writer.write({"__key__": f"{number:04d}", **image, "emb.npy": embedding, "cls": number % 4, "txt": "text"})
    return folder


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "data"))


def pixels_of(folder: Path, field: str) -> NDArray[np.uint8]:
    """All pixels of a field, (N, 3), as a loader gives them."""
    with StreamLoader(folder, 1, fields=(f"{field}?",), collate_fn=lambda samples: samples[0][0]) as loader:
        return np.concatenate([image.reshape(-1, 3) for image in loader if image is not None])


def test_it_agrees_with_numpy_and_normalize_reads_it(copy: Path) -> None:
    status, out, _ = run(streamload.app, "stats", copy, "--pixels", "--field", "emb.npy", "--field", "cls", "--json")
    assert status == 0
    found = json.loads(out)
    assert found == json.loads((copy / "statistics.json").read_text())
    of_field = {name: pixels_of(copy, name) for name in ("jpg", "png")}
    for name, pixels in of_field.items():
        field = found["values"][name]
        assert (field["samples"], field["type"]) == (found["fields"][name]["samples"], "uint8")
        for channel in range(3):
            figures, values = field["channels"][channel], pixels[:, channel].astype(np.float64)
            assert (figures["count"], figures["min"], figures["max"]) == (len(values), values.min(), values.max())
            np.testing.assert_allclose((figures["mean"], figures["std"]), (values.mean(), values.std()), rtol=1e-12)
            counts = np.bincount(pixels[:, channel])[int(figures["histogram"]["first"]) :]
            assert figures["histogram"]["counts"] == counts.tolist()
    embedding = found["values"]["emb.npy"]["channels"][0]
    with StreamLoader(copy, SAMPLES, fields=("emb.npy",)) as loader:
        ((values,),) = loader
    np.testing.assert_allclose((embedding["mean"], embedding["std"]), (values.mean(), values.numpy().std()), rtol=1e-9)
    assert found["values"]["cls"]["channels"][0]["histogram"]["counts"] == [75] * 4

    every = np.concatenate(list(of_field.values())) / 255
    np.testing.assert_allclose(images.Normalize.of(copy).mean, every.mean(0), rtol=1e-9)
    np.testing.assert_allclose(images.Normalize.of(copy).std, every.std(0), rtol=1e-9)
    np.testing.assert_allclose(images.Normalize.of(copy, "png").mean, of_field["png"].mean(0) / 255, rtol=1e-9)
    assert images.Normalize.of(str(copy / "statistics.json")) == images.Normalize.of(copy)
    with Image.open(copy / "statistics.png") as picture:
        assert picture.size[0] == 960


KILLED = """
import os, signal, sys
from streamload_tools import values
from streamload_tools.main import main

class Files(values.ResultFiles):
    kept = 0

    def keep(self, *arguments):
        super().keep(*arguments)
        self.kept += 1
        if self.kept == 2:
            os.kill(os.getpid(), signal.SIGKILL)

values.SAVED_EVERY_S = 0.0
values.ResultFiles = Files
sys.argv = ["streamload", "stats", *sys.argv[1:]]
main()
"""


def test_a_killed_run_goes_on_to_the_same_bytes(
    preloaded: Preloaded, dataset: Path, copy: Path, tmp_path: Path
) -> None:
    expected = tmp_path / "expected.json"
    assert run(streamload.app, "stats", dataset, "--pixels", "--output", expected, "--workers", 1)[0] == 0
    assert preloaded.run(KILLED, copy, "--pixels").status == -9
    assert not (copy / "statistics.json").exists()
    other = shutil.copytree(copy, tmp_path / "other")
    status, _, said = run(streamload.app, "stats", copy, "--pixels", "--workers", 2)
    assert status == 0
    assert "going on behind 128 samples" in said
    assert (copy / "statistics.json").read_bytes() == expected.read_bytes()
    assert sorted(path.name for path in copy.glob("*") if path.suffix != ".tar") == [
        ".streamload",
        "statistics.json",
        "statistics.png",
    ]
    status, out, said = run(streamload.app, "stats", other, "--pixels", "--where", "label == 1", "--json")
    assert (status, "going on" in said) == (0, False), "what was found of other samples is no use"
    found = json.loads(out)["values"]
    assert found["jpg"]["samples"] + found["png"]["samples"] == SAMPLES // 4


@pytest.mark.exhaustive
def test_its_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 64, 64, 3), dtype=np.uint8)
    pictures = [encoded(each, "PNG") for each in pixels]
    peaks = []
    for samples in (500, 10_000):
        with ShardWriter(tmp_path / str(samples), max_count=500) as writer:
            for number in range(samples):
                writer.write({"__key__": f"{number:05d}", "png": pictures[number % len(pictures)]})
        with TreeMemory() as memory:
            assert run(streamload.app, "stats", tmp_path / str(samples), "--pixels", "--workers", 2)[0] == 0
        peaks.append(memory.peak_bytes)
    assert peaks[1] < peaks[0] + 30_000_000, "the data have 120 MB more"


def test_in_a_bucket(rclone_s3: S3Server, dataset: Path, tmp_path: Path) -> None:
    bucket = new_place(rclone_s3, tmp_path)
    shutil.copytree(dataset, bucket.folder, dirs_exist_ok=True)
    status, out, _ = run(streamload.app, "stats", bucket.url, "--pixels", *bucket.options)
    assert status == 0
    assert f"saved in {bucket.url}/statistics.json and {bucket.url}/statistics.png" in out
    found = images.Normalize.of(bucket.url, storage_options=bucket.storage_options)
    assert found == images.Normalize.of(bucket.folder)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--field", "npz"], 2, "no sample has a field 'npz'; there are "),
        (["--field", "txt"], 1, "no real numbers"),
        (["--pixels", "--output", "found.txt"], 2, "must end in .json"),
        (["--output", "found.json"], 2, "give one of these too"),
        (["--pixels", "--output", "/proc/found.json"], 1, "/proc/found"),
    ],
)
def test_what_cannot_be_says_so_in_a_line(dataset: Path, arguments: list[str], status: int, said: str) -> None:
    found, _, err = run(streamload.app, "stats", dataset, *arguments)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (found, len(errors)) == (status, 1)
    assert said in errors[0]
    assert not list(dataset.glob("*statistics*"))


def test_a_dataset_without_images(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "data") as writer:
        writer.write({"__key__": "0", "cls": 1})
    status, _, err = run(streamload.app, "stats", tmp_path / "data", "--pixels")
    assert status == 2
    assert err.endswith("\nerror: no field holds images; there are cls: name those with numbers by --field\n")


def test_normalize_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFoundError, match=r"`streamload stats .* --pixels` makes it"):
        images.Normalize.of(tmp_path)
    (tmp_path / "statistics.json").write_text("{}")
    with pytest.raises(ValueError, match="is not what `streamload stats --pixels` saves"):
        images.Normalize.of(tmp_path)
    values: dict[str, Any] = {"cls": {"type": "int64", "channels": [{"count": 1}]}}
    (tmp_path / "statistics.json").write_text(json.dumps({"values": values}))
    with pytest.raises(ValueError, match=r"has no images, but cls"):
        images.Normalize.of(tmp_path)
