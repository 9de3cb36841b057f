"""Apply one random draw to all fields of a picture: image, masks, boxes and key points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import alternatives, as_python
from streamload.images.operations import Compose, Window, cut
from streamload.images.placing import check_image, takes

Kind: TypeAlias = Literal["image", "mask", "boxes", "points"]
_KINDS = ("image", "mask", "boxes", "points")
_COORDINATES = {"boxes": 4, "points": 2}

Item: TypeAlias = tuple[Any, Kind]
"""A value's number or key in its sample, and its kind."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Crop, flip and resize several fields of a sample alike: a transform of whole samples, or part of one.

    Kinds of fields:

    * "image": an array (height, width, channels) or (height, width), resampled as each operation says;
    * "mask": numbers of classes or objects, or depths, (height, width) or (height, width, 1); resized by "nearest";
    * "boxes": (boxes, 4 or more): left, top, right, bottom in pixels (right and bottom exclusive), and further numbers
      such as a class. Moved with the image and clipped to it; empty boxes are removed. The result is float32 with as
      many columns;
    * "points": (..., points, 2 or more): x and y as in boxes, so the centre of the first pixel is (0.5, 0.5), and
      further numbers such as visibility. Moved with the image; all are kept, also those outside it. float32.

    Operations other than crops, flips and resizes (`ToFloat`, `ToTensor`, `Normalize`, changes of colour) apply to
    images only, one after the other.

    Args:
        operations: the operations, first to last; those that take `rng` draw from it, crops and flips once per sample.
        fields: for tuples, the kind of each item, None for items to leave alone; for dicts, the kinds by name
            (`{"jpg;png": "image", "mask.png": "mask"}`). Values that are None stay None.
        mask_fill: the number in masks where `RandomCrop` and `CenterCrop` reach beyond the image, which is 0 there.

    Raises:
        TypeError, ValueError: an argument is invalid, or there is neither an image nor a mask.
    """

    operations: Sequence[Callable[..., Any]]
    fields: Sequence[Kind | None] | Mapping[str, Kind]
    mask_fill: int = 0
    _random: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    uses_global_generators: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        chain = Compose(self.operations)
        object.__setattr__(self, "operations", chain.operations)
        object.__setattr__(self, "_random", tuple(takes(each, "rng") for each in chain.operations))
        object.__setattr__(self, "uses_global_generators", chain.uses_global_generators)
        if isinstance(self.fields, str) or not isinstance(self.fields, Mapping | Sequence):
            raise TypeError(
                'Joint: fields must say what each item of a sample is, as ("image", "mask") or '
                f'{{"jpg": "image", "mask.png": "mask"}}, not {self.fields!r}'
            )
        named = isinstance(self.fields, Mapping)
        kinds = list(self.fields.values() if isinstance(self.fields, Mapping) else self.fields)
        wrong = [kind for kind in kinds if kind not in _KINDS and (named or kind is not None)]
        if wrong:
            raise ValueError(f"Joint: fields must be of {_KINDS}{'' if named else ' or None'}, not {wrong[0]!r}")
        if not {"image", "mask"}.intersection(kinds):
            raise ValueError(f"Joint: one of the fields must be an image or a mask, not only {self.fields!r}")
        object.__setattr__(self, "mask_fill", as_python(self.mask_fill))
        if type(self.mask_fill) is not int:
            raise TypeError(f"Joint: mask_fill must be an integer, such as 255, not {self.mask_fill!r}")

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Transform the fields of a tuple, list or dict; the result has the same type.

        Raises:
            TypeError: the sample does not match `fields`, or a value is not of its kind.
            ValueError: sizes differ, or a box is impossible.
        """
        values: Any = (
            dict(sample) if isinstance(sample, Mapping) else list(sample) if type(sample) in (tuple, list) else sample
        )
        items = [(key, kind) for key, kind in self._items(values) if values[key] is not None]
        size = _common_size(values, items)
        operation: Any
        for operation, random in zip(self.operations, self._random, strict=True):
            if hasattr(operation, "window"):  # also for users' operations
                window = operation.window(*size, rng)
                if window is None:
                    continue
                for key, kind in items:
                    if kind in _COORDINATES:
                        values[key] = _clipped(_moved(values[key], kind, window), kind, window.size)
                        continue
                    check_image(type(operation).__name__, values[key])
                    if kind == "mask":
                        values[key] = cut(values[key], window, "nearest", fill=self.mask_fill)
                    else:
                        values[key] = cut(values[key], window, operation.interpolation)
                size = window.size
                continue
            for key in (key for key, kind in items if kind == "image"):
                values[key] = operation(values[key], **({"rng": rng} if random else {}))
        for key, kind in items:
            if kind in _COORDINATES:
                values[key] = _clipped(values[key], kind, size).astype(np.float32)
        return tuple(values) if isinstance(sample, tuple) else values

    def _items(self, values: Any) -> list[Item]:
        if isinstance(values, dict) and isinstance(self.fields, Mapping):
            items = []
            for names, kind in self.fields.items():
                name = next((name for name in alternatives(names) if name in values), None)
                if name is None:
                    has = ", ".join(map(repr, values))
                    raise TypeError(f"Joint: the sample has no field {names!r}; it has {has}")
                items.append((name, kind))
            return items
        if isinstance(values, list) and not isinstance(self.fields, Mapping):
            if len(values) == len(self.fields):
                return [(number, kind) for number, kind in enumerate(self.fields) if kind is not None]
            raise TypeError(f"Joint: fields says what {len(self.fields)} items are, and the sample has {len(values)}")
        raise TypeError(
            "Joint: fields is a mapping for samples that are dicts, and a sequence for tuples; it is "
            f"{self.fields!r}, and the sample is of type {type(values).__name__}"
        )


def _common_size(values: Any, items: Sequence[Item]) -> tuple[int, int]:
    sizes: dict[str, tuple[int, int]] = {}
    for key, kind in items:
        if kind in _COORDINATES:
            values[key] = _checked(values[key], kind)
            continue
        check_image(f"Joint ({kind} {key!r})", values[key])
        if kind == "mask" and values[key].shape[2:] not in ((), (1,)):
            raise TypeError(
                f"Joint: the mask {key!r} has {values[key].shape[2]} numbers for each pixel, as images are decoded to; "
                "images.palette and images.unchanged decode masks, as in decode={'mask.png': images.palette}"
            )
        sizes[f"the {kind} {key!r}"] = values[key].shape[:2]
    if len(set(sizes.values())) != 1:
        differ = ", ".join(f"{name} {height} x {width}" for name, (height, width) in sizes.items())
        raise ValueError(f"Joint: what belongs together must have one height and width; it is {differ or 'missing'}")
    return next(iter(sizes.values()))


def _checked(numbers: Any, kind: Kind) -> NDArray[np.float64]:
    least = _COORDINATES[kind]
    takes = f"Joint: {kind} must be numbers ({kind}, {least} or more)"
    try:
        found = np.array(numbers, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{takes}, not {type(numbers).__name__}; let a decoder make them, as in decode={{'json': function}}"
        ) from None
    if found.size == 0:
        return found.reshape(0, found.shape[1] if found.ndim == 2 and found.shape[1] >= least else least)
    if found.ndim < 2 or (found.ndim > 2 and kind == "boxes") or found.shape[-1] < least:
        raise TypeError(f"{takes}, not of shape {found.shape}")
    if kind == "boxes":
        sound = np.isfinite(found[:, :4]).all(axis=1) & (found[:, :2] <= found[:, 2:4]).all(axis=1)
        if not sound.all():
            wrong = found[np.argmin(sound), :4].tolist()
            raise ValueError(
                f"Joint: a box is (left, top, right, bottom) with left <= right, top <= bottom, not {wrong}"
            )
    return found


def _moved(numbers: NDArray[np.float64], kind: Kind, window: Window) -> NDArray[np.float64]:
    (top, left, rows, columns), (height, width) = window.box, window.size
    moved, end = numbers.copy(), _COORDINATES[kind]
    moved[..., 0:end:2] = (numbers[..., 0:end:2] - left) * (width / columns)
    moved[..., 1:end:2] = (numbers[..., 1:end:2] - top) * (height / rows)
    if window.mirrored:  # a box's left edge becomes its right one
        moved[..., 0:end:2] = width - moved[..., end - 2 :: -2]
    return moved


def _clipped(numbers: NDArray[np.float64], kind: Kind, size: tuple[int, int]) -> NDArray[np.float64]:
    if kind == "points":
        return numbers
    height, width = size
    numbers[:, 0:4:2] = numbers[:, 0:4:2].clip(0, width)
    numbers[:, 1:4:2] = numbers[:, 1:4:2].clip(0, height)
    return numbers[(numbers[:, 0] < numbers[:, 2]) & (numbers[:, 1] < numbers[:, 3])]
