"""Transforms of torchvision that would leave NumPy arrays as they are: an error, not training without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_shards import write_numbers
from torchvision_ops import v2

from streamload import StreamLoader
from streamload.decode.rows import UserFunction
from streamload.errors import TransformError
from streamload.images import Compose as OurCompose
from streamload.images import Resize as OurResize

ARRAY = np.zeros((4, 6, 3), np.uint8)


RESIZE, TO_IMAGE = v2.Resize((2, 3)), v2.ToImage()
SOMEBODYS = type("Resize", (), {"__module__": "mine.torchvision", "__call__": lambda self, value: value})

REFUSED: dict[str, tuple[Any, Any]] = {
    "v2": (RESIZE, ARRAY),
    "first of a chain": (v2.Compose([RESIZE, TO_IMAGE]), ARRAY),
    "behind ours": (OurCompose([OurResize(3), RESIZE, TO_IMAGE]), ARRAY),
    "on a tuple": (RESIZE, (ARRAY, 3)),
    "in a module": (torch.nn.Sequential(RESIZE), ARRAY),
    "on a dict": (RESIZE, {"jpg": ARRAY, "cls": 3}),
}

PASSED: dict[str, tuple[Any, Any]] = {
    "a chain that begins well": (v2.Compose([TO_IMAGE, RESIZE]), ARRAY),
    "behind ours, beginning well": (OurCompose([OurResize(3), TO_IMAGE, RESIZE]), ARRAY),
    "behind a function": (OurCompose([torch.from_numpy, RESIZE]), ARRAY),
    "a tensor": (RESIZE, torch.zeros(3, 4, 6)),
    "a tensor beside arrays": (RESIZE, (torch.zeros(3, 4, 6), ARRAY)),
    "no array": (RESIZE, (b"bytes", 3)),
    "somebody's own": (SOMEBODYS(), ARRAY),
    "a module": (torch.nn.Sequential(torch.nn.Identity()), torch.zeros(3, 4, 6)),
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


def test_the_loader_says_what_to_do(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fields": ("npy",), "transform": {"npy": RESIZE}, "num_workers": 0}
    with StreamLoader(write_numbers(tmp_path, [10]), 5, **options) as loader:
        with pytest.raises(TransformError, match=r"begin with v2.ToImage\(\), as in v2.Compose"):
            next(iter(loader))
