"""Masks and tensors through the loader: decoders by name, one draw for all fields, batches of tensors."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from streamload import ShardWriter, StreamLoader, images
from streamload.images import Compose, Joint, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

DECODE = {"mask.png": images.palette}
SAMPLES = 12


def pixels_of(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 100, (20, 30), np.uint8)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Image and mask show the same numbers, the mask by a palette."""
    folder = tmp_path_factory.mktemp("masks")
    with ShardWriter(folder, max_count=5) as writer:
        for number in range(SAMPLES):
            pixels, mask = pixels_of(number), io.BytesIO()
            image = Image.fromarray(pixels)
            image.putpalette([*range(256)] * 3)
            image.save(mask, "PNG")
            image = pixels[:, :, None].repeat(3, axis=2)
            writer.write({"__key__": f"{number:06d}", "png": image, "mask.png": mask.getvalue(), "cls": number})
    return str(folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_image_and_mask_are_moved_by_one_draw(shards: str, workers: int) -> None:
    joint = Joint([RandomCrop((12, 16)), RandomHorizontalFlip()], ("image", "mask"))
    options: dict[str, Any] = {"fields": ("png", "mask.png"), "decode": DECODE, "transform": joint}
    with StreamLoader(shards, SAMPLES, num_workers=workers, **options) as loader:
        (image, mask), (other, _) = (next(iter(loader)) for _ in range(2))
    assert (image.shape, mask.shape) == ((SAMPLES, 12, 16, 3), (SAMPLES, 12, 16))
    assert torch.equal(image, mask[..., None].expand_as(image))
    assert not torch.equal(image, other)


@pytest.mark.parametrize(
    "transform", [{"png": ToTensor()}, {"png": Compose([ToTensor(), Normalize([0.0] * 3, [1.0] * 3)])}]
)
def test_batches_of_tensors_are_contiguous_without_a_collate_function_too(shards: str, transform: Any) -> None:
    """So that a model's `x.view(len(x), -1)` works; several batches, since the first has no memory offered."""
    with StreamLoader(shards, 4, fields=("png", "cls"), transform=transform, num_workers=0) as loader:
        for batch, labels in loader:
            assert batch.is_contiguous()
            for image, number in zip(batch, labels.tolist(), strict=True):
                assert torch.equal(image, torch.from_numpy(pixels_of(number)).float().div(255).expand(3, -1, -1))
