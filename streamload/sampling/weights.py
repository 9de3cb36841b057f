"""The `weights` argument: checked, and resolved to a weight per sample of each label."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamload.index.columns import Labels, unknown_class
from streamload.order.groups import group_sizes

Weights = Literal["balanced"] | Mapping[int, float] | Mapping[str, float] | Sequence[float] | NDArray[Any]
ByLabel = Literal["balanced"] | Mapping[int, float] | NDArray[np.float64]
"""Those without names: the last ones are of samples."""

_WHAT = '"balanced", a mapping from labels or classes to weights, or one number for each sample'


def checked_weights(weights: Weights | None) -> tuple[Mapping[str, float] | None, ByLabel | None]:
    """The weights, split: those by class names, whose labels are still to be found, and all others.

    Raises:
        TypeError, ValueError: they make no sense.
    """
    if weights is None or (isinstance(weights, str) and weights == "balanced"):
        return None, weights
    if isinstance(weights, str):
        raise ValueError(f"weights={weights!r} must be {_WHAT}")
    if isinstance(weights, Mapping):
        _check_mapping(weights)
        values = np.array([float(weight) for weight in weights.values()])
    else:
        try:
            values = np.asarray(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"weights is of type {type(weights).__name__}, and must be {_WHAT}") from error
        if values.ndim != 1:
            raise ValueError(f"weights has the shape {values.shape}, and must be {_WHAT}")
    wrong = values[~np.isfinite(values) | (values < 0)]
    if len(wrong):
        raise ValueError(f"weights has {wrong[0]}; weights are finite and not negative")
    if not values.any():
        raise ValueError("weights are all zero, so nothing can be drawn; give a weight above zero")
    if not isinstance(weights, Mapping):
        return None, values
    of_names = {name: float(weight) for name, weight in weights.items() if isinstance(name, str)}
    of_labels = {int(label): float(weight) for label, weight in weights.items() if not isinstance(label, str)}
    return (of_names, None) if of_names else (None, of_labels)


def _check_mapping(weights: Mapping[Any, Any]) -> None:
    first = next(iter(weights), None)
    for label, weight in weights.items():
        if isinstance(label, bool) or not isinstance(label, int | np.integer | str):
            raise TypeError(f"weights has the label {label!r}; labels are whole numbers, or names of classes")
        if isinstance(label, str) != isinstance(first, str):
            raise TypeError(f"weights has {first!r} and {label!r}; give labels or the names of classes, not both")
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.number):
            raise TypeError(f"weights has {weight!r} for {label!r}; it must be a number")


def by_label(weights: Mapping[str, float], names: Sequence[str] | None) -> dict[int, float]:
    """The same weights by label.

    Args:
        weights: by the names of classes.
        names: of all classes, by label, as `classes.json` has them; None where there is no such file.

    Raises:
        ValueError: a class is not known.
    """
    if names is None:
        raise ValueError(
            f"weights has the class {next(iter(weights))!r}, and beside the shards there is no classes.json, which "
            "shardify writes and which has the names of the classes; give labels, the integers in `cls`"
        )
    label_of = {name: label for label, name in enumerate(names)}
    for name in weights:
        if name not in label_of:
            raise ValueError(f"weights has the class {unknown_class(name, names)}")
    return {label_of[name]: weight for name, weight in weights.items()}


def label_weights(
    weights: str | Mapping[int, float], labels: Labels, names: Sequence[str] | None
) -> NDArray[np.float64]:
    """The weight of one sample of each label."""
    counts = group_sizes(labels.number, len(labels.values))
    if len(counts) == 0:
        raise ValueError("weights by label: the dataset has no samples")
    if isinstance(weights, str):
        return 1.0 / counts

    def shown(label: int) -> str:
        if names is None:
            return str(label)
        return repr(names[label]) if 0 <= label < len(names) else f"of label {label} (not named in classes.json)"

    one, all_of_them = ("the label", "the labels") if names is None else ("the class", "the classes")
    existing = ", ".join(map(shown, labels.values[:20])) + (", ..." if len(labels.values) > 20 else "")
    for label in weights:
        if label not in labels.values:
            raise ValueError(f"weights has {one} {shown(label)}, which no sample has; {all_of_them} are {existing}")
    for label in labels.values:
        if label not in weights:
            raise ValueError(
                f"weights lacks {one} {shown(label)}; give a weight, or 0, for each of {all_of_them} {existing}"
            )
    found = np.array([weights[label] for label in labels.values])
    if math.fsum(found) == 0:
        raise ValueError("weights are all zero, so nothing can be drawn; give a weight above zero")
    return found


def named(weights: str | Mapping[int, float] | NDArray[np.float64]) -> str:
    """A short name for weights."""
    if isinstance(weights, str):
        return weights
    if isinstance(weights, Mapping):
        kind, content = (
            "labels",
            repr(sorted((int(label), float(weight)) for label, weight in weights.items())).encode(),
        )
    else:
        kind, content = "samples", weights.astype("<f8").tobytes()
    return f"{kind}:{hashlib.blake2b(content, digest_size=16).hexdigest()}"
