"""The names of the classes: read from beside the shards, wherever these lie."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from make_shards import write_numbers
from servers.faults import FaultServer

from streamload import Mixture, Portion, StreamLoader, TarDataset
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
    name_classes(source, "bee", "cat")
    with FaultServer(source) as server:
        urls = [f"{server.url}/{path.name}" for path in sorted(source.glob("*.tar"))]
        with StreamLoader(urls, num_workers=0) as loader:
            assert loader.classes == ["bee", "cat"]


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
        with pytest.raises(DatasetIndexError, match="the form that shardify writes"):
            assert loader.classes


def test_labels_that_mean_different_classes_are_not_mixed(source: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "more", [3])
    name_classes(source, "cat", "dog")
    name_classes(tmp_path / "more", "car", "dog")
    unlike = [str(source), str(tmp_path / "more")]
    says = "different classes: 0 is 'car' here, but is 'cat' in .*data/classes.json.*--classes.*more/classes"
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
