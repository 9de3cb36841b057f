"""`streamload stats` as a user runs it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_folders import run
from remote_places import new_place
from servers.rclone import S3Server
from streamload_tools import main as streamload
from streamload_tools.stats import Tally, least_budget_bytes

from streamload import ShardWriter
from streamload.fetch.budget import check_budget
from streamload.index.dataset_index import DatasetIndex

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


def stats_of(*arguments: object) -> dict[str, Any]:
    status, out, _ = run(streamload.app, "stats", "--json", *arguments)
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_stats_counts_what_is_there(dataset: Path) -> None:
    found = stats_of(dataset, "--ranks", 4)
    assert (found["shards"], found["samples"]) == (3, 53)
    assert found["bytes"] == sum(path.stat().st_size for path in dataset.glob("*.tar"))
    assert found["samples_per_shard"] == {"min": 3, "median": 25.0, "max": 25}
    sizes = range(1, 54, 2)
    assert found["fields"]["txt"] == {
        "samples": 27,
        "bytes": sum(sizes),
        "mean_bytes": sum(sizes) / 27,
        "min_bytes": 1,
        "max_bytes": 53,
    }
    assert found["fields"]["npy"]["samples"] == found["fields"]["cls"]["samples"] == 53
    assert found["labels"]["imbalance"] == 30.0
    assert {item["label"]: item["samples"] for item in found["labels"]["counts"]} == {0: 30} | dict.fromkeys(
        range(1, 24), 1
    )
    assert (found["samples_per_rank"], found["samples_per_rank_unpadded_min"]) == (14, 13)


def test_stats_are_the_same_without_an_index_and_from_a_bucket(
    dataset: Path, tmp_path: Path, rclone_s3: S3Server
) -> None:
    bucket = new_place(rclone_s3, tmp_path)
    for path in dataset.glob("*.tar"):
        shutil.copy(path, bucket.folder)
    with_index = stats_of(dataset)
    assert stats_of(bucket.folder) == stats_of(bucket.url, *bucket.options) == with_index
    shutil.copytree(dataset / ".streamload", bucket.folder / ".streamload")
    assert stats_of(bucket.url, *bucket.options) == with_index


def test_stats_name_the_most_frequent_labels_and_what_to_do(dataset: Path) -> None:
    status, out, _ = run(streamload.app, "stats", dataset, "--ranks", 4)
    lines = out.splitlines()
    assert status == 0
    assert "0           30  56.60%" in lines
    assert "and 4 more labels with 4 samples, the rarest with 1" in lines
    assert sum(line.endswith("1.89%") for line in lines) == 19
    assert any("30.0 times as frequent" in line and "balanced" in line for line in lines)
    assert "each of 4 ranks gets 14 samples an epoch (13 or 14 with pad=False)" in lines


def test_stats_of_labels_that_are_no_numbers_say_so(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "data", max_count=2) as writer:
        for number, label in enumerate((b"1", b"1", b"cat", b"2")):
            writer.write({"__key__": f"{number}", "cls": label})
    found = stats_of(tmp_path / "data")
    assert found["labels"]["counts"] == [{"label": 1, "samples": 2}]
    assert found["labels"]["samples_of_shards_without_labels"] == 2
    assert "not counted: 2 samples of shards" in run(streamload.app, "stats", tmp_path / "data")[1]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("window", [1, 20, 10_000])
def test_the_budget_is_the_least_that_a_loader_takes(dataset: Path, window: int, ranks: int) -> None:
    tally = Tally()
    index = DatasetIndex.load(str(dataset / ".streamload"))
    for entry in index.shards:
        tally.add(entry.bytes, index.table(entry.name))
    figures = tally.figures()
    needed = least_budget_bytes(figures, window=window, ranks=ranks)
    order: dict[str, int] = {
        "window": window,
        "batch_size": 1,
        "samples": figures.samples,
        "data_bytes": figures.bytes,
        "lanes_read": 1,
        "lanes": ranks,
        "shards": figures.shards,
    }
    check_budget(needed, **order)
    with pytest.raises(ValueError, match="too small"):
        check_budget(int(needed / 1.06), **order)


def test_a_compressed_dataset_has_no_budget_beforehand(dataset: Path, tmp_path: Path) -> None:
    for path in dataset.glob("*.tar"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert stats_of(tmp_path)["memory_budget_bytes"] is None
    assert "not known beforehand" in run(streamload.app, "stats", tmp_path)[1]
    status, _, err = run(streamload.app, "stats", tmp_path, "--batch-size", 8)
    assert status == 1
    assert err.count("error:") == 1
    assert "compressed" in err


def test_the_memory_of_decoded_samples_is_measured_on_some_of_them(tmp_path: Path) -> None:
    """Sizes that grow with the number: those that are tried must be spread over the dataset."""
    folder = tmp_path / "data"
    with ShardWriter(folder, max_count=90) as writer:
        for number in range(200):
            text = {"txt": "x" * 30} if number % 2 else {}
            image = np.zeros((4, number + 1, 3), np.uint8)
            writer.write({"__key__": f"{number:03d}", "png": image, "cls": number, "json": {"a": [1, 2.5]}, **text})
    found = stats_of(folder, "--batch-size", 64)["decoded"]
    assert found["samples_tried"] == 64
    assert found["fields"]["png"] == pytest.approx(12 * 100.5, rel=0.01)
    assert (found["fields"]["cls"], found["fields"]["json"], found["not_decoded"]) == (8, 16, {})
    assert found["fields"]["txt"] == pytest.approx(15, rel=0.2)
    sample = sum(found["fields"].values())
    assert (found["batch_bytes"], found["epoch_bytes"]) == pytest.approx((64 * sample, 200 * sample))
    assert (found["window_samples"], found["window_bytes"]) == (200, pytest.approx(200 * sample))
    fields = stats_of(folder)["fields"].values()
    assert found["window_stored_bytes"] == pytest.approx(sum(field["bytes"] for field in fields))
    assert found["free_bytes"] > 1 << 20
    status, out, _ = run(streamload.app, "stats", folder, "--batch-size", 64)
    assert status == 0
    assert "decoded, a sample takes 1.2 KB (" in out
    assert "a batch of 64 takes 79." in out
    assert "decoded, which fits into the" in out
    assert "decoded" not in stats_of(folder)


def test_what_cannot_be_decoded_counts_as_stored_and_is_named(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "data") as writer:
        writer.write({"__key__": "0", "depth.png": b"no image", "cls": 1})
    found = stats_of(tmp_path / "data", "--batch-size", 2)["decoded"]
    assert found["fields"] == {"depth.png": 8, "cls": 8}
    assert list(found["not_decoded"]) == ["depth.png"]
    _, out, _ = run(streamload.app, "stats", tmp_path / "data", "--batch-size", 2)
    assert "depth.png counts as stored, for it needs a decoder of yours: ValueError: not an image" in out


def test_what_is_damaged_is_one_message(dataset: Path, tmp_path: Path) -> None:
    shard = tmp_path / "cut.tar"
    shard.write_bytes(next(dataset.glob("*.tar")).read_bytes()[:-700])
    status, out, err = run(streamload.app, "stats", shard)
    assert (status, out) == (1, "")
    assert err.count("error:") == 1
