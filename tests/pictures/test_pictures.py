"""Sheets of samples and charts of runs: what is drawn, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from streamload.pictures.batches import samples_in
from streamload.pictures.chart import Arrivals, draw_rates
from streamload.pictures.contents import Box, Contents, contents_of
from streamload.pictures.files import save_picture
from streamload.pictures.lettering import lettering_for
from streamload.pictures.sheet import draw_sheet

WHITE, GROUND = (255, 255, 255), (240, 240, 240)
RED, GREEN, BLUE = (200, 10, 20), (10, 200, 20), (10, 20, 200)
CELL, MARGIN = 192, 16


def plain(colour: tuple[int, int, int], height: int = 24, width: int = 24) -> np.ndarray[Any, Any]:
    return np.full((height, width, 3), colour, np.uint8)


def places(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of all pixels of a colour."""
    rows, columns = np.nonzero((np.asarray(sheet) == colour).all(2))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def has(sheet: Image.Image, colour: tuple[int, int, int]) -> bool:
    return bool((np.asarray(sheet) == colour).all(2).any())


def drawn(**values: Any) -> Image.Image:
    return draw_sheet([("one", values)], "a title")


def test_samples_stand_in_rows_and_images_are_enlarged_by_whole_factors() -> None:
    colours = (RED, GREEN, BLUE)
    sheet = draw_sheet([(str(n), {"jpg": plain(each)}) for n, each in enumerate(colours)], "a title", columns=2)
    assert sheet.mode == "RGB"
    assert sheet.width == MARGIN + 2 * (CELL + MARGIN)
    for number, (colour, left) in enumerate(zip(colours, (16, 224, 16), strict=True)):
        found = places(sheet, colour)
        assert (found[0], found[2] - found[0], found[3] - found[1]) == (left, CELL, CELL)
        assert found[1] == places(sheet, colours[number // 2 * 2])[1]  # rows are aligned
    assert places(sheet, BLUE)[1] > places(sheet, RED)[3]


def test_an_image_is_in_the_middle_of_its_place_and_keeps_its_shape() -> None:
    sheet = draw_sheet([("wide", {"a": plain(RED, 100, 400)}), ("high", {"a": plain(GREEN, 400, 100)})], "a title")
    wide, high = places(sheet, RED), places(sheet, GREEN)
    assert (wide[2] - wide[0], wide[3] - wide[1]) == (192, 48)
    assert (high[2] - high[0], high[3] - high[1]) == (48, 192)
    assert wide[1] + wide[3] == high[1] + high[3]
    assert high[0] + high[2] == 2 * (MARGIN + CELL + MARGIN) + CELL


@pytest.mark.parametrize(
    "image",
    [
        np.moveaxis(plain(RED), 2, 0),  # channels first
        torch.from_numpy(np.moveaxis(plain(RED), 2, 0) / 255.0),
        torch.from_numpy(plain(RED) / 255.0),
        Image.fromarray(plain(RED)),
        np.concatenate([plain(RED), plain(RED)[:, :, :1]], 2),  # with alpha
    ],
    ids=("channels first", "float tensor", "float, channels last", "PIL", "RGBA"),
)
def test_images_of_all_layouts_show_the_same_pixels(image: Any) -> None:
    assert places(drawn(image=image), RED)[:2] == places(drawn(image=plain(RED)), RED)[:2]


def test_floats_outside_0_to_1_are_scaled_and_the_sheet_says_so() -> None:
    values = np.zeros((3, 8, 8), np.float32)
    values[:, :4] = -2.5
    values[:, 4:] = 1.5
    contents = contents_of({"image": values})
    assert contents.scaled
    assert np.unique(contents.images["image"]).tolist() == [0, 255]
    assert not contents_of({"image": values.clip(0, 1)}).scaled
    assert drawn(image=values).height > drawn(image=values.clip(0, 1)).height


def test_a_mask_colours_the_image_where_it_is_not_0() -> None:
    mask = np.zeros((24, 24), np.uint8)
    mask[:, 12:] = 3
    before, after = drawn(jpg=plain(RED)), drawn(jpg=plain(RED), **{"mask.png": torch.from_numpy(mask)})
    assert places(before, RED)[2] == MARGIN + CELL
    assert places(after, RED)[2] == MARGIN + CELL // 2
    assert after.height > before.height  # the legend


def test_a_depth_map_and_an_image_of_another_size_stand_below() -> None:
    contents = contents_of(
        {
            "jpg": plain(RED),
            "depth.png": np.arange(576, dtype=np.uint16).reshape(24, 24) + 1000,
            "small.png": np.zeros((12, 12), np.uint8),
        }
    )
    assert [*contents.images] == ["jpg", "depth.png, 1000 to 1575", "small.png"]
    assert not contents.masks


def test_masks_and_boxes_belong_to_the_first_image_alone() -> None:
    values = {"a.jpg": plain(RED), "b.jpg": plain(GREEN), "boxes": [[0, 0, 24, 24]], "mask": np.eye(24, dtype=np.uint8)}
    left, top, right, bottom = places(drawn(**values), GREEN)
    assert (right - left, bottom - top) == (CELL, CELL)
    assert (np.asarray(drawn(**values).crop((left, top, right, bottom))) == GREEN).all()


def test_numbers_above_255_are_no_classes() -> None:
    depth = np.where(np.eye(24, dtype=bool), 1000, 4000).astype(np.uint16)
    assert not contents_of({"jpg": plain(RED), "depth.png": depth}).masks
    assert contents_of({"jpg": plain(RED), "mask": (depth == 1000)[:, :, None]}).masks


TWO = [Box((2.0, 3.0, 10.0, 20.0), "1"), Box((0.0, 0.0, 12.0, 6.0), "0")]


@pytest.mark.parametrize(
    "boxes",
    [
        np.array([[2, 3, 10, 20, 1], [0, 0, 12, 6, 0]], np.float32),
        [[2, 3, 10, 20, 1], [0, 0, 12, 6, 0]],
        {"boxes": [[2, 3, 10, 20], [0, 0, 12, 6]], "labels": [1, 0]},
        {"boxes": torch.tensor([[2, 3, 10, 20], [0, 0, 12, 6]]), "labels": torch.tensor([1, 0])},
        [{"bbox": [2, 3, 8, 17], "category_id": 1}, {"bbox": [0, 0, 12, 6], "category_id": 0}],
        {"annotations": [{"bbox": [2, 3, 8, 17], "category": "1"}, {"bbox": [0, 0, 12, 6], "category": 0}]},
        {"boxes": [[2 / 24, 3 / 24, 10 / 24, 20 / 24], [0, 0, 0.5, 0.25]], "labels": [1, 0]},
    ],
    ids=("array", "lists", "boxes and labels", "tensors", "COCO", "annotations", "parts of the image"),
)
def test_boxes_of_all_spellings(boxes: Any) -> None:
    contents = contents_of({"jpg": plain(WHITE), "json": boxes})
    assert [box.label for box in contents.boxes] == ["1", "0"]
    assert np.allclose([box.edges for box in contents.boxes], [box.edges for box in TWO])
    assert contents.lines == [("json", "2 boxes")]


def test_a_box_is_drawn_at_its_place_and_one_outside_the_image_is_not() -> None:
    at, outside = (drawn(jpg=plain(RED), boxes=[box]) for box in ([3, 6, 15, 18], [30, 30, 40, 40]))
    left, top, _, _ = places(at, RED)
    changed = (np.asarray(at) != np.asarray(drawn(jpg=plain(RED), boxes=[[30, 30, 40, 40]]))).any(2)
    rows, columns = np.nonzero(changed[: top + CELL])
    assert (columns.min() - left, columns.max() + 1 - left) == (3 * 8, 15 * 8)
    assert (rows.min() - top, rows.max() + 1 - top) == (6 * 8, 18 * 8)
    assert places(outside, RED) == places(drawn(jpg=plain(RED)), RED)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((3, 4), np.float32),
        [[1, 2, 3, 4, 5, 6, 7, 8]],
        {"width": 4},
        [],
        [1, 2, 3, 4],
        [[1, 2], [3]],
        "1 2 3 4",
    ],
)
def test_what_is_no_boxes_is_text(value: Any) -> None:
    contents = contents_of({"jpg": plain(RED), "json": value})
    assert not contents.boxes
    assert len(contents.lines) == 1
    assert "box" not in contents.lines[0][1]


def test_no_boxes_are_none_and_not_text() -> None:
    for value in ({"boxes": [], "labels": []}, torch.zeros((0, 5)), np.zeros((0, 4))):
        assert contents_of({"jpg": plain(RED), "json": value}).lines == [("json", "0 boxes")]


def test_everything_else_is_text() -> None:
    class_names = ["cat", "dog"]
    lines = dict(
        contents_of(
            {
                "cls": torch.tensor(1),
                "count": 1,
                "other.cls": 2,
                "score": 0.25,
                "txt": "two dogs",
                "bin": b"12",
                "json": {"a": [1, 2], "b": np.zeros(3)},
                "missing": None,
                "tokens": np.arange(2048, dtype=np.int32),
                "few": torch.tensor([0.5, 1.5]),
                "empty": np.zeros((0, 3)),
                "sparse": torch.eye(3).to_sparse(),
                "wide": np.zeros((2, 3, 4, 5), np.uint8),
            },
            class_names,
        ).lines
    )
    assert lines["cls"] == "1 dog"
    assert (lines["count"], lines["other.cls"], lines["score"], lines["txt"]) == ("1", "2", "0.25", "two dogs")
    assert (lines["bin"], lines["missing"]) == ("2 bytes", "None")
    assert lines["json"] == '{"a": [1, 2], "b": "float64[3]"}'
    assert lines["tokens"] == "int32[2048] 0, 1, 2, 3, 4, 5, 6, 7, ..."
    assert (lines["few"], lines["empty"]) == ("[0.5, 1.5]", "float64[0, 3]")
    assert lines["sparse"] == "float32[3, 3]"
    assert lines["wide"].startswith("uint8[2, 3, 4, 5] 0, 0")


def test_sound_is_a_curve_with_a_strip_for_each_channel() -> None:
    one = np.sin(np.linspace(0, 20, 4000), dtype=np.float32)
    two = np.stack([one, 0 * one])
    for sound in (two, two.T, torch.from_numpy(two)):
        (curve,) = contents_of({"wav": sound}).curves.values()
        assert np.array_equal(curve, two)
    mono, stereo = drawn(wav=one), drawn(wav=two)
    assert stereo.height - mono.height == 56
    assert has(mono, (48, 99, 142))


@pytest.mark.parametrize("key", ["", "ünï", "日本語/👩\u200d💻", "a\nb\tc\x1b[2J", "\udcff", "k" * 5000, "../<b>&"])
def test_a_key_may_hold_anything(key: str) -> None:
    sheet = draw_sheet([(key, {"jpg": plain(RED), "txt": key})], key)
    assert sheet.width == 2 * MARGIN + CELL
    assert sheet.height < 600
    left, top, right, bottom = places(sheet, RED)
    assert (right - left, bottom - top) == (CELL, CELL)
    shown = lettering_for(key, 12).text
    assert "\n" not in shown
    assert "\x1b" not in shown


def test_lines_end_at_spaces_and_long_keys_lose_their_middle() -> None:
    lettering = lettering_for("some words that are longer than a line and go on " * 9, 12)
    lines = lettering.lines(CELL, 3)
    assert len(lines) == 3
    assert lines[-1].endswith("...")
    assert all(lettering.width_of(line) <= CELL for line in lines)
    assert " ".join(lines[:2]) == lettering.text[: len(" ".join(lines[:2]))]
    key = lettering_for("train/" + "n" * 200 + "/0001234", 14)
    shortened = "".join(key.lines_with_end(CELL, 2))
    assert shortened.startswith("train/n")
    assert shortened.endswith("/0001234")
    assert key.lines(1, 2)  # narrower than a letter
    assert lettering_for("short", 12).lines_with_end(CELL, 2) == ["short"]


def test_columns_are_checked() -> None:
    with pytest.raises(ValueError, match="columns=0 must be at least 1"):
        draw_sheet([("one", {})], "a title", columns=0)


# -- batches -----------------------------------------------------------------------------------------------------------

IMAGES = torch.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    ("batch", "names", "expected"),
    [
        ([IMAGES, ("a", "b", "c")], ("jpg", "txt"), {"jpg": IMAGES[1], "txt": "b"}),
        ({"jpg": IMAGES, "json": {"n": IMAGES[:, 0]}}, None, {"jpg": IMAGES[1], "json": {"n": IMAGES[1, 0]}}),
        ([(b"1", b"2", b"3"), (b"4", b"5", b"6")], ("cls", "json"), {"cls": b"2", "json": b"5"}),
        (IMAGES, ("npy",), {"npy": IMAGES[1]}),
        (IMAGES, None, {"value": IMAGES[1]}),
        ([IMAGES, IMAGES[:, 1]], ("jpg",), {"0": IMAGES[1], "1": IMAGES[1, 1]}),
        ([{"a": [IMAGES[:, 0], IMAGES[:, 1]]}], ("json",), {"json": {"a": [IMAGES[1, 0], IMAGES[1, 1]]}}),
    ],
)
def test_a_batch_of_the_default_collation_is_taken_apart(batch: Any, names: Any, expected: dict[str, Any]) -> None:
    count, samples = samples_in(batch, names, by_default=True)
    found = list(samples)
    assert (count, len(found)) == (3, 3)
    assert _alike(found[1], ("number 1", expected))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((IMAGES, [[1], [2, 3], []]), {"jpg": IMAGES[1], "json": [2, 3]}),
        ([IMAGES, IMAGES[:, 0]], {"jpg": IMAGES[1], "json": IMAGES[1, 0]}),
        (([1, 2, 3], ["a", "b", "c"]), {"jpg": 2, "json": "b"}),
        ([("x", 1), ("y", 2), ("z", 3)], {"jpg": "y", "json": 2}),
        ([{"x": 1}, {"x": 2}, {"x": 3}], {"x": 2}),
        ([torch.zeros(1), torch.ones(2), torch.zeros(3)], {"value": torch.ones(2)}),
        (
            {"image": IMAGES, "texts": ["a", "b", "c"], "longest": 9, "of": torch.zeros(7)},
            {"image": IMAGES[1], "texts": "b"},
        ),
    ],
)
def test_a_batch_of_a_function_of_the_users_is_taken_apart(batch: Any, expected: dict[str, Any]) -> None:
    count, samples = samples_in(batch, ("jpg", "json"), by_default=False)
    found = list(samples)
    assert (count, len(found)) == (3, 3)
    assert _alike(found[1], ("number 1", expected))


def test_keys_are_taken_from_the_batch() -> None:
    batch = {"__key__": ["a", "b"], "__url__": ["u", "u"], "cls": torch.tensor([0, 1])}
    _, samples = samples_in(batch, None, by_default=False)
    assert [key for key, _ in samples] == ["a", "b"]
    _, samples = samples_in([torch.tensor([0, 1]), ("a", "b")], ("cls", "__key__"), by_default=True)
    assert list(samples) == [("a", {"cls": 0}), ("b", {"cls": 1})]
    with pytest.raises(ValueError, match="hold tensors, arrays or lists, and this one is of int"):
        samples_in(7, None, by_default=False)


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, torch.as_tensor(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_alike(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_alike, left, right))
    return bool(left == right)


# -- charts ------------------------------------------------------------------------------------------------------------


def test_a_chart_shows_a_stall_in_both_panels() -> None:
    steady = [number / 10 for number in range(101)]
    stalled = [time if time < 4 else time + 3 for time in steady]
    charts = [
        np.asarray(draw_rates(Arrivals(times, [1] * 50 + [2] * 51, 1000), ["a title", "what"]))
        for times in (steady, stalled)
    ]
    assert charts[0].shape == charts[1].shape
    for colour, grows in (((48, 99, 142), False), ((209, 73, 91), True)):
        heights = [(chart == colour).all(2).sum(0)[90:930] for chart in charts]
        assert np.ptp(heights[0][(heights[0] > 0)]) <= 20  # but for the lines between the bars
        during = int((4.0 + 1.5) / 13 * 840)
        before = int(2.0 / 13 * 840)
        bars = [heights[1][place - 9 : place + 9].max() for place in (before, during)]
        assert (bars[1] > 5 * bars[0]) if grows else (5 * bars[1] < bars[0])


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0]])
def test_a_chart_of_nothing_is_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="two batches at least"):
        draw_rates(Arrivals(times, [1] * len(times), 1), ["a title"])


def test_what_cannot_be_written_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / f"{'n' * 245}.png"  # with what a temporary name adds it is too long
    with pytest.raises(OSError, match="too long") as raised:
        save_picture(drawn(), path)
    assert raised.value.filename == str(path)
    with pytest.raises(ValueError, match=r"20000 x 1 pixels, and WEBP takes 16,383 on a side; draw fewer samples"):
        save_picture(Image.new("RGB", (20_000, 1)), tmp_path / "a.webp")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_sample_has_its_key_alone() -> None:
    assert contents_of({}) == Contents()
    assert drawn().height < 100


def test_no_value_is_too_odd_to_be_drawn() -> None:
    circle: list[Any] = []
    circle.append(circle)
    halves = np.arange(256).reshape(16, 16) < 128
    odd = {
        "not a number": np.full((3, 16, 16), np.nan),
        "infinite": np.full(99, np.inf),
        "largest": np.where(halves, 1.7e308, -1.7e308),
        "largest curve": np.where(halves.reshape(-1), 1.7e308, -1.7e308),
        "integers": np.where(halves, 2**63 - 1, -(2**63)),
        "complex": np.zeros((16, 16), np.complex64),
        "objects": np.array([1, "a", None], object),
        "wide": np.zeros((4, 10_000, 3), np.uint8),
        "high": np.zeros((10_000, 4, 3), np.uint8),
        "bfloat16": torch.zeros((3, 16, 16), dtype=torch.bfloat16),
        "gradient": torch.zeros((3, 16, 16), requires_grad=True),
        "big-endian": np.zeros((16, 16), ">u2"),
        "circle": circle,
        "keys": {1: 2, (1, 2): 3},
        "boxes of nothing": {"boxes": None, "labels": 5},
        "boxes of text": [{"bbox": "abcd"}],
        "huge boxes": {"boxes": [[-1e300, 0, 1e300, 5], [9, 9, 2, 2]], "labels": ["x" * 1000, None]},
        "ragged boxes": {"boxes": [[1, 2, 3, 4], [1]]},
        "function": len,
        "large": 10**40,
        "palette": Image.new("P", (16, 16)),
        "grey and alpha": Image.new("LA", (16, 16)),
        "16 bits": Image.new("I;16", (16, 16)),
    }
    for name, value in odd.items():
        for sample in ({name: value}, {"jpg": plain(RED), name: value}, {"jpg": plain(RED), "boxes": value}):
            assert draw_sheet([("key", sample)], "a title").width == 2 * MARGIN + CELL
