"""Decode the bytes of a field to a value, by the last extension of the field's name.

A decoder may get a view of memory that is reused after the call, so its result owns its memory. Nothing in the data is
executed, and sizes that the data claims are checked before memory is allocated.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pickle import _Unpickler
from typing import Any, ClassVar, NamedTuple

from streamload.arguments import alternatives, by_field, normal_name
from streamload.decode.array_files import (
    DECOMPRESSED_LIMIT_BYTES,
    ExpansionError,
    check_entries,
    decode_npy,
    decode_npz,
    expansion_error,
)
from streamload.images.files import decode_image
from streamload.tar.extensions import KIND_OF, Kind
from streamload.text import counted

_ZIP = b"PK\x03\x04"  # as torch tells the formats apart
_OLD_PICKLES = 5  # magic number, version, system, the object, and the keys of the storages that follow
_REBUILD_TENSOR = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
_DTYPE = 6  # its index in the arguments of _rebuild_tensor_v3, whose storage is bytes
_PLAIN: dict[str, Any] = {"OrderedDict": OrderedDict, "Counter": Counter, "set": set, "Size": tuple, "complex": complex}
_ELEMENT_BYTES = {
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def check_claims(data: bytes, limit_bytes: int) -> None:
    """Refuse a file of `torch.save` that claims more memory than its bytes account for.

    Args:
        data: the whole file, in the zip format or the older one.
        limit_bytes: by how much all tensors together may exceed the file.

    Raises:
        ExpansionError: the tensors exceed the file by more.
        ValueError: a storage is larger than its stored bytes, a tensor lies beyond its storage, or an object is made
            from a mere size.
        Exception: the file is damaged: whatever `zipfile` and `pickle` raise.
    """
    if not data.startswith(_ZIP):
        stream, claims = io.BytesIO(data), _Claims(len(data), None, limit_bytes)
        for _ in range(_OLD_PICKLES):
            _DryRun(stream, claims).load()
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        check_entries(entries, len(data), limit_bytes)
        sizes = {entry.filename.partition("/")[2].lower(): entry.file_size for entry in entries}
        pickles = [entry for entry in entries if entry.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1 or len(sizes) != len(entries):
            raise ValueError("the archive does not hold one data.pkl, and every other name once")
        _DryRun(io.BytesIO(archive.read(pickles[0])), _Claims(len(data), sizes, limit_bytes)).load()


class _Storage(NamedTuple):
    size_bytes: int
    element_bytes: int


class _Claims:
    """Adds up the memory that a file claims; `stored` is None if the storages follow the pickles."""

    def __init__(self, file_bytes: int, stored: dict[str, int] | None, limit_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._limit_bytes = limit_bytes
        self._stored = stored
        self._storages: dict[Any, int] = {}
        self._storage_bytes = 0
        self._tensor_bytes = 0

    def add_storage(self, key: Any, size_bytes: int) -> int:
        """Add a storage and return its bytes; the same key is the same storage, as for torch."""
        if key in self._storages:
            return self._storages[key]
        self._storages[key] = size_bytes
        self._storage_bytes += size_bytes
        if self._stored is None:
            existing, claimed = self._file_bytes, self._storage_bytes
        else:
            existing, claimed = self._stored.get(f"data/{key}".lower(), 0), size_bytes
        if size_bytes < 0 or claimed > existing:
            raise ValueError(f"a storage of {size_bytes} bytes is announced, and {existing} bytes are there")
        return size_bytes

    def add_tensor(self, storage: _Storage, start: int, shape: Any, strides: Any, element_bytes: int) -> None:
        elements = math.prod(shape)
        last = start + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        lengths = (start, *shape, *strides)
        if min(lengths) < 0 or (elements and (last + 1) * element_bytes > storage.size_bytes):
            raise ValueError(f"a tensor of shape {tuple(shape)} lies beyond its storage of {storage.size_bytes} bytes")
        self._tensor_bytes += elements * element_bytes
        if self._tensor_bytes > self._file_bytes + self._limit_bytes:
            raise expansion_error(
                f"it expands from {self._file_bytes} bytes to {self._tensor_bytes} (its last tensor has shape "
                f"{tuple(shape)}); the limit is {self._limit_bytes} more. Store what is repeated once, and "
                "expand it in your transform",
                self._tensor_bytes - self._file_bytes,
            )


class _StandIn:
    """Replaces a class or function that a pickle names, and the result of calling it."""

    def __init__(self, name: str, claims: _Claims) -> None:
        self.name = name
        self._claims = claims

    def __call__(self, *arguments: Any) -> Any:
        if self.name in _REBUILD_TENSOR:
            storage, start, shape, strides = arguments[:4]
            element = storage.element_bytes
            if self.name == "_rebuild_tensor_v3":
                element = _dtype_bytes(arguments[_DTYPE].name)
            self._claims.add_tensor(storage, start, shape, strides, element)
        elif self.name == "_rebuild_from_type_v2":
            function, _, inner, _ = arguments
            return function(*inner)
        elif self.name.endswith(("Tensor", "Storage", "bytearray")) and any(
            isinstance(argument, int | tuple) for argument in arguments
        ):
            raise ValueError(f"it makes a {self.name} of a mere size, {arguments!r:.80}")
        return _StandIn("", self._claims)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state and isinstance(state[0], _Storage):  # torch calls `set_` with it
            storage, start, shape, strides = state
            self._claims.add_tensor(storage, start, shape, strides, storage.element_bytes)

    def _accept(self, *_: Any) -> None:
        """Do nothing, for any class: torch itself refuses those that it does not know."""

    __setitem__ = append = extend = _accept


class _DryRun(_Unpickler):
    """Reads a pickle without importing or calling anything that it names."""

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in _Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]},
        pickle.NEWOBJ[0]: _Unpickler.dispatch[pickle.REDUCE[0]],
    }
    """Without BYTEARRAY8, which allocates what it announces; torch reads no opcode so new."""

    def __init__(self, stream: io.BytesIO, claims: _Claims) -> None:
        super().__init__(stream)
        self._claims = claims

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in, or one of a few plain classes."""
        del module
        return _PLAIN.get(name) or _StandIn(name, self._claims)

    def persistent_load(self, pid: Any) -> _Storage:
        """The storage that torch would allocate."""
        _, kind, key, _, elements, *view = pid
        element_bytes = _ELEMENT_BYTES.get(kind.name.removesuffix("Storage"), 1)
        size_bytes = self._claims.add_storage(key, elements * element_bytes)
        if view and view[0] is not None:
            size_bytes = min(size_bytes, view[0][2] * element_bytes)
        return _Storage(size_bytes, element_bytes)


def _dtype_bytes(name: str) -> int:
    bits = re.search(r"\d+", name)
    return max(1, int(bits.group()) // 8) if bits else 1


Encoded = memoryview | bytearray | bytes
"""The bytes of a field. The decoder may keep a `bytearray` or `bytes`; a memoryview is reused after the call."""

Decoder = Callable[[Any], Any]
"""Bytes to a value. Raises `ValueError`, or whatever the user's function raises, for bytes of another format."""

_GZIP_WINDOW_BITS = 31  # zlib's spelling of "a gzip header is expected"
_GZIP_PIECE_BYTES = 1 << 20
_GZIP_CHUNK_BYTES = 1 << 14  # small, since zlib copies the rest of a chunk at the end of every member
_INT64_LIMIT = 1 << 63


def decoder_for(
    field: str,
    decode: bool | Mapping[str, Callable[[bytes], Any]] = True,
    limit_bytes: int = DECOMPRESSED_LIMIT_BYTES,
) -> Decoder:
    """Return the decoder of a field.

    Args:
        field: the full name, such as `"jpg"`, `"seg.png"` or `"depth.npy.gz"`. The last extension decides; `gz` is
            decompressed and then decoded by the extension before it. Unknown extensions give bytes.
        decode: True for the built-in decoders, False for bytes, or a mapping from a full name, which takes precedence,
            or a last extension, or several (`"jpg;png"`), to a function of `bytes`, besides the built-in decoders.
        limit_bytes: by how much a decoded field may exceed its stored bytes, for `gz`, `npz` and `pt`.

    Raises:
        TypeError: `decode` is something else, or holds something that is not callable.
        ValueError: two of its keys name the same field.
    """
    if decode is False:
        return bytes
    users: Mapping[str, Decoder] = {}
    if decode is not True:
        if not isinstance(decode, Mapping):
            raise TypeError(f"decode must be True, False or a mapping from extension to function, not {decode!r}")
        for name, function in decode.items():
            if not isinstance(name, str) or not callable(function):
                raise TypeError(f"decode[{name!r}] must be a function of bytes under a field's name, not {function!r}")
        users = by_field("decode", decode)
    field = normal_name(field)
    extension = _last_extension(field)
    for name in (field, extension):
        if name in users:
            return users[name]
    if extension == "gz":
        inner_field = field.rpartition(".")[0]
        inner = decoder_for(inner_field, decode, limit_bytes)
        if decodes_as_built_in(inner_field, decode):
            return lambda data: inner(decompress_gzip(data, limit_bytes))
        return lambda data: inner(bytes(decompress_gzip(data, limit_bytes)))
    if extension in _EXPANDING:
        return partial(_EXPANDING[extension], limit_bytes=limit_bytes)
    return _BY_EXTENSION.get(extension, bytes)


def decodes_as_built_in(field: str, decode: bool | Mapping[str, Callable[[bytes], Any]] = True) -> bool:
    """Return True if the library itself decodes a field, so that a faster decoder may replace its own."""
    if isinstance(decode, bool):
        return decode
    names = {name for key in decode for name in alternatives(key)}
    return normal_name(field) not in names and _last_extension(normal_name(field)) not in names


def applies_to(key: str, field: str) -> bool:
    """Return True if a decoder for this key (fields or extensions) is used for a field."""
    names, field = alternatives(key), normal_name(field)
    return any(not {each, _last_extension(each)}.isdisjoint(names) for each in (field, field.removesuffix(".gz")))


def may_expand(field: str, decode: bool | Mapping[str, Callable[[bytes], Any]] = True) -> bool:
    """Return True if the library decodes a field by a decoder with a `limit_bytes`."""
    return decodes_as_built_in(field, decode) and _last_extension(normal_name(field)) in {"gz", *_EXPANDING}


def is_image(field: str) -> bool:
    """Return True if the built-in decoder of a field is that of images, so that `from_encoded` can replace it."""
    return KIND_OF.get(_last_extension(normal_name(field))) is Kind.IMAGE


def is_array(field: str) -> bool:
    """Return True if the built-in decoder of a field is that of npy files, which keeps a `bytearray`."""
    return KIND_OF.get(_last_extension(normal_name(field))) is Kind.ARRAY


def _last_extension(field: str) -> str:
    return field.rpartition(".")[2]


def decompress_gzip(data: memoryview, limit_bytes: int = DECOMPRESSED_LIMIT_BYTES) -> bytearray:
    """Return the contents of a gzip file of one or several members; zeros after the last are ignored.

    Raises:
        ExpansionError: the contents exceed the file by more than `limit_bytes`.
        ValueError: the file is damaged or cut off.
    """
    decompressed, excess_bytes = bytearray(), -len(data)
    for piece in _gzip_pieces(data):
        excess_bytes += len(piece)
        if excess_bytes <= limit_bytes:
            decompressed += piece
            continue
        decompressed.clear()
        if excess_bytes > DECOMPRESSED_LIMIT_BYTES:
            break  # until then it may be sound, and only too large for the budget
    if excess_bytes > limit_bytes:
        raise expansion_error(
            f"the gzip file decompresses to more than the limit of {len(data) + limit_bytes} bytes. If it is no bomb, "
            "store the values uncompressed, or hand over a decoder for this field with decode={...}",
            excess_bytes,
        )
    return decompressed


def _gzip_pieces(data: memoryview) -> Iterator[bytes]:
    """Yield the contents in pieces of at most `_GZIP_PIECE_BYTES`."""
    position, stream = 0, zlib.decompressobj(_GZIP_WINDOW_BITS)
    while True:
        chunk = data[position : position + _GZIP_CHUNK_BYTES]
        try:
            piece = stream.decompress(chunk, _GZIP_PIECE_BYTES)
        except zlib.error as exc:
            raise ValueError(f"not a gzip file, or a damaged one: {exc}") from exc
        position += len(chunk) - len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        yield piece
        if stream.eof:
            while position < len(data) and data[position] == 0:
                position += 1
            if position == len(data):
                return
            stream = zlib.decompressobj(_GZIP_WINDOW_BITS)
        elif not piece and position == len(data):
            raise ValueError(f"the gzip file is cut off after {counted(len(data), 'byte')}; write the sample again")


def decode_integer(data: memoryview) -> int:
    """Decode a decimal integer that fits an int64, with optional sign and surrounding white space.

    Raises:
        ValueError: the text is something else.
    """
    text = bytes(data)
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"not an integer: {text[:40]!r}; decode={{...}} takes a decoder of yours") from None
    if b"_" in text or (len(text) > 18 and not -_INT64_LIMIT <= value < _INT64_LIMIT):
        raise ValueError(f"not an integer of up to 64 bits in plain digits: {text[:40]!r}")
    return value


def _decode_text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as exc:
        raise ValueError(f"not text in utf-8 ({exc}); decode={{...}} takes a decoder of yours, such as bytes") from exc


def _decode_json(data: memoryview) -> Any:
    try:
        return json.loads(bytes(data))
    except RecursionError as exc:
        raise ValueError("the json document is nested too deeply to be read") from exc


def _decode_torch(data: memoryview, limit_bytes: int) -> Any:
    import torch

    content = bytes(data)
    try:
        check_claims(content, limit_bytes)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except ExpansionError:
        raise
    except Exception as exc:  # damaged files make torch raise nearly anything
        what = str(exc) if isinstance(exc, ValueError | RuntimeError) else f"{type(exc).__name__}: {exc}"
        raise ValueError(f"torch.load(weights_only=True) cannot read it: {what}") from exc


def _decode_by_library(data: memoryview, *, module: str, function: str, what: str, **options: Any) -> Any:
    try:
        decode = getattr(import_module(module), function)
    except ImportError as exc:
        package = module.partition(".")[0]
        raise ImportError(
            f'this field needs the package {package!r}, which is not installed: pip install "streamload[codecs]"'
        ) from exc
    try:
        return decode(bytes(data), **options)
    except Exception as exc:  # the libraries' own errors are plain subclasses of Exception, and they raise others too
        raise ValueError(f"not a {what}: {exc or type(exc).__name__}") from exc


_BY_KIND: dict[Kind, Decoder] = {
    Kind.IMAGE: decode_image,
    Kind.TEXT: _decode_text,
    Kind.INTEGER: decode_integer,
    Kind.JSON: _decode_json,
    Kind.ARRAY: decode_npy,
    Kind.SAFETENSORS: partial(_decode_by_library, module="safetensors.torch", function="load", what="safetensors file"),
    Kind.MSGPACK: partial(
        _decode_by_library, module="msgpack", function="unpackb", what="msgpack document", strict_map_key=False
    ),
    Kind.CBOR: partial(_decode_by_library, module="cbor2", function="loads", what="cbor document"),
}
# These also take `limit_bytes`.
_EXPANDING_BY_KIND: dict[Kind, Callable[..., Any]] = {Kind.ARRAYS: decode_npz, Kind.TORCH: _decode_torch}

_BY_EXTENSION = {extension: _BY_KIND[kind] for extension, kind in KIND_OF.items() if kind in _BY_KIND}
_EXPANDING = {extension: _EXPANDING_BY_KIND[kind] for extension, kind in KIND_OF.items() if kind in _EXPANDING_BY_KIND}

DECODED_EXTENSIONS = frozenset(_BY_EXTENSION) | frozenset(_EXPANDING)
"""Extensions that are decoded to something other than bytes."""
