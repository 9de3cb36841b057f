"""Joint: what belongs to one picture moves alike, by one draw, beside plain computations pixel by pixel."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from photo import rng

from streamload.images import (
    CenterCrop,
    Compose,
    Joint,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    ToTensor,
)

FILL = 65535
MEAN, STD = [0.5] * 3, [0.25] * 3


def numbered(height: int, width: int) -> NDArray[np.uint16]:
    """Each pixel has a number of its own."""
    return np.arange(height * width, dtype=np.uint16).reshape(height, width)


def moved_by_hand(operation: Any, rows: list[list[int]], generator: np.random.Generator) -> list[list[int]]:
    """What an operation does to a list of rows, one pixel after the other; the draws are those that are documented."""
    height, width = len(rows), len(rows[0])
    if isinstance(operation, RandomHorizontalFlip):
        return [row[::-1] for row in rows] if generator.random() < operation.p else rows
    size: Any = operation.size
    if isinstance(operation, Resize):
        return [
            [rows[int((y + 0.5) * height / size[0])][int((x + 0.5) * width / size[1])] for x in range(size[1])]
            for y in range(size[0])
        ]
    if isinstance(operation, CenterCrop):
        top, left = (
            round((length - wanted) / 2) if wanted <= length else -((wanted - length) // 2)
            for length, wanted in zip((height, width), size, strict=True)
        )
    else:
        pad = operation.padding
        top = int((height + 2 * pad - size[0] + 1) * generator.random()) - pad
        left = int((width + 2 * pad - size[1] + 1) * generator.random()) - pad
    return [
        [rows[y][x] if 0 <= y < height and 0 <= x < width else FILL for x in range(left, left + size[1])]
        for y in range(top, top + size[0])
    ]


@st.composite
def chains(draw: st.DrawFn, height: int, width: int) -> list[Any]:
    """Operations that suit an image; sizes are whole multiples, so that boxes stay on the edges of pixels."""
    found: list[Any] = []
    for kind in draw(st.lists(st.sampled_from(["flip", "crop", "center", "double"]), max_size=4)):
        if kind == "flip":
            found.append(RandomHorizontalFlip(draw(st.sampled_from([0.0, 0.5, 1.0]))))
            continue
        if kind == "double":
            height, width = 2 * height, 3 * width
            found.append(Resize((height, width)))
            continue
        padding = draw(st.integers(0, 3)) if kind == "crop" else 0
        most = [40, 40] if kind == "center" else [height + 2 * padding, width + 2 * padding]
        height, width = (draw(st.integers(1, min(40, each))) for each in most)
        found.append(CenterCrop((height, width)) if kind == "center" else RandomCrop((height, width), padding))
    return found


@settings(deadline=None)
@given(data=st.data(), height=st.integers(1, 12), width=st.integers(1, 12), seed=st.integers(0, 99))
def test_masks_boxes_and_points_move_as_by_hand(data: Any, height: int, width: int, seed: int) -> None:
    """Boxes and points must be where their pixels, moved by hand, are."""
    operations = data.draw(chains(height, width))
    edges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (width, height) * 3]
    boxes = [[x[0], y[0], x[1], y[1], 7 + number] for number, (x, y) in enumerate(zip(edges[::2], edges[1::2]))]
    points = [[x + 0.5, y + 0.5, y * width + x] for y in range(height) for x in range(width)]
    joint = Joint(operations, ("mask", "boxes", None, "points"), mask_fill=FILL)
    mask, moved, untouched, kept = joint((numbered(height, width), boxes, "text", [points]), rng(seed))
    generator, rows = rng(seed), numbered(height, width).tolist()
    for operation in operations:
        rows = moved_by_hand(operation, rows, generator)
    assert mask.tolist() == rows
    assert mask.dtype == np.uint16
    assert untouched == "text"

    expected = []
    for left, top, right, bottom, label in boxes:
        inside = {y * width + x for y in range(top, bottom) for x in range(left, right)}
        at = [(y, x) for y, row in enumerate(rows) for x, number in enumerate(row) if number in inside]
        if at:
            ys, xs = zip(*at, strict=True)
            expected.append([min(xs), min(ys), max(xs) + 1, max(ys) + 1, label])
    assert moved.dtype == np.float32
    assert moved.shape == (len(expected), 5)
    assert moved.tolist() == expected

    assert kept.shape == (1, len(points), 3)
    assert kept[0, :, 2].tolist() == list(range(len(points)))
    for x, y, number in kept[0].tolist():
        if 0 <= x < len(rows[0]) and 0 <= y < len(rows):
            assert rows[int(y)][int(x)] in (number, FILL)  # an earlier crop may have removed the pixel, never the point


def test_points_move_as_those_of_torchvision() -> None:
    from torchvision_ops import tv_tensors, v2

    points = rng(3).uniform(-5, 40, (2, 17, 2)).astype(np.float32)
    theirs: Any = tv_tensors.KeyPoints(points - np.float32(0.5), canvas_size=(30, 44))  # of the centres of pixels
    theirs = v2.functional.center_crop(v2.functional.horizontal_flip(theirs), [20, 24])
    theirs = v2.functional.resize(tv_tensors.KeyPoints(theirs + 0.5, canvas_size=(20, 24)), [50, 36])
    operations = [RandomHorizontalFlip(1.0), CenterCrop((20, 24)), Resize((50, 36))]
    _, ours = Joint(operations, ("mask", "points"))((numbered(30, 44), points), rng())
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_an_operation_of_the_users_with_a_window_moves_all_fields() -> None:
    class Mirror:
        interpolation = "nearest"
        window = staticmethod(RandomHorizontalFlip(1.0).window)

        def __call__(self, image: Any, rng: Any) -> Any:
            raise AssertionError("it would move the image alone")

    image, mask = np.arange(12, dtype=np.uint8).reshape(2, 2, 3), np.array([[1, 2], [3, 4]], np.uint8)
    got, cut = Joint([Mirror()], ("image", "mask"))((image, mask), rng())
    assert (got == image[:, ::-1]).all()
    assert cut.tolist() == [[2, 1], [4, 3]]


def test_images_are_resampled_as_the_operation_says_and_masks_are_not() -> None:
    image = rng(1).integers(0, 256, (31, 47, 3), np.uint8)
    mask = np.where(image[:, :, 0] > 100, 255, 0).astype(np.uint8)
    resize = Resize((20, 22))
    got, cut, with_axis = Joint([resize], ("image", "mask", "mask"))((image, mask, mask[:, :, None]), rng())
    np.testing.assert_array_equal(got, resize(image))
    np.testing.assert_array_equal(cut, Resize((20, 22), interpolation="nearest")(mask))
    np.testing.assert_array_equal(with_axis, cut[:, :, None])
    assert set(np.unique(cut)) <= {0, 255}
    assert len(np.unique(resize(mask))) > 2


def test_boxes_are_scaled_with_a_resized_crop() -> None:
    image = np.zeros((30, 60, 3), np.uint8)
    for seed in range(20):
        crop = RandomResizedCrop((16, 8))
        window = crop.window(30, 60, rng(seed))
        box = [window.box.left + 0.25 * window.box.width, window.box.top, 999, window.box.top + window.box.height / 2]
        _, boxes = Joint([crop], ("image", "boxes"))((image, [box]), rng(seed))
        np.testing.assert_allclose(boxes, [[2, 0, 8, 8]], atol=1e-4)


def test_other_operations_get_images_alone_and_share_the_generator() -> None:
    def brightness(image: Any, rng: np.random.Generator) -> Any:
        return (image * rng.random()).astype(np.uint8)

    image, mask = np.full((8, 8, 3), 200, np.uint8), np.full((8, 8), 200, np.uint8)
    joint = Joint([Compose([RandomCrop(4), brightness]), ToTensor()], {"jpg; png": "image", "mask.png": "mask"})
    sample = {"png": image, "mask.png": mask, "cls": 3, "__key__": "a"}
    got = joint(sample, rng(5))
    assert list(got) == list(sample)
    assert (got["cls"], got["__key__"]) == (3, "a")
    assert (got["mask.png"] == 200).all()
    generator = rng(5)
    generator.random(), generator.random()
    assert got["png"].shape == (3, 4, 4)
    assert float(got["png"].max()) == np.float32(int(200 * generator.random())) / np.float32(255)
    assert (sample["png"].shape, mask.shape) == ((8, 8, 3), (8, 8))
    assert pickle.loads(pickle.dumps(Joint([RandomCrop(4)], ("image",)))) == Joint([RandomCrop(4)], ("image",))
    assert not Joint([RandomCrop(4), brightness], ("image",)).uses_global_generators
    assert Joint([Compose([lambda image: image * random.random()])], ("image",)).uses_global_generators


def test_a_missing_value_and_no_boxes_are_left_so() -> None:
    joint = Joint([RandomCrop(4)], ("image", "mask", "boxes", "boxes"))
    image, mask, none, empty = joint((np.zeros((8, 8, 3), np.uint8), None, [], np.zeros((0, 6))), rng())
    assert image.shape == (4, 4, 3)
    assert mask is None
    assert (none.shape, empty.shape) == ((0, 4), (0, 6))


IMAGE = np.zeros((8, 9, 3), np.uint8)


@pytest.mark.parametrize(
    ("fields", "sample", "kind", "said"),
    [
        (("image", "mask"), (IMAGE,), TypeError, "2 items.*has 1"),
        (("image",), {"jpg": IMAGE}, TypeError, "sequence for tuples.*is of type dict"),
        ({"jpg": "image"}, (IMAGE,), TypeError, "mapping for samples that are dicts"),
        ({"jpg": "image", "mask": "mask"}, {"jpg": IMAGE, "mask.png": IMAGE}, TypeError, "no field 'mask'; it has"),
        (("image", "mask"), (IMAGE, IMAGE), TypeError, r"mask 1 has 3 numbers.*images\.palette"),
        (("image", "mask"), (IMAGE, IMAGE[:7, :, 0]), ValueError, "the image 0 8 x 9, the mask 1 7 x 9"),
        (("image", "boxes"), (IMAGE, {"boxes": []}), TypeError, "boxes must be numbers.*not dict"),
        (("image", "boxes"), (IMAGE, [1, 2, 3, 4]), TypeError, r"not of shape \(4,\)"),
        (("image", "boxes"), (IMAGE, [[1, 2, 3]]), TypeError, r"not of shape \(1, 3\)"),
        (("image", "points"), (IMAGE, [1, 2, 2]), TypeError, r"points, 2 or more\), not of shape \(3,\)"),
        (("image", "boxes"), (IMAGE, [[5, 2, 3, 4]]), ValueError, r"left <= right.*not \[5.0, 2.0, 3.0, 4.0\]"),
        (("image", "boxes"), (IMAGE, [[1, 2, np.nan, 4]]), ValueError, "nan"),
        (("image",), (ToFloat()(IMAGE),), TypeError, r"Joint \(image 0\).*float32"),
        (("image",), ("bytes",), TypeError, r"Joint \(image 0\).*got str"),
    ],
)
def test_samples_of_another_kind_are_refused(fields: Any, sample: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        Joint([RandomHorizontalFlip(1.0)], fields)(sample, rng())


def test_a_crop_behind_a_float_is_refused() -> None:
    with pytest.raises(TypeError, match="RandomCrop takes a uint8 or uint16 array.*float32"):
        Joint([ToFloat(), RandomCrop(2)], ("image",))((IMAGE,), rng())


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (([RandomCrop(2)], "image"), TypeError, "a kind for each item of a sample"),
        (([RandomCrop(2)], 3), TypeError, "a kind for each item of a sample"),
        (([RandomCrop(2)], ("image", "masks")), ValueError, "not 'masks'"),
        (([RandomCrop(2)], {"jpg": None}), ValueError, "not None"),
        (([RandomCrop(2)], ("boxes", None)), ValueError, "an image or a mask"),
        ((RandomCrop(2), ("image",)), TypeError, "list of callables"),
        (([RandomCrop(2)], ("mask",), 0.5), TypeError, "mask_fill must be an integer"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        Joint(*arguments)
