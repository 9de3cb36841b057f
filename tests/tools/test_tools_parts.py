"""The pure parts below the commands: sizes, splits, keys, checks, progress."""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_folders import FORMATS, image_bytes, image_folder
from PIL import Image

from streamload.pack.planning import order_of, parse_split, split_by_class
from streamload.pack.sources.image_folders import find_images
from streamload.pack.sources.loading import fault_of_image
from streamload.pack.sources.source import SourceError


def test_splits_are_read() -> None:
    assert parse_split("train=0.9, val=0.1") == {"train": 0.9, "val": 0.1}
    assert parse_split("a=0.1,b=0.2,c=0.7,d=0") == {"a": 0.1, "b": 0.2, "c": 0.7, "d": 0.0}


@pytest.mark.parametrize(
    "text", ["", "train", "train=x", "train=0.5", "a=0.5,a=0.5", "a=1.5,b=-0.5", "../a=1", "a/b=1", ".a=1", "a=nan"]
)
def test_other_splits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"fraction|FRACTION|twice"):
        parse_split(text)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=80),
    st.lists(st.integers(0, 10), min_size=1, max_size=4).filter(sum),
    st.integers(0, 2**64 - 1),
)
def test_a_split_takes_every_class_in_its_share(labels: list[int], weights: list[int], seed: int) -> None:
    fractions = {f"s{number}": weight / sum(weights) for number, weight in enumerate(weights)}
    chosen = split_by_class(labels, fractions, seed)
    assert sorted(position for positions in chosen.values() for position in positions) == list(range(len(labels)))
    assert chosen == split_by_class(labels, fractions, seed)
    wanted = [name for name, fraction in fractions.items() if fraction > 0]
    counts = {name: Counter(labels[position] for position in positions) for name, positions in chosen.items()}
    for label, count in Counter(labels).items():
        for name, fraction in fractions.items():
            assert abs(counts[name][label] - count * fraction) < len(weights)
            assert fraction > 0 or counts[name][label] == 0
        if count >= len(wanted):
            assert all(counts[name][label] for name in wanted)


def test_splits_and_orders_depend_on_the_seed_and_stay_the_same() -> None:
    assert split_by_class([0] * 8, {"a": 0.5, "b": 0.5}, 0) != split_by_class([0] * 8, {"a": 0.5, "b": 0.5}, 1)
    assert sorted(order_of(50, 3).tolist()) == list(range(50))
    # Written down so that another version of NumPy cannot change what a seed means.
    assert order_of(8, 0).tolist() == ORDER_OF_8
    assert split_by_class([0, 0, 0, 0, 1, 1, 1, 1], {"a": 0.5, "b": 0.5}, 0) == SPLIT_OF_8


ORDER_OF_8 = [1, 6, 0, 3, 2, 7, 4, 5]
SPLIT_OF_8 = {"a": [0, 1, 4, 7], "b": [2, 3, 5, 6]}


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    image_folder(tmp_path, "b/1.JPG", "B/2.PNG", "a/deep/er/3.jpeg", "a/0.webp", "a.b/x.y.tif", "b/4.jfif", "b/5.jpe")
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    found = find_images(str(tmp_path), follow_links=True)
    # What torchvision's ImageFolder(allow_empty=True) calls classes and samples.
    assert found.classes == ("B", "a", "a.b", "b", "empty", "linked")
    assert [(os.path.relpath(s.members[0].path, tmp_path), s.label, s.members[0].field) for s in found.samples] == [
        ("B/2.PNG", 0, "png"),
        ("a/0.webp", 1, "webp"),
        ("a/deep/er/3.jpeg", 1, "jpg"),
        ("a.b/x.y.tif", 2, "tif"),
        ("b/1.JPG", 3, "jpg"),
        ("b/4.jfif", 3, "jpg"),
        ("b/5.jpe", 3, "jpg"),
        ("linked/0.webp", 5, "webp"),
        ("linked/deep/er/3.jpeg", 5, "jpg"),
    ]


def test_keys_are_safe_and_unlike_each_other(tmp_path: Path) -> None:
    names = ["c/a.jpg", "c/a.png", "c/a-2.jpg", "c/v1.2.jpg", "c/v1_2.jpg", "c/__x.jpg", "c.d/e.f/g.jpg", "c/n\n.jpg"]
    image_folder(tmp_path, *names)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/c/\xff.jpg")).write_bytes(image_bytes(9))
    keys = {os.path.relpath(s.members[0].path, tmp_path): s.key for s in find_images(str(tmp_path)).samples}
    assert keys == {
        "c/a-2.jpg": "c/a-2",
        "c/a.jpg": "c/a",
        "c/a.png": "c/a-3",
        "c/v1.2.jpg": "c/v1_2",
        "c/v1_2.jpg": "c/v1_2-2",
        "c/__x.jpg": "c/x__x",
        "c.d/e.f/g.jpg": "c.d/e.f/g",
        "c/n\n.jpg": "c/n_",
        "c/\udcff.jpg": "c/_",
    }


def test_hidden_names_and_strays_are_counted_and_named(tmp_path: Path) -> None:
    image_folder(tmp_path, "a/0.jpg", "a/.hidden.jpg", ".cache/1.jpg", "a/.git/2.jpg")
    (tmp_path / "README").write_text("x")
    (tmp_path / "b").mkdir()
    assert find_images(str(tmp_path)).notes == (
        "skipped 3 hidden names, and 1 file outside of the class folders",
        "1 class folder is empty and keeps its number: 'b'",
    )


def test_links_to_folders_are_followed_on_request_and_circles_named(tmp_path: Path) -> None:
    image_folder(tmp_path, "a/0.jpg", "a/1.jpg", "elsewhere/2.jpg")
    source = tmp_path / "source"
    (source / "a" / "deep").mkdir(parents=True)
    (source / "a" / "0.jpg").symlink_to(tmp_path / "a" / "0.jpg")
    (source / "a" / "deep" / "up").symlink_to(source)
    (source / "a" / "more").symlink_to(tmp_path / "elsewhere")
    (source / "b").symlink_to(tmp_path / "elsewhere")

    def keys(**options: bool) -> list[str]:
        return [sample.key for sample in find_images(str(source), **options).samples]

    assert keys() == ["a/0"]
    assert keys(follow_links=True) == ["a/0", "a/more/2", "b/2"]
    links = [str(source / name) for name in ("b", "a/more", "a/deep/up")]
    assert find_images(str(source)).notes == (
        f"skipped 3 links to folders: {', '.join(map(repr, links))}; --follow-symlinks follows them",
    )
    followed = find_images(str(source), follow_links=True)
    assert followed.notes == (f"skipped links that lead back to a folder above them: '{source}/a/deep/up'",)
    (source / "a" / "0.jpg").unlink()
    (tmp_path / "only_links").mkdir()
    (tmp_path / "only_links" / "a").symlink_to(tmp_path / "a")
    with pytest.raises(SourceError, match="add --follow-symlinks"):
        find_images(str(tmp_path / "only_links"))


@pytest.mark.parametrize("extension", FORMATS)
def test_whole_images_have_no_fault(extension: str) -> None:
    assert fault_of_image(image_bytes(1, extension)) is None


@pytest.mark.parametrize("extension", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.98])
def test_images_that_are_cut_short_are_found(extension: str, kept: float) -> None:
    data = image_bytes(1, extension)
    assert fault_of_image(data[: max(1, int(len(data) * kept))]) is not None


def test_a_preview_in_the_header_does_not_stand_for_the_end_of_a_jpeg() -> None:
    data, preview = image_bytes(1), image_bytes(2)
    segment = b"\xff\xe1" + (len(preview) + 2).to_bytes(2, "big") + preview
    with_preview = data[:2] + segment + data[2:]
    assert fault_of_image(with_preview) is None
    assert fault_of_image(with_preview + b"appended by the camera") is None
    assert fault_of_image(with_preview[:-2]) == "the JPEG is cut short: its end-of-image marker is missing"


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"BM" + b"text", b"\xff\xd8\xff\xd9", b"<html>", b"RIFF1234WEBP", b"II*\0"]
)
def test_other_content_is_no_image(data: bytes) -> None:
    assert fault_of_image(data) is not None


def test_the_content_decides_and_not_the_kind_that_was_expected() -> None:
    buffer = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(buffer, "JPEG", progressive=True)
    assert fault_of_image(buffer.getvalue()) is None
