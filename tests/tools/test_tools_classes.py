"""Datasets that are packed apart, or as splits of one folder, and their labels: one class has one number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from image_folders import files_below, image_folder, pack, packed_samples


def labels_in(folder: Path) -> dict[str, int]:
    return {key: int(fields["cls"]) for key, fields in packed_samples(folder).items()}


def classes_in(folder: Path) -> list[str]:
    found: list[str] = json.loads((folder / "classes.json").read_bytes())["classes"]
    return found


def test_validation_packed_apart_takes_the_numbers_of_the_training_data(tmp_path: Path) -> None:
    train = image_folder(tmp_path / "train", "bee/1.jpg", "cat/1.jpg", "dog/1.jpg")
    val = image_folder(tmp_path / "val", "cat/2.jpg", "dog/2.jpg")
    assert pack(train, tmp_path / "shards", "--workers", 1)[0] == 0
    known = ("--classes", tmp_path / "shards" / "classes.json", "--workers", 1)
    status, _, err = pack(val, tmp_path / "val-shards", *known)
    assert status == 0, err
    assert labels_in(tmp_path / "val-shards") == {"cat/2": 1, "dog/2": 2}
    assert classes_in(tmp_path / "val-shards") == ["bee", "cat", "dog"]
    (tmp_path / "val.csv").write_text("path,label\nval/dog/2.jpg,dog\n")
    assert pack(tmp_path / "val.csv", tmp_path / "of-table", *known)[0] == 0
    assert list(labels_in(tmp_path / "of-table").values()) == [2]


@pytest.mark.parametrize("table", [False, True])
def test_a_class_that_has_no_number_is_named(tmp_path: Path, table: bool) -> None:
    source = image_folder(tmp_path / "val", "cat/2.jpg", "cow/2.jpg")
    (tmp_path / "classes.json").write_text(json.dumps({"classes": ["bee", "cat"]}))
    (tmp_path / "val.csv").write_text("path,label\nval/cat/2.jpg,cat\nval/cow/2.jpg,cow\n")
    where = tmp_path / "val.csv" if table else source
    status, _, err = pack(where, tmp_path / "dest", "--classes", tmp_path / "classes.json")
    assert (status, "is 'cow', which --classes does not have (2 classes)" in err) == (2, True)
    status, _, err = pack(where, tmp_path / "dest", "--classes", tmp_path / "nothing.json")
    assert (status, "does not exist" in err) == (2, True)


def test_folders_of_splits_are_packed_as_splits_with_one_numbering(tmp_path: Path) -> None:
    names = ("train/bee/1.jpg", "train/cat/1.jpg", "train/dog/1.jpg", "val/cat/2.jpg", "val/dog/2.jpg")
    source = image_folder(tmp_path / "data", *names)
    status, out, err = pack(source, tmp_path / "shards", "--workers", 1)
    assert (status, "train, val are taken as splits of one dataset" in err) == (0, True)
    assert "shards/train" in out
    assert labels_in(tmp_path / "shards" / "train") == {"bee/1": 0, "cat/1": 1, "dog/1": 2}
    assert labels_in(tmp_path / "shards" / "val") == {"cat/2": 1, "dog/2": 2}
    assert classes_in(tmp_path / "shards" / "train") == classes_in(tmp_path / "shards" / "val") == ["bee", "cat", "dog"]
    assert pack(source / "train", tmp_path / "alone", "--workers", 1)[0] == 0
    assert files_below(tmp_path / "alone") == files_below(tmp_path / "shards" / "train")
    status, _, err = pack(source, tmp_path / "again", "--split", "train=0.5,val=0.5")
    assert (status, "leave out --split" in err) == (2, True)


@pytest.mark.parametrize(
    "names",
    [
        ("train/1.jpg", "test/1.jpg"),  # vehicles and examinations
        ("train/cat/1.jpg", "test/1.jpg"),
        ("train/cat/1.jpg", "plane/fast/1.jpg"),
        ("train/cat/1.jpg", "train/dog/1.jpg"),
    ],
)
def test_classes_that_are_called_as_splits_are_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert pack(image_folder(tmp_path / "data", *names), tmp_path / "shards", "--workers", 1)[0] == 0
    assert classes_in(tmp_path / "shards") == sorted({name.split("/")[0] for name in names})
