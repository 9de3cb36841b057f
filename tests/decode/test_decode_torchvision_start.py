"""Transforms of torchvision that would leave NumPy arrays as they are: an error, not training without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_shards import write_numbers

from streamload import StreamLoader
from streamload.decode.rows import UserFunction
from streamload.errors import TransformError
from streamload.images import Compose as OurCompose
from streamload.images import Resize as OurResize

ARRAY = np.zeros((4, 6, 3), np.uint8)


def torchvision(name: str, module: str = "torchvision.transforms.v2._some", **attributes: Any) -> Callable[[Any], Any]:
    """Stands for a transform of that name; that a torchvision is there that fits the torch is not to be relied on."""
    kind = type(name, (), {"__module__": module, "__call__": lambda self, value: value})
    made = kind()
    vars(made).update(attributes)
    return made  # type: ignore[no-any-return]


RESIZE, TO_IMAGE = torchvision("Resize"), torchvision("ToImage")

REFUSED: dict[str, tuple[Any, Any]] = {
    "v2": (RESIZE, ARRAY),
    "first of a chain": (torchvision("Compose", transforms=[RESIZE, TO_IMAGE]), ARRAY),
    "behind ours": (OurCompose([OurResize(3), RESIZE, TO_IMAGE]), ARRAY),
    "on a tuple": (RESIZE, (ARRAY, 3)),
    "on a dict": (RESIZE, {"jpg": ARRAY, "cls": 3}),
}

PASSED: dict[str, tuple[Any, Any]] = {
    "a chain that begins well": (torchvision("Compose", transforms=[TO_IMAGE, RESIZE]), ARRAY),
    "behind ours, beginning well": (OurCompose([OurResize(3), TO_IMAGE, RESIZE]), ARRAY),
    "behind a function": (OurCompose([torch.from_numpy, RESIZE]), ARRAY),
    "a tensor": (RESIZE, torch.zeros(3)),
    "a tensor beside arrays": (RESIZE, (torch.zeros(3), ARRAY)),
    "no array": (RESIZE, (b"bytes", 3)),
    "an empty chain": (torchvision("Compose", transforms=[]), ARRAY),
    "somebody's own": (torchvision("Resize", "mine.torchvision"), ARRAY),
    "a module": (torch.nn.Sequential(torch.nn.Identity()), torch.zeros(3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_that_would_do_nothing_is_refused(name: str) -> None:
    function, value = REFUSED[name]
    with pytest.raises(TypeError, match=r"v2.Resize ignores .* begin with v2.ToImage\(\)"):
        UserFunction(function)(value, np.random.default_rng())


@pytest.mark.parametrize("name", PASSED)
def test_the_others_are_called(name: str) -> None:
    function, value = PASSED[name]
    UserFunction(function)(value, np.random.default_rng())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loader_says_what_to_do(tmp_path: Path, num_workers: int) -> None:
    with (
        StreamLoader(
            write_numbers(tmp_path, [10]), 5, fields=("npy",), transform={"npy": RESIZE}, num_workers=num_workers
        ) as loader,
        pytest.raises(TransformError, match=r"begin with v2.ToImage\(\), as in v2.Compose"),
    ):
        next(iter(loader))


def test_the_real_one() -> None:
    from torchvision_ops import v2

    assert UserFunction(v2.Compose([v2.ToImage(), v2.Resize((2, 3))]))(ARRAY, None).shape == (3, 2, 3)
    for transform in (v2.Resize((2, 3)), v2.Compose([v2.Resize((2, 3))]), torch.nn.Sequential(v2.Resize((2, 3)))):
        with pytest.raises(TypeError, match="v2.ToImage"):
            UserFunction(transform)(ARRAY, None)
