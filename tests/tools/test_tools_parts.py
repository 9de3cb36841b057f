"""The pure parts below the commands: sizes, splits, keys, checks, progress."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_folders import FORMATS, image_bytes

from streamload.pack.source_to_shards import parse_split, permutation, split_by_class
from streamload.pack.sources.loading import check_image_file


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
    assert sorted(permutation(50, 3).tolist()) == list(range(50))
    # Written down so that another version of NumPy cannot change what a seed means.
    assert permutation(8, 0).tolist() == ORDER_OF_8
    assert split_by_class([0, 0, 0, 0, 1, 1, 1, 1], {"a": 0.5, "b": 0.5}, 0) == SPLIT_OF_8


ORDER_OF_8 = [1, 6, 0, 3, 2, 7, 4, 5]
SPLIT_OF_8 = {"a": [0, 1, 4, 7], "b": [2, 3, 5, 6]}


@pytest.mark.parametrize("extension", FORMATS)
def test_images_that_are_cut_short_are_found(extension: str) -> None:
    data = image_bytes(1, extension)
    check_image_file(data)
    for kept in (0.05, 0.5, 0.98) if extension in (".jpg", ".png", ".webp") else ():
        with pytest.raises(ValueError, match=r"\w"):
            check_image_file(data[: int(len(data) * kept)])


def test_a_preview_in_the_header_does_not_stand_for_the_end_of_a_jpeg() -> None:
    data, preview = image_bytes(1), image_bytes(2)
    segment = b"\xff\xe1" + (len(preview) + 2).to_bytes(2, "big") + preview
    frame = data.index(b"\xff\xc0") + 11
    for start, sampling in ((2, b"\x22"), (data.index(b"\xff\xda"), b"\x22"), (2, b"\x44")):  # 0x44: Pillow reads it
        with_preview = data[:frame] + sampling + data[frame + 1 :]
        with_preview = with_preview[:start] + segment + with_preview[start:]
        check_image_file(with_preview)
        check_image_file(with_preview + b"appended by the camera")
        for end in range(start + len(segment) + 1, len(with_preview)):
            with pytest.raises(ValueError, match=r"\w"):
                check_image_file(with_preview[:end])


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"BM" + b"text", b"\xff\xd8\xff\xd9", b"<html>", b"RIFF1234WEBP", b"II*\0"]
)
def test_other_content_is_no_image(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        check_image_file(data)
