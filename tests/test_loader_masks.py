"""Masks, boxes and tensors through the loader: decoders by name, one draw for all fields, batches of tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transforms import as_list

from streamload import ShardWriter, StreamLoader, TarDataset, errors, images
from streamload.images import (
    Compose,
    Joint,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    ToTensor,
)

FIELDS = ("png", "mask.png", "depth.png", "boxes.json")
DECODE = {"mask.png": images.palette, "depth.png": images.unchanged}
SAMPLES, HEIGHT, WIDTH = 12, 20, 30


def png(pixels: NDArray[Any], *, palette: bool = False) -> bytes:
    image, file = Image.fromarray(pixels), io.BytesIO()
    if palette:
        image.putpalette([*range(256)] * 3)
    image.save(file, "PNG")
    return file.getvalue()


def sample(number: int) -> dict[str, Any]:
    """Image, mask and depth show the same numbers, and the box is where they are above 200."""
    numbers = np.random.default_rng(number).integers(0, 100, (HEIGHT, WIDTH), np.uint8)
    numbers[5:9, 6 : 10 + number] = 201
    return {
        "png": numbers[:, :, None].repeat(3, axis=2),
        "mask.png": png(numbers, palette=True),
        "depth.png": png(numbers.astype(np.uint16) * 256),
        "boxes.json": [[6, 5, 10 + number, 9, number]],
        "cls": number,
    }


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("masks")
    with ShardWriter(folder / "%06d.tar", max_count=5) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:06d}", **sample(number)})
    return str(folder)


def seen(shards: str, workers: int, transform: Any, epochs: int = 1, fields: Any = FIELDS) -> list[list[Any]]:
    """The samples of each epoch as the transform has left them."""
    with StreamLoader(
        shards, 4, True, fields=fields, decode=DECODE, transform=transform, collate_fn=as_list, num_workers=workers
    ) as loader:
        return [[one for batch in loader for one in batch] for _ in range(epochs)]


def test_image_mask_depth_and_boxes_stay_together_and_do_not_depend_on_workers(shards: str) -> None:
    joint = Joint([RandomCrop((12, 16)), RandomHorizontalFlip()], ("image", "mask", "mask", "boxes"))
    first, second = seen(shards, 0, joint, epochs=2)
    assert len(first) == SAMPLES
    boxes = 0
    for image, mask, depth, box in first:
        assert (image.shape, mask.shape, depth.dtype) == ((12, 16, 3), (12, 16), np.uint16)
        np.testing.assert_array_equal(image, mask[:, :, None].repeat(3, axis=2))
        np.testing.assert_array_equal(depth, mask.astype(np.uint16) * 256)
        ys, xs = np.nonzero(mask == 201)
        assert box[:, :4].tolist() == ([[xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]] if len(xs) else [])
        boxes += len(box)
    assert boxes > 6
    assert {image.tobytes() for image, *_ in first}.isdisjoint(image.tobytes() for image, *_ in second)
    for one, other in zip(first, seen(shards, 1, joint)[0], strict=True):
        for value, again in zip(one, other, strict=True):
            np.testing.assert_array_equal(value, again)


def test_dicts_and_a_dataset_are_transformed_too(shards: str) -> None:
    joint = Joint([RandomResizedCrop(8), ToTensor()], {"png": "image", "mask.png": "mask"})
    with StreamLoader(shards, 4, decode=DECODE, transform=joint, num_workers=0) as loader:
        batch = next(iter(loader))
    assert (batch["png"].shape, batch["mask.png"].shape) == ((4, 3, 8, 8), (4, 8, 8))
    assert (batch["png"].dtype, batch["mask.png"].dtype) == (torch.float32, torch.uint8)
    with TarDataset(shards, decode=DECODE, transform=joint) as dataset:
        assert isinstance(dataset[3]["png"], torch.Tensor)


def test_a_mask_that_was_decoded_to_colours_is_an_error_of_the_program(shards: str) -> None:
    joint = Joint([RandomCrop(8)], ("image", "mask"))
    with (
        StreamLoader(shards, 4, fields=("png", "mask.png"), transform=joint, num_workers=0, on_error="skip") as loader,
        pytest.raises(errors.TransformError, match=r"mask 1 has 3 numbers.*images\.palette"),
    ):
        next(iter(loader))


# separate crops


CROP, BOTH = RandomResizedCrop(8), Compose([RandomHorizontalFlip(), ToFloat()])


def test_separate_crops_of_an_image_and_its_mask_are_warned_of(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        image = np.zeros((9, 9, 3), np.uint8)
        writer.write({"__key__": "0", "png": image, "mask.png": image, "a.png": image})
    for decode, transform, fields in [
        (True, {"png": CROP, "mask.png": CROP}, ("png", "mask.png")),
        (True, {"png": BOTH, "mask.png": BOTH}, None),
        ({"a.png": images.palette}, {"png": CROP, "a.png;b.png": CROP}, ("png", "a.png;b.png")),
    ]:
        for make in (StreamLoader, TarDataset):
            with pytest.warns(UserWarning, match=r"'png' and '.*' at random.*images\.Joint") as said:
                make(tmp_path, fields=fields, decode=decode, transform=transform).close()
            assert [warning.filename for warning in said] == [__file__]
    for transform in [
        {"png": CROP, "a.png": CROP},  # a pair, or two views
        {"png": CROP, "mask.png": Resize((8, 8))},
        {"mask.png": CROP},
        {"png": CROP, "mask.png": lambda mask: mask},
    ]:
        StreamLoader(tmp_path, transform=transform, num_workers=0).close()  # a warning would be an error


# tensors


@pytest.mark.parametrize(
    "transform", [{"png": ToTensor()}, {"png": Compose([ToTensor(), Normalize([0.0] * 3, [1.0] * 3)])}]
)
def test_batches_of_tensors_are_contiguous_without_a_collate_function_too(shards: str, transform: Any) -> None:
    """So that a model's `x.view(len(x), -1)` works; several batches, since the first has no memory offered."""
    with StreamLoader(shards, 4, fields=("png", "cls"), transform=transform, num_workers=0) as loader:
        for batch, labels in loader:
            assert batch.is_contiguous()
            for image, number in zip(batch, labels.tolist(), strict=True):
                pixels = torch.from_numpy(sample(number)["png"])
                assert torch.equal(image, pixels.permute(2, 0, 1).float().div(255))
