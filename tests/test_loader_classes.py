"""The names of the classes: read from beside the shards, wherever these lie."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from servers.rclone import S3Server

from streamload import Mixture, Portion, ShardWriter, StreamLoader, TarDataset
from streamload.errors import DatasetIndexError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_numbers(folder, [5, 5])
    return folder


def name_classes(folder: Path, *names: str) -> None:
    numbers = {name: number for number, name in enumerate(names)}
    (folder / "classes.json").write_text(json.dumps({"classes": names, "class_to_idx": numbers}))


def test_the_names_are_those_beside_the_shards(source: Path) -> None:
    with StreamLoader(source, num_workers=0) as loader, TarDataset(source) as dataset:
        assert loader.classes is dataset.classes is None
    name_classes(source, "bee", "cat")
    with StreamLoader(f"{source}/*.tar", num_workers=0) as loader, TarDataset(source) as dataset:
        assert loader.classes == dataset.classes == ["bee", "cat"]
        name_classes(source, "other")
        assert loader.classes == ["bee", "cat"]
        assert pickle.loads(pickle.dumps(dataset)).classes == ["bee", "cat"]


def test_folders_that_agree_are_one_and_others_are_refused(source: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "more", [3])
    name_classes(source, "bee", "cat")
    name_classes(tmp_path / "more", "bee", "cat")
    with StreamLoader([source, tmp_path / "more"], num_workers=0) as loader:
        assert loader.classes == ["bee", "cat"]
    name_classes(tmp_path / "more", "cat", "bee")
    with StreamLoader([source, tmp_path / "more"], num_workers=0) as loader:
        with pytest.raises(DatasetIndexError, match="more/classes.json"):
            assert loader.classes


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"classes": "bee"}', '{"classes": [1]}'])
def test_a_file_that_is_something_else_is_an_error(source: Path, content: str) -> None:
    (source / "classes.json").write_text(content)
    with StreamLoader(source, num_workers=0) as loader:
        with pytest.raises(DatasetIndexError, match="as shardify writes it"):
            assert loader.classes


# -- weights by name -----------------------------------------------------------------------------------------------

BY_NAME = {"bee": 12.0, "cat": 1.0}
DRAWN: dict[str, Any] = {"batch_size": 4, "shuffle": True, "fields": ("cls",), "epoch_size": 40}


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bees and eight cats."""
    folder = tmp_path_factory.mktemp("animals") / "data"
    with ShardWriter(folder, max_count=5) as writer:
        for number in range(10):
            writer.write({"__key__": str(number), "cls": int(number > 1)})
    name_classes(folder, "bee", "cat")
    return folder


def drawn(source: Any, weights: Any, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """The labels of an epoch, and the state behind its first batch."""
    with StreamLoader(source, **DRAWN, weights=weights, **options) as loader:
        batches = iter(loader)
        labels = next(batches)[0].tolist()
        state = loader.state_dict()
        return labels + [label for (batch,) in batches for label in batch.tolist()], state


def test_weights_by_name_are_those_of_the_labels(animals: Path, tmp_path: Path, rclone_s3: S3Server) -> None:
    by_name, by_label = (drawn(animals, each, num_workers=0) for each in (BY_NAME, {0: 12.0, 1: 1.0}))
    assert by_name == by_label  # and so is the state: one may resume the other
    assert by_name[0].count(0) == 30
    bucket = f"w{abs(hash(str(tmp_path))) % 10**10}"
    shutil.copytree(animals, rclone_s3.folder / bucket / "data")
    there = drawn(f"s3://{bucket}/data", BY_NAME, num_workers=1, storage_options=rclone_s3.options)
    assert there[0] == by_name[0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"bee": 1, "Catt": 1}, "the class 'Catt', which classes.json does not have; did you mean 'cat'?"),
        ({"bee": 1}, r"lacks the label 1 \(cat\); give a weight, or 0, for each of the labels 0 \(bee\), 1 \(cat\)"),
        ({"bee": 1, "cat": "x"}, "weights has 'x' for 'cat'; it must be a number"),
    ],
)
def test_weights_of_other_classes_are_refused(animals: Path, weights: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        StreamLoader(animals, **DRAWN, weights=weights, num_workers=0)


def test_labels_that_mean_different_classes_are_not_mixed(source: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "more", [3])
    name_classes(source, "cat", "dog")
    name_classes(tmp_path / "more", "car", "dog")
    unlike = [str(source), str(tmp_path / "more")]
    says = "different classes: 0 is 'car' here, and is 'cat' in .*data/classes.json.*--classes.*more/classes"
    mixture = Mixture({"data": (unlike[0], 1), "more": (unlike[1], 1)})
    for urls in (unlike, mixture):
        with (
            StreamLoader(urls, 4, fields=("npy", "cls"), num_workers=0) as loader,
            pytest.raises(DatasetIndexError, match=says),
        ):
            next(iter(loader))
    with pytest.raises(DatasetIndexError, match=says):
        TarDataset(unlike)
    # Labels that are not read, or have another meaning, are no matter.
    own = Mixture({"data": (unlike[0], 1), "more": Portion(unlike[1], 1, transform=lambda sample: sample)})
    for urls, fields in ((unlike, ("npy",)), (own, ("npy", "cls"))):
        with StreamLoader(urls, 4, fields=fields, num_workers=0) as loader:
            assert len(list(loader)) == 4
    (Path(unlike[1]) / "classes.json").unlink()
    with StreamLoader(unlike, 4, num_workers=0) as loader:
        assert len(list(loader)) == 4
