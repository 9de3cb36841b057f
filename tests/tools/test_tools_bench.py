"""`streamload bench` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from image_folders import image_bytes, images, pack, run

from streamload import ShardWriter
from streamload.cli import main as streamload


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "data"
    with ShardWriter(folder, max_count=20) as writer:
        for number in range(50):
            text = {"txt": "now and then"} if number % 3 == 0 else {}
            writer.write({"__key__": f"{number:03d}", "npy": np.zeros(100, np.uint8), "cls": number % 2, **text})
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    assert pack(images(folder), folder / "data", "--max-count", 5)[0] == 0
    return folder / "data"


def bench(*arguments: object) -> list[str]:
    status, out, err = run(streamload.app, "bench", *arguments, "--workers", 0)
    assert status == 0, err
    return out.splitlines()


def test_bench_counts_batches_after_the_first(arrays: Path) -> None:
    lines = bench(arrays, "--batch-size", 10, "--batches", 5)  # as many as a pass has
    assert lines[0] == "batch_size=10, 0 workers, fields npy, cls"
    assert re.fullmatch(r"first batch after \d+\.\d\d s", lines[1])
    rates = r"[\d,]+ samples/s, [\d.]+ [KMG]?B/s as stored, measured"
    assert re.fullmatch(rf"{rates} after the first batch, over 50 samples in 5 batches and [\d.]+ s", lines[2])
    assert lines[3].startswith("limited by ")
    found = json.loads("".join(bench(arrays, "--batch-size", 10, "--batches", 2, "--json")))
    assert (found["samples"], found["batches"], found["loader"]) == (20, 2, lines[0])
    assert isinstance(found["samples"], int)
    for name in ("samples", "payload_bytes"):
        assert found["statistics"][name] == found[name]
        assert found[f"{name}_per_s"] == pytest.approx(found[name] / found["seconds"])


def test_bench_ends_after_some_seconds_and_reads_the_chosen_fields(arrays: Path) -> None:
    lines = bench(arrays, "--batch-size", 10, "--seconds", 0, "--fields", "cls", "--shuffle")
    assert lines[0].endswith("fields cls")
    assert "over 10 samples in 1 batch and" in lines[2]


def test_bench_resizes_images_to_one_size_or_leaves_their_bytes(photos: Path) -> None:
    cropped = bench(photos, "--batch-size", 4, "--batches", 2)
    assert cropped[0].endswith("fields jpg;png, cls, RandomResizedCrop(224)")
    raw = bench(photos, "--batch-size", 4, "--batches", 2, "--no-decode")
    assert raw[0].endswith("fields jpg;png, cls, not decoded")


def test_masks_are_not_another_form_of_the_image(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "masks") as writer:
        for number in range(4):
            image = image_bytes(number, ".png")
            writer.write({"__key__": f"{number}", "png": image, "mask.png": image, "cls": number})
    setup = bench(tmp_path / "masks", "--batch-size", 2, "--batches", 1)[0]
    assert setup.endswith("fields png, cls, RandomResizedCrop(224)")


def test_what_cannot_be_measured_is_one_message(arrays: Path, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "ragged") as writer:
        for number in range(4):
            writer.write({"__key__": f"{number}", "npy": np.zeros(number)})
    with ShardWriter(tmp_path / "mixed") as writer:
        for number in range(2):
            writer.write({"__key__": f"{number}", ("txt", "cls")[number]: b"1"})
    for arguments, said in (
        ((tmp_path / "ragged",), "--no-decode"),
        ((tmp_path / "mixed",), "no field in common"),
        ((arrays, "--fields", "jpg"), "no sample has 'jpg'"),
        ((tmp_path / "nowhere",), "no such"),
    ):
        status, _, err = run(streamload.app, "bench", *arguments, "--workers", 0)
        assert status in (1, 2)
        assert err.count("error:") == 1
        assert said in err
