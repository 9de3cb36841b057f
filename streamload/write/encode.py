"""Encode the value of a field by its extension, as the inverse of the decoders; nothing is pickled."""

from __future__ import annotations

import gzip
import io
import json
import operator
import sys
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from streamload.tar.extensions import IMAGE_FORMATS, KIND_OF, Kind

_JPEG_QUALITY = 95
_INT64_LIMIT = 1 << 63

_PILLOW_MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
}


def encode_field(field: str, value: object) -> bytes:
    """Return the bytes to store for one field of a sample, encoded by the last extension of its name.

    Every extension takes bytes-like objects. Beside these, text (`txt`, `json`, `csv`, ...) takes `str` (for `json`,
    finished JSON), `cls`, `cls2`, `count`, `index`, `id`, `inx` and `txt` take `int`, `json` and `jsn` what JSON knows,
    `jpg`, `jpeg`, `jpe`, `jfif`, `png`, `apng` and `webp` a uint8 HW or HWC array or a Pillow image, `npy` an array,
    `npz` and `safetensors` a mapping of arrays, `pt` and `pth` a torch tensor or plain containers of tensors and plain
    values, `msgpack`, `msg`, `mp` and `cbor` plain data, and `x.gz` what `x` takes. By default the loader returns the
    same kind of value, except that integers in `txt` become text.

    Raises:
        TypeError: the extension does not hold such a value; the message names field, type and what is accepted.
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
    encode, accepted = _ENCODERS.get(extension, (None, _UNKNOWN))
    try:
        if encode is None:
            raise TypeError
        return encode(value)
    except TypeError as exc:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        detail = f": {exc}" if str(exc) else ""
        message = f"field {field!r} got a value of type {kind}, but .{extension} takes {accepted}{detail}"
        raise TypeError(message) from None
    except ImportError as exc:
        raise ImportError(
            f"field {field!r} needs a package that is not installed ({exc}); pip install 'streamload[codecs]'"
        ) from exc
    except ValueError as exc:
        raise ValueError(f"field {field!r} cannot be stored as .{extension}: {exc}") from exc


def _integer(value: Any) -> bytes:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise TypeError(f"{value!r:.40} is not one") from None
    if not -_INT64_LIMIT <= number < _INT64_LIMIT:
        raise ValueError(f"{number} has more than 64 bits, and could not be read back; store it as txt")
    return value.encode("utf-8") if isinstance(value, str) else b"%d" % number


def _text(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return value.encode("utf-8")


def _txt(value: object) -> bytes:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return b"%d" % int(value)
    return _text(value)


def _json(value: object) -> bytes:
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return value.encode("utf-8")


def _image(form: str, value: object) -> bytes:
    from PIL import Image

    if isinstance(value, np.ndarray):
        channels = value.shape[2] if value.ndim == 3 else 1
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or channels not in (1, 3, 4) or value.size == 0:
            raise TypeError(f"this array is {value.dtype} of shape {value.shape}")
        image = Image.fromarray(value[..., 0] if value.ndim == 3 and channels == 1 else value)
        if form == "WEBP" and channels == 1:
            image = image.convert("RGB")
    elif isinstance(value, Image.Image):
        image = value
    else:
        raise TypeError
    if image.mode not in _PILLOW_MODES[form]:
        raise ValueError(f"it cannot hold a {image.mode} image; convert it first, for example with .convert('RGB')")
    buffer = io.BytesIO()
    image.save(buffer, form, **({} if form == "PNG" else {"quality": _JPEG_QUALITY}))
    return buffer.getvalue()


def _array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if _is_tensor(value):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{type(value).__name__} is not an array")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("objects would have to be pickled")
    return array


def _npy(value: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, _array(value), allow_pickle=False)
    return buffer.getvalue()


def _arrays(value: object) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return {name: _array(array) for name, array in value.items()}


def _npz(value: object) -> bytes:
    # np.savez takes names as keyword arguments, so an array cannot be called "file".
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in _arrays(value).items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), _npy(array))  # a ZipInfo without a time
    return buffer.getvalue()


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a program that has a tensor has imported torch; others should not pay for it
    return torch is not None and isinstance(value, torch.Tensor)


def _is_plain(value: Any) -> bool:
    """Return True if `torch.load(weights_only=True)` restores the value."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_plain, value)) and (type(value) is not dict or all(map(_is_plain, value.values())))
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or _is_tensor(value)


def _pt(value: object) -> bytes:
    if not _is_plain(value):
        raise TypeError
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _safetensors(value: object) -> bytes:
    if isinstance(value, Mapping) and value and all(map(_is_tensor, value.values())):
        from safetensors.torch import save as save_tensors

        return bytes(save_tensors(dict(value)))
    from safetensors.numpy import save as save_arrays

    return bytes(save_arrays(_arrays(value)))


def _msgpack(value: object) -> bytes:
    import msgpack

    return bytes(msgpack.packb(value, use_bin_type=True))


def _cbor(value: object) -> bytes:
    import cbor2

    try:
        return bytes(cbor2.dumps(value))
    except cbor2.CBOREncodeError as exc:
        raise TypeError(exc) from None


_UNKNOWN = "bytes only: streamload has no encoder for it; encode the value first"
_ARRAYS = "a mapping of names to NumPy arrays of numbers, bools or fixed-width strings"
_PLAIN = "dicts, lists, strings, bytes, numbers, bools and None"
_PIXELS = (
    "the bytes of an image file, a uint8 array of shape (height, width[, 1, 3 or 4]) or a Pillow image; leave the "
    "field out of samples without an image"
)

_BY_KIND: dict[Kind, tuple[Callable[[Any], bytes] | None, str]] = {
    Kind.TEXT: (_text, "a str or bytes"),
    Kind.INTEGER: (_integer, "an int of up to 64 bits, or bytes or a str that hold one in decimal digits"),
    Kind.JSON: (_json, "finished JSON as a str, or dicts, lists, numbers, bools and None"),
    Kind.ARRAY: (_npy, "NumPy arrays of numbers, bools or fixed-width strings"),
    Kind.ARRAYS: (_npz, _ARRAYS),
    Kind.TORCH: (_pt, "a torch tensor, or dicts, lists and tuples of tensors, numbers, strings and None"),
    Kind.SAFETENSORS: (_safetensors, _ARRAYS),
    Kind.MSGPACK: (_msgpack, _PLAIN),
    Kind.CBOR: (_cbor, _PLAIN),
    Kind.PICKLE: (None, "bytes only: unpickling runs code from the data; use npz, json or msgpack instead"),
}
_ENCODERS: dict[str, tuple[Callable[[Any], bytes] | None, str]] = {
    **{extension: _BY_KIND[kind] for extension, kind in KIND_OF.items() if kind in _BY_KIND},
    **{name: (partial(_image, form), _PIXELS) for name, form in IMAGE_FORMATS.items() if form in _PILLOW_MODES},
    "txt": (_txt, "a str, an int or bytes"),
}
# The extensions that take other values than bytes.
ENCODED_EXTENSIONS = frozenset(name for name, (encode, _) in _ENCODERS.items() if encode is not None)
