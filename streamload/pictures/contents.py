"""What a sample shows: its values sorted into images, masks, boxes, curves and lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.text import counted

__all__ = ["SCALED", "Box", "Contents", "contents_of"]

Array = NDArray[Any]

SCALED = "Float images with values outside 0 to 1 are scaled, each from its own least value to its greatest."

_LABELS = ("label", "labels", "target", "targets", "class")
_LARGEST = 1e150
_LEAST_SIDE = 4
_MOST_CLASSES = 64
_MOST_NUMBER = 255
_LEAST_CURVE = 16
_LEAST_SOUND = 64
_MOST_CHANNELS = 8
_MOST_BOX_NUMBERS = 7
_SHOWN_NUMBERS = 8
_MOST_TEXT = 400
_HEAT = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float64)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in an image.

    Attributes:
        edges: left, top, right and bottom, in pixels of the image from 0.
        label: a class's number or name, or empty.
    """

    edges: tuple[float, float, float, float]
    label: str


@dataclass(slots=True)
class Contents:
    """What is drawn of a sample.

    Attributes:
        images: by name, uint8[height, width, 3]; the first is the one to which masks and boxes belong.
        masks: by name, numbers of classes [height, width] of the first image's size.
        boxes: in the first image.
        curves: by name, float64[channels, values].
        lines: name and text of everything else.
        scaled: whether an image was scaled by its least and greatest value.
    """

    images: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    masks: dict[str, Array] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    curves: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    scaled: bool = False


def contents_of(sample: Mapping[str, Any], classes: Sequence[str] | None = None) -> Contents:
    """Sort the fields of one sample by what they hold; the names of fields decide only on labels.

    Args:
        sample: values by the names of their fields: arrays, tensors, PIL images, numbers, text, and nests of these.
        classes: the names of the classes by label, if they are known.
    """
    contents = Contents()
    found = {name: _as_array(value) for name, value in sample.items()}
    arrays = {name: array for name, array in found.items() if array is not None}
    main = _main_image(arrays)
    size = None
    if main is not None:
        contents.images[main], contents.scaled = _shown_image(arrays[main])
        size = contents.images[main].shape[:2]
    for name, value in sample.items():
        if name == main:
            continue
        boxes = None if size is None else _boxes_in(name, arrays.get(name, value), (size[0], size[1]))
        if boxes is not None:
            contents.boxes += boxes
            contents.lines.append((name, counted(len(boxes), "box")))
        elif name in arrays:
            _sort_array(name, arrays[name], size, contents)
        else:
            contents.lines.append((name, _text_of(name, value, classes)))
    return contents


# -- arrays ------------------------------------------------------------------------------------------------------------


def _as_array(value: Any) -> Array | None:
    """The value as an array of numbers with axes, or None where it is none: NumPy, torch, PIL."""
    if hasattr(value, "getbands"):
        value = np.asarray(value.convert("RGB") if value.mode not in ("L", "I;16", "I", "F") else value)
    if hasattr(value, "detach"):
        try:
            value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
        except (TypeError, RuntimeError):  # sparse ones, and types that NumPy does not have
            return None
    if isinstance(value, np.ndarray) and value.ndim and value.size and value.dtype.kind in "biuf":
        return value
    return None


def _main_image(arrays: Mapping[str, Array]) -> str | None:
    """The name of the image to which all else belongs: the first of several channels, else the first that is grey."""
    plain = [name for name, array in arrays.items() if (image := _image_axes(array)) is not None and image.ndim == 3]
    grey = [
        name
        for name, array in arrays.items()
        if (image := _image_axes(array)) is not None and image.ndim == 2 and image.dtype == np.uint8
    ]
    return next(iter([*plain, *grey]), None)


def _image_axes(array: Array) -> Array | None:
    """The array as (height, width, 3) or (height, width), or None where its shape is not that of an image."""
    if array.ndim == 3:
        channels_first, channels_last = (array.shape[axis] in (1, 3, 4) for axis in (0, 2))
        if channels_first and (array.dtype.kind == "f" or not channels_last):
            array = np.moveaxis(array, 0, 2)
        elif not channels_last:
            return None
        array = array[:, :, 0] if array.shape[2] == 1 else array[:, :, :3]
    return array if array.ndim in (2, 3) and min(array.shape[:2]) >= _LEAST_SIDE else None


def _shown_image(array: Array) -> tuple[NDArray[np.uint8], bool]:
    """uint8[height, width, 3], and whether the values were scaled by the least and the greatest of them."""
    image = _image_axes(array)
    assert image is not None, "it was chosen for its shape"
    scaled = False
    if image.dtype != np.uint8:
        values = _finite(image)
        least, greatest = float(values.min()), float(values.max())
        scaled = image.dtype.kind != "b" and not (least >= 0 and greatest <= 1 and image.dtype.kind == "f")
        if scaled:
            values = (values - least) / ((greatest - least) or 1.0)
        image = np.rint(255 * values).astype(np.uint8)
    return (np.repeat(image[:, :, None], 3, 2) if image.ndim == 2 else np.ascontiguousarray(image)), scaled


def _sort_array(name: str, array: Array, size: Sequence[int] | None, contents: Contents) -> None:
    image = _image_axes(array)
    if _is_curve(array):
        channels_last = array.ndim == 2 and array.shape[0] > array.shape[1]
        curve = _finite(np.atleast_2d(array.T if channels_last else array))
        contents.curves[f"{name}, {_shape_of(array)}, to {np.abs(curve).max():.3g}"] = curve
    elif image is None:
        shown = ", ".join(f"{each:.6g}" for each in array.reshape(-1)[:_SHOWN_NUMBERS].tolist())
        few = array.size <= _SHOWN_NUMBERS
        contents.lines.append((name, f"[{shown}]" if few else f"{_shape_of(array)} {shown}, ..."))
    elif image.ndim == 2 and tuple(image.shape) == size and _is_mask(image):
        contents.masks[name] = image
    elif image.ndim == 2 and image.dtype != np.uint8:
        heat, span = _heat_map(image)
        contents.images[f"{name}, {span}"] = heat
    else:
        contents.images[name], scaled = _shown_image(array)
        contents.scaled |= scaled


def _is_curve(array: Array) -> bool:
    if array.ndim == 1:
        return array.dtype.kind == "f" and len(array) >= _LEAST_CURVE
    few, many = sorted(array.shape)[:2] if array.ndim == 2 else (0, 0)
    return array.dtype.kind == "f" and 0 < few <= _MOST_CHANNELS and many >= max(_LEAST_SOUND, 8 * few)


def _is_mask(image: Array) -> bool:
    if image.dtype.kind not in "biu" or image.max() > _MOST_NUMBER or image.min() < 0:
        return False
    return len(np.unique(image)) <= _MOST_CLASSES


def _heat_map(image: Array) -> tuple[NDArray[np.uint8], str]:
    """The numbers as colours from dark blue (the least) to yellow, and the least and the greatest as text."""
    values = _finite(image)
    least, greatest = float(values.min()), float(values.max())
    place = (values - least) / ((greatest - least) or 1.0) * (len(_HEAT) - 1)
    anchors = np.arange(len(_HEAT))
    channels = [np.interp(place, anchors, _HEAT[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, 2)).astype(np.uint8), f"{least:.4g} to {greatest:.4g}"


def _finite(array: Array) -> NDArray[np.float64]:
    """The values with 0 for those that are no numbers, none so large that a difference or a sum would not be one."""
    return np.clip(np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0), -_LARGEST, _LARGEST)


def _shape_of(array: Array) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


# -- boxes -------------------------------------------------------------------------------------------------------------


def _boxes_in(name: str, value: Any, size: tuple[int, int]) -> list[Box] | None:
    """The boxes that a value holds, or None where it holds none.

    Rows of corners, as an array or as lists; {"boxes": rows, "labels": ...}; or objects with COCO's "bbox", which is
    left, top, width and height: a list of them, or under "annotations" or "objects".
    """
    if isinstance(value, Mapping):
        if "boxes" in value:
            labels = next((value[each] for each in ("labels", "classes", "category_ids") if each in value), None)
            return _corner_boxes(value["boxes"], size, labels, certain=True)
        value = next((value[each] for each in ("annotations", "objects") if each in value), value)
        value = [value] if isinstance(value, Mapping) and "bbox" in value else value
    things = value if isinstance(value, list | tuple) else ()
    if things and all(isinstance(each, Mapping) and "bbox" in each for each in things):
        return list(_coco_boxes(things, size))
    if isinstance(value, Mapping | str | bytes):
        return None
    return _corner_boxes(value, size, None, certain="box" in name)


def _corner_boxes(value: Any, size: tuple[int, int], labels: Any, *, certain: bool) -> list[Box] | None:
    """Boxes of rows of left, top, right, bottom and perhaps a class; None where these are no such rows."""
    rows = _rows_of(value)
    if rows is None or not (len(rows) or certain or hasattr(value, "shape")):
        return None
    if not certain and len(rows) and not _may_be_corners(rows, size):
        return None
    edges, names = rows[:, :4], rows[:, 4:5]
    if len(edges) and edges.min() >= 0 and edges.max() <= 1:  # in parts of the image
        edges = edges * np.array([size[1], size[0], size[1], size[0]])
    given = _as_array(labels)
    found = given.tolist() if given is not None else list(labels) if isinstance(labels, list | tuple) else []
    if len(found) != len(edges):
        found = [each[0] if len(each) else "" for each in names.tolist()]
    return [Box(_four(each), _short(label)) for each, label in zip(edges.tolist(), found, strict=True)]


def _rows_of(value: Any) -> NDArray[np.float64] | None:
    """float64[rows, 4 or more], or None where the value is not that."""
    given = _as_array(value)
    if given is None:
        if hasattr(value, "shape"):
            no_rows = len(value.shape) == 2 and not value.shape[0] and 4 <= value.shape[1] <= _MOST_BOX_NUMBERS
            return np.empty((0, 4)) if no_rows else None
        if not isinstance(value, list | tuple) or not all(isinstance(each, list | tuple) for each in value):
            return None
        if not value:
            return np.empty((0, 4))
        try:
            given = np.array(value)
        except ValueError:  # rows of unlike lengths
            return None
    if given.ndim != 2 or given.dtype.kind not in "iuf" or not 4 <= given.shape[1] <= _MOST_BOX_NUMBERS:
        return None
    return given.astype(np.float64) if np.isfinite(given).all() else None


def _may_be_corners(rows: NDArray[np.float64], size: tuple[int, int]) -> bool:
    """Whether each row is a rectangle that lies in the image, by and large."""
    height, width = size
    left, top, right, bottom = rows[:, :4].T
    return bool(
        ((left < right) & (top < bottom) & (left < width) & (top < height) & (right > 0) & (bottom > 0)).all()
        and right.max() <= 1.5 * width
        and bottom.max() <= 1.5 * height
    )


def _coco_boxes(things: Sequence[Mapping[str, Any]], size: tuple[int, int]) -> Iterator[Box]:
    for thing in things:
        rows = _rows_of([list(np.ravel(thing["bbox"]))])
        if rows is None:
            continue
        left, top, width, height = rows[0, :4].tolist()
        edges = left, top, left + width, top + height
        if min(edges) >= 0 and max(edges) <= 1:
            edges = edges[0] * size[1], edges[1] * size[0], edges[2] * size[1], edges[3] * size[0]
        names = ("category", "name", "label", "category_id", "class")
        yield Box(edges, _short(next((thing[each] for each in names if each in thing), "")))


def _four(edges: Sequence[float]) -> tuple[float, float, float, float]:
    left, top, right, bottom = edges
    return left, top, right, bottom


def _short(label: Any) -> str:
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


# -- text --------------------------------------------------------------------------------------------------------------


def _text_of(name: str, value: Any, classes: Sequence[str] | None) -> str:
    number = value.item() if getattr(value, "ndim", 1) == 0 and hasattr(value, "item") else value
    if isinstance(number, bool) or number is None:
        return str(number)
    if isinstance(number, int):
        is_label = name in _LABELS or name.rpartition(".")[2] in ("cls", "cls2")
        known = classes[number] if is_label and classes is not None and 0 <= number < len(classes) else ""
        return f"{number} {known}" if known not in ("", str(number)) else str(number)
    if isinstance(number, float):
        return f"{number:.6g}"
    if isinstance(number, bytes | bytearray | memoryview):
        return counted(len(number), "byte")
    if isinstance(number, str):
        return number[:_MOST_TEXT]
    if hasattr(number, "shape"):
        kind = str(getattr(number, "dtype", type(number).__name__)).removeprefix("torch.")
        return f"{kind}[{', '.join(map(str, number.shape))}]"
    return _document(number)


def _document(value: Any) -> str:
    """JSON and the like, in one line; arrays by their shapes."""

    def shown(inner: Any) -> Any:
        array = _as_array(inner)
        return _shape_of(array) if array is not None else str(inner)[:_MOST_TEXT]

    try:
        return json.dumps(value, default=shown, ensure_ascii=False)[:_MOST_TEXT]
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or a circle
        return type(value).__name__
