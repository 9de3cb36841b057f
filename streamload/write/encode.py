"""One field's value to the bytes that are stored, chosen by the field's extension.

The inverse of the decoders, for `ShardWriter`. Bytes always pass unchanged; everything else must be of a type that the
extension is read back as. Nothing is pickled.
"""

from __future__ import annotations

import gzip
import io
import json
import operator
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, SupportsIndex, cast

import numpy as np

from streamload.tar.extensions import IMAGE_FORMATS, KIND_OF, Kind

JPEG_QUALITY = 95
_INT64_LIMIT = 1 << 63

_PILLOW_MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
}


class _UnsuitableError(Exception):
    """A value that an extension cannot hold; the message says what the extension accepts."""


def encode_field(field: str, value: object) -> bytes:
    """The bytes to store for one field of a sample.

    Accepted, beside bytes-like objects for every extension: `str` for text (`txt`, `json`, `csv`, ...; a `str` for
    `json` is taken for finished JSON), `int` for `cls`, `cls2`, `count`, `index`, `id`, `inx` and `txt`, what JSON
    knows for `json` and `jsn`, a uint8 HW or HWC array or a Pillow image for `jpg`, `jpeg`, `jpe`, `jfif`, `png`,
    `apng` and `webp`, an array for `npy`, a mapping of arrays for `npz` and `safetensors`, for `pt` and `pth` a torch
    tensor, or plain containers with tensors and plain values in them, plain data for `msgpack`, `msg`, `mp` and `cbor`;
    and for `x.gz` what `x` takes. By default the loader gives the same kind of value back, but for integers in `txt`,
    which are text there.

    Args:
        field: the field's name; what follows its last dot is the extension.
        value: what to store.

    Raises:
        TypeError: this extension does not hold such a value; the message names the field, the type and what it accepts.
        ValueError: the type is right and the value is not (NaN in JSON, an RGBA image for `jpg`).
        ImportError: the extension needs a package that is not installed.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    inner, _, extension = field.rpartition(".")
    if extension == "gz" and inner:
        return gzip.compress(encode_field(inner, value), mtime=0)
    try:
        return _encoder(extension)(value)
    except _UnsuitableError as exc:
        raise TypeError(
            f"field {field!r} got a value of type {type(value).__module__}.{type(value).__qualname__}, but "
            f".{extension} {exc}"
        ) from None
    except ImportError as exc:
        raise ImportError(f"field {field!r} needs a package that is not installed ({exc}); {_CODECS}") from exc
    except ValueError as exc:
        raise ValueError(f"field {field!r} cannot be stored as .{extension}: {exc}") from exc


_CODECS = "pip install 'streamload[codecs]'"


def _encoder(extension: str) -> Callable[[Any], bytes]:
    if KIND_OF.get(extension) is Kind.PICKLE:
        raise _UnsuitableError("takes bytes only: unpickling runs code from the data; use npz, json or msgpack instead")
    if extension not in _ENCODERS:
        raise _UnsuitableError("takes bytes only: streamload has no encoder for it; encode the value first")
    return _ENCODERS[extension]


def _integer(value: object) -> bytes:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(cast("SupportsIndex", value))
    except (TypeError, ValueError):
        accepts = "takes an int of up to 64 bits, or bytes or a str that hold one in decimal digits"
        raise _UnsuitableError(f"{accepts}, and {value!r:.40} is not one") from None
    if not -_INT64_LIMIT <= number < _INT64_LIMIT:
        raise ValueError(f"{number} has more than 64 bits, and could not be read back; store it as txt")
    return value.encode("utf-8") if isinstance(value, str) else b"%d" % number


def _text(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8")
    raise _UnsuitableError("takes a str or bytes")


def _txt(value: object) -> bytes:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return b"%d" % int(value)
    return _text(value)


def _json(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except TypeError as exc:
        raise _UnsuitableError(
            f"takes finished JSON as a str, or dicts, lists, numbers, bools and None: {exc}"
        ) from None


def _image(form: str, value: object) -> bytes:
    from PIL import Image

    if isinstance(value, np.ndarray):
        channels = value.shape[2] if value.ndim == 3 else 1
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or channels not in (1, 3, 4) or value.size == 0:
            raise _UnsuitableError(
                "takes a uint8 array of shape (height, width[, 1, 3 or 4]) or a Pillow image, "
                f"not {value.dtype} of shape {value.shape}"
            )
        image = Image.fromarray(value[..., 0] if value.ndim == 3 and channels == 1 else value)
        if form == "WEBP" and channels == 1:
            image = image.convert("RGB")
    elif isinstance(value, Image.Image):
        image = value
    else:
        raise _UnsuitableError(
            "takes the bytes of an image file, a uint8 array of shape (height, width[, channels]) or a Pillow image; "
            "of a sample without this field leave the field out"
        )
    if image.mode not in _PILLOW_MODES[form]:
        raise ValueError(f"it cannot hold a {image.mode} image; convert it first, for example with .convert('RGB')")
    buffer = io.BytesIO()
    image.save(buffer, form, **({} if form == "PNG" else {"quality": JPEG_QUALITY}))
    return buffer.getvalue()


def _array(value: object) -> np.ndarray[Any, np.dtype[Any]]:
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise _UnsuitableError(f"takes NumPy arrays, not {type(value).__name__}")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise _UnsuitableError(
            "takes arrays of numbers, bools or fixed-width strings: objects would have to be pickled"
        )
    return array


def _npy(value: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, _array(value), allow_pickle=False)
    return buffer.getvalue()


def _arrays(value: object) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _UnsuitableError("takes a mapping of names to NumPy arrays")
    return {name: _array(array) for name, array in value.items()}


def _npz(value: object) -> bytes:
    # np.savez takes names as keyword arguments, and so has no place for an array called "file".
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in _arrays(value).items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), _npy(array))  # a ZipInfo of its own holds no time
    return buffer.getvalue()


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it; nobody else should pay for it
    return torch is not None and isinstance(value, torch.Tensor)


def _is_plain(value: object) -> bool:
    """Whether `torch.load(weights_only=True)` gives it back: tensors and plain values, in plain containers."""
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(inner) for key, inner in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, cast("Iterable[object]", value)))
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or _is_tensor(value)


def _pt(value: object) -> bytes:
    if not _is_plain(value):
        raise _UnsuitableError("takes a torch tensor, or dicts, lists and tuples of tensors, numbers, strings and None")
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _safetensors(value: object) -> bytes:
    if isinstance(value, Mapping) and value and all(_is_tensor(tensor) for tensor in value.values()):
        from safetensors.torch import save as save_tensors

        return bytes(save_tensors(dict(value)))
    from safetensors.numpy import save as save_arrays

    return bytes(save_arrays(_arrays(value)))


def _msgpack(value: object) -> bytes:
    import msgpack

    try:
        return bytes(msgpack.packb(value, use_bin_type=True))
    except TypeError as exc:
        raise _UnsuitableError(f"takes dicts, lists, strings, bytes, numbers, bools and None: {exc}") from None


def _cbor(value: object) -> bytes:
    import cbor2

    try:
        return bytes(cbor2.dumps(value))
    except cbor2.CBOREncodeError as exc:
        raise _UnsuitableError(f"takes dicts, lists, strings, bytes, numbers, bools and None: {exc}") from None


_BY_KIND: dict[Kind, Callable[[Any], bytes]] = {
    Kind.TEXT: _text,
    Kind.INTEGER: _integer,
    Kind.JSON: _json,
    Kind.ARRAY: _npy,
    Kind.ARRAYS: _npz,
    Kind.TORCH: _pt,
    Kind.SAFETENSORS: _safetensors,
    Kind.MSGPACK: _msgpack,
    Kind.CBOR: _cbor,
}
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    **{extension: _BY_KIND[kind] for extension, kind in KIND_OF.items() if kind in _BY_KIND},
    **{extension: partial(_image, form) for extension, form in IMAGE_FORMATS.items() if form in _PILLOW_MODES},
    "txt": _txt,
}

ENCODED_EXTENSIONS = frozenset(_ENCODERS)
"""The extensions that take other values than bytes."""
