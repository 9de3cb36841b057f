"""Values to bytes, by extension."""

from __future__ import annotations

import gzip
import io
import math
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

from streamload.write.shard_writer import encode_field

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 3), np.uint8)


@pytest.mark.parametrize("value", [b"\0\xff", bytearray(b"\0\xff"), memoryview(b"\0\xff")])
@pytest.mark.parametrize("field", ["bin", "jpg", "pkl", "cls", "seg.png"])
def test_bytes_pass_everywhere(field: str, value: object) -> None:
    stored = encode_field(field, value)
    assert type(stored) is bytes
    assert stored == b"\0\xff"


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("txt", "é", "é".encode()),
        ("txt", 12, b"12"),
        ("cls", np.int64(7), b"7"),
        ("cls2", "7", b"7"),
        ("index", np.uint8(255), b"255"),
        ("id", -(2**63), b"-9223372036854775808"),
        ("json", '{"finished": 1}', b'{"finished": 1}'),
        ("json", {"b": [1, None, "é"], "a": True}, '{"b":[1,null,"é"],"a":true}'.encode()),
        ("meta.json", 1.5, b"1.5"),
    ],
)
def test_text_and_numbers(field: str, value: object, stored: bytes) -> None:
    assert encode_field(field, value) == stored


def test_arrays() -> None:
    assert np.array_equal(np.load(io.BytesIO(encode_field("npy", PIXELS)), allow_pickle=False), PIXELS)
    stored = encode_field("npz", {"a": PIXELS, "allow_pickle": np.float32(2)})
    with np.load(io.BytesIO(stored), allow_pickle=False) as found:
        assert set(found) == {"a", "allow_pickle"}
        assert np.array_equal(found["a"], PIXELS)
    assert stored == encode_field("npz", {"a": PIXELS, "allow_pickle": np.float32(2)})
    assert np.array_equal(safetensors.numpy.load(encode_field("safetensors", {"a": PIXELS}))["a"], PIXELS)


def test_tensors() -> None:
    tensor = torch.arange(4.0)
    assert torch.equal(torch.load(io.BytesIO(encode_field("pt", tensor)), weights_only=True), tensor)
    stored = encode_field("safetensors", {"a": tensor})
    assert np.array_equal(safetensors.numpy.load(stored)["a"], tensor.numpy())


@pytest.mark.parametrize("pixels", [PIXELS, PIXELS[..., :1], PIXELS[..., 0], Image.fromarray(PIXELS)])
@pytest.mark.parametrize("field", ["jpg", "jpeg", "jfif", "png", "webp"])
def test_images(field: str, pixels: np.ndarray | Image.Image) -> None:
    with Image.open(io.BytesIO(encode_field(field, pixels))) as image:
        assert image.size == (5, 7)
        assert image.format == {"jpg": "JPEG", "jpeg": "JPEG", "jfif": "JPEG", "png": "PNG", "webp": "WEBP"}[field]
        if field == "png":
            assert np.array_equal(np.asarray(image), np.squeeze(np.asarray(pixels)))


def test_a_large_jpeg_stays_close_to_its_pixels() -> None:
    smooth = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    with Image.open(io.BytesIO(encode_field("jpg", smooth))) as image:
        assert np.abs(np.asarray(image).astype(int) - smooth).max() <= 3


REFUSED: dict[str, list[object]] = {
    "cls": [True, np.True_, 1.5, "cat", None],
    "txt": [1.5, True],
    "jpg": ["path.jpg"],
    "png": [PIXELS.astype(np.float32), np.zeros((3, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8), PIXELS.tolist()],
    "npy": [[1, 2], np.array([object()])],
    "npz": [PIXELS, {"a": [1]}, {"a": np.array([None])}],
    "pt": [PIXELS],
    "json": [{"a": object()}, {"a": np.int64(1)}],
    "msgpack": [object()],
    "cbor": [object()],
    "pkl": [{"a": 1}],
    "mp4": [PIXELS, "text"],
    "unheard-of": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
def test_refuses_by_naming_field_and_type(field: str, value: object) -> None:
    with pytest.raises(
        TypeError, match=rf"field '{field}' got a value of type .*\.{type(value).__name__}, but \.{field} takes"
    ):
        encode_field(field, value)


@pytest.mark.parametrize("value", ["dog", "1_000", "\u0661"])  # the decoder refuses them all
def test_the_name_of_a_class_is_refused_with_the_way_to_write_it(value: str) -> None:
    message = rf"'{value}' is not an integer; number the classes, and name them in classes\.json"
    with pytest.raises(TypeError, match=message):
        encode_field("cls", value)


def test_a_tensor_is_stored_as_its_array() -> None:
    for tensor in (torch.arange(6).reshape(2, 3), torch.ones(2, requires_grad=True)):
        stored = np.load(io.BytesIO(encode_field("npy", tensor)), allow_pickle=False)
        assert np.array_equal(stored, tensor.detach().numpy())
        assert stored.dtype == tensor.detach().numpy().dtype


@pytest.mark.parametrize(
    ("field", "value"),
    [("json", math.nan), ("jpg", np.zeros((2, 2, 4), np.uint8)), ("jpg", Image.new("P", (2, 2)))],
)
def test_refuses_values_that_the_format_cannot_hold(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"field '{field}' cannot be stored"):
        encode_field(field, value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, str(10**20)])
def test_an_integer_that_could_not_be_read_back_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match="field 'cls' cannot be stored as .cls: .* is beyond int64"):
        encode_field("cls", value)


@pytest.mark.parametrize(
    ("field", "value"), [("txt.gz", "héllo"), ("json.gz", {"a": [1]}), ("npy.gz", PIXELS), ("x.cls.gz", 7)]
)
def test_what_is_compressed_is_encoded_first(field: str, value: Any) -> None:
    encoded = encode_field(field, value)
    assert gzip.decompress(encoded) == encode_field(field.removesuffix(".gz"), value)
    assert encode_field(field, value) == encoded, "no time is in it"
    with pytest.raises(TypeError, match=r"\.gz takes bytes only"):
        encode_field("gz", value)


def test_torch_files_hold_plain_containers_of_tensors() -> None:
    value = {"x": torch.ones(2), "y": [1, (2.5, None)], "z": "text"}
    loaded = torch.load(io.BytesIO(encode_field("pt", value)), weights_only=True)
    assert str(loaded) == str(value)
    with pytest.raises(TypeError, match="takes a torch tensor, or dicts"):
        encode_field("pt", {"x": PIXELS})
