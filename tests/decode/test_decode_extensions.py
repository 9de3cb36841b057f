"""What is written under an extension is read back, and extensions mean what they mean to WebDataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from webdataset import autodecode, writer

from streamload.decode.decoders import DECODED_EXTENSIONS, decoder_for
from streamload.tar.extensions import IMAGE_FORMATS, KIND_OF, Kind, is_image
from streamload.write.encode import ENCODED_EXTENSIONS, encode_field

PIXELS = np.full((6, 4, 3), 80, np.uint8)
ARRAYS = {"a": np.arange(5), "b": np.eye(2)}
TENSOR = torch.arange(4.0)
PLAIN = {"a": [1, "é", None], "b": {"c": 1.5}}


def of(wanted: Kind) -> set[str]:
    return {extension for extension, kind in KIND_OF.items() if kind is wanted}


def value_for(extension: str) -> Any:
    """A value that goes and comes back as it is; of an extension that no kind has, an error."""
    return next(
        value
        for kind, value in (
            (of(Kind.TEXT), "zażółć\n1,2\n"),
            (of(Kind.INTEGER), -7),
            (of(Kind.JSON) | of(Kind.MSGPACK) | of(Kind.CBOR), PLAIN),
            (of(Kind.ARRAY), ARRAYS["a"]),
            (of(Kind.ARRAYS) | of(Kind.SAFETENSORS), ARRAYS),
            (of(Kind.TORCH), TENSOR),
            (IMAGE_FORMATS, PIXELS),
        )
        if extension in kind
    )


def as_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_plain(each) for name, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("extension", sorted(ENCODED_EXTENSIONS))
def test_what_is_written_is_read_back(extension: str) -> None:
    value = value_for(extension)
    for field in (extension, f"x.{extension}", f"X.{extension.upper()}"):
        got = decoder_for(field)(memoryview(encode_field(field.lower(), value)))
        assert (type(got) is type(value)) or extension == "safetensors"
        assert as_plain(got) == as_plain(value)


def test_only_images_are_read_that_cannot_be_written() -> None:
    assert ENCODED_EXTENSIONS <= DECODED_EXTENSIONS
    assert {"avif", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"} == DECODED_EXTENSIONS - ENCODED_EXTENSIONS
    assert all(map(is_image, DECODED_EXTENSIONS - ENCODED_EXTENSIONS))


@pytest.mark.parametrize("extension", sorted(ENCODED_EXTENSIONS))
def test_a_str_is_read_back_as_a_str_where_nothing_else_is_meant(extension: str) -> None:
    try:
        data = encode_field(extension, "12")
    except TypeError:
        assert extension not in of(Kind.TEXT)
        return
    got = decoder_for(extension)(memoryview(data))
    meant = {**dict.fromkeys(of(Kind.INTEGER) | of(Kind.JSON), 12), **dict.fromkeys(of(Kind.MSGPACK), "12")}
    assert got == meant.get(extension, "12")


def test_text_in_another_encoding_says_how_to_read_it() -> None:
    with pytest.raises(ValueError, match=r"not text in utf-8 .*0xe9.*decode=\{\.\.\.\}.*bytes"):
        decoder_for("html")(memoryview("né".encode("latin-1")))
    assert decoder_for("html", {"html": bytes})(memoryview(b"n\xe9")) == b"n\xe9"


def test_the_extensions_that_are_promised() -> None:
    texts = "txt text transcript caption jsonl csv tsv xml html md yaml"
    assert set(texts.split()) <= of(Kind.TEXT)
    assert IMAGE_FORMATS.keys() >= {"jpg", "jpeg", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"}


NEVER = of(Kind.PICKLE) | {"ten", "tb"}


@pytest.mark.parametrize("extension", sorted(autodecode.decoders.keys() - NEVER - {"cbor", "npz"}))
def test_what_webdataset_reads_is_read_as_it_reads_it(extension: str) -> None:
    data = encode_field(extension, value_for(extension))
    ours, theirs = decoder_for(extension)(memoryview(data)), autodecode.decoders[extension](data)
    assert type(ours) is type(theirs)
    assert as_plain(ours) == as_plain(theirs)


@pytest.mark.parametrize("extension", sorted(writer.default_handlers.keys() & ENCODED_EXTENSIONS - {"cbor"}))
def test_what_webdataset_writes_is_read_back(extension: str) -> None:
    value = value_for(extension)
    got = decoder_for(extension)(memoryview(writer.default_handlers[extension](value)))
    assert type(got) is type(value)
    assert as_plain(got) == as_plain(value)


def test_what_webdataset_reads_or_writes_is_left_out_by_intention_only() -> None:
    named = autodecode.decoders.keys() | writer.default_handlers.keys()
    assert named - DECODED_EXTENSIONS == {*NEVER, "tenbin", "class", "img", "image"}
