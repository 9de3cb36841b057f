"""Decode a field's bytes with the decoder that the last extension of its name selects.

A decoder may get a view of memory that is reused after the call, so its result must own its memory. Data is never
executed, and sizes claimed in data are checked before memory is allocated.
"""

from __future__ import annotations

import ast
import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import by_field, normal_name
from streamload.images.files import decode_image
from streamload.tar.extensions import KIND_OF, Decode, Handler, Kind, decodes_as_built_in, last_extension
from streamload.text import counted

Encoded = memoryview | bytearray | bytes
"""The bytes of a field. A decoder may keep a `bytearray` or `bytes`, but not a memoryview, whose memory is reused."""

Decoder = Callable[[Any], Any]
"""Decode bytes to a value. Raises `ValueError`, or the user function's errors, for bytes in another format."""

DECOMPRESSED_LIMIT_BYTES = 513 << 20
"""Maximum excess of a decoded field over its stored bytes: enough for a volume of 512 x 512 x 512 float32, or
an image of `PIXEL_LIMIT`."""

_MAGIC = b"\x93NUMPY"
_HEADER_LIMIT_BYTES = 10_000  # as in NumPy: parsing longer literals may take much time and memory
_version_and_length = struct.Struct("<6xBxH").unpack_from
_long_length = struct.Struct("<I").unpack_from

_INT64_LIMIT = 1 << 63

_GZIP_WINDOW_BITS = 31  # makes zlib expect a gzip header
_GZIP_PIECE_BYTES = 1 << 20
_GZIP_CHUNK_BYTES = 1 << 14  # small, since zlib copies the rest of a chunk at the end of every member

_ZIP = b"PK\x03\x04"
_BYTEARRAYS = (b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n")


class ExpansionError(ValueError):
    """Raised for a field whose decoded value would exceed the stored bytes by more than the limit."""


def decoder_for(field: str, decode: Decode = True) -> Decoder:
    """Return the decoder of a field.

    Args:
        field: the full name, such as `"jpg"`, `"seg.png"` or `"depth.npy.gz"`. The last extension decides; `gz` is
            decompressed and then decoded by the extension before it. Unknown extensions give bytes.
        decode: True for the built-in decoders; False for bytes; a tuple of `Handler`; or a mapping to functions of
            `bytes`, or to such tuples, to use instead of the built-in decoders. Its keys are full names, which take
            precedence, or last extensions, or several of these (`"jpg;png"`).

    Raises:
        ValueError: two keys of `decode` name the same field.
    """
    if decode is False:
        return bytes
    field = normal_name(field)
    extension = last_extension(field)
    users: Mapping[str, Any] = by_field("decode", decode) if isinstance(decode, Mapping) else {}
    if isinstance(decode, tuple) and extension != "gz":  # WebDataset also decompresses before it calls handlers
        users = {extension: decode}
    for name in (field, extension):
        if name in users:
            user: Decoder | tuple[Handler, ...] = users[name]
            return partial(_handled, user, field) if isinstance(user, tuple) else user
    if extension == "gz":
        inner_field = field.rpartition(".")[0]
        inner = decoder_for(inner_field, decode)
        if decodes_as_built_in(inner_field, decode):
            return lambda data: inner(decompress_gzip(data))
        return lambda data: inner(bytes(decompress_gzip(data)))
    return _BY_EXTENSION.get(extension, bytes)


def _handled(handlers: tuple[Handler, ...], field: str, data: bytes) -> Any:
    """Return the first result of WebDataset's handlers that is not None, else the built-in decoder's."""
    key, content = f".{field}", data
    for handler in handlers:
        value = handler(key, content)
        # WebDataset's class for decompressed data, which goes to the next handlers
        if type(value).__name__ == "Continue":
            key, content = value.key, value.data
        elif value is not None:
            return value
    return decoder_for(key)(memoryview(content))


def decode_integer(data: memoryview) -> int:
    """Decode a decimal integer that fits an int64, with optional sign and surrounding white space.

    Raises:
        ValueError: the text is not such an integer.
    """
    text = bytes(data)
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"not an integer: {text[:40]!r}; pass a decoder in decode={{...}}") from None
    if b"_" in text or (len(text) > 18 and not -_INT64_LIMIT <= value < _INT64_LIMIT):
        raise ValueError(f"not an integer of up to 64 bits in plain digits: {text[:40]!r}")
    return value


def _decode_text(data: memoryview) -> str:
    try:
        return str(data, "utf-8").removeprefix("\ufeff")  # byte order mark
    except UnicodeDecodeError as exc:
        raise ValueError(f"not text in utf-8 ({exc}); pass a decoder in decode={{...}}, such as bytes") from exc


def _decode_json(data: memoryview) -> Any:
    try:
        return json.loads(bytes(data))
    except RecursionError as exc:
        raise ValueError("the json document is nested too deeply to be read") from exc


class NpyLayout(NamedTuple):
    """The contents of an npy header.

    Attributes:
        dtype: never of Python objects.
        order: "F" if the elements are stored column by column, else "C".
        start: offset of the first element, in bytes.
        end: offset after the last element, in bytes.
        aligned: elements at `start` are aligned if the buffer's first byte is.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    start: int
    end: int
    aligned: bool


def decode_npy(data: memoryview | bytearray) -> NDArray[Any]:
    """Decode an npy file (version 1, 2 or 3) to a writable array: on `data` if a bytearray and aligned, else a copy.

    Bytes after the last element are ignored, as by `numpy.load`.

    Raises:
        ValueError: `data` is not an npy file, holds Python objects, or is shorter than its header claims.
    """
    shape, dtype, order, start, end, aligned = npy_layout(data)
    if len(data) < end:
        raise ValueError(
            f"the npy file is cut off: its header announces {end - start} bytes for shape {shape} of {dtype}, but "
            f"only {max(len(data) - start, 0)} follow; write the sample again"
        )
    # Copying the whole file and making an array on the copy costs half as much as slicing, wrapping and copying.
    memory = data if isinstance(data, bytearray) else bytearray(data)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, start, None, order)
    return array if aligned else array.copy(order)


def npy_layout(data: memoryview | bytearray) -> NpyLayout:
    """Parse the npy header at the start of `data`.

    Raises:
        ValueError: `data` does not start with a valid npy header, or the elements are Python objects.
    """
    if len(data) < 12:
        raise ValueError(f"not an npy file: {counted(len(data), 'byte')} cannot hold a header")
    version, header_bytes = _version_and_length(data)
    start: int = 10 + header_bytes
    if version != 1:
        start = 12 + _long_length(data, 8)[0]
    if start > len(data) or start > _HEADER_LIMIT_BYTES:
        _check_magic(bytes(data[:6]))
        raise ValueError(
            f"the npy file announces a header of {start} bytes; the file has {len(data)} bytes, and the limit is "
            f"{_HEADER_LIMIT_BYTES}"
        )
    return _parse_header(bytes(data[:start]))


def _check_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise ValueError(f"not an npy file: it begins with {magic!r} instead of {_MAGIC!r}")


@lru_cache(maxsize=256)
def _parse_header(head: bytes) -> NpyLayout:
    _check_magic(head[:6])
    version = head[6]
    if version not in (1, 2, 3):
        raise ValueError(f"npy format version {version} is not known; write the file as version 1, 2 or 3")
    text = head[10 if version == 1 else 12 :]
    try:
        header = ast.literal_eval(text.decode("utf-8" if version == 3 else "latin-1").strip())
        shape, fortran, described = header["shape"], header["fortran_order"], header["descr"]
        dtype = np.lib.format.descr_to_dtype(described)
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError, MemoryError, RecursionError) as exc:
        raise ValueError(f"the npy header cannot be read ({exc}): {text[:80]!r}") from exc
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"the npy header has no valid shape: {text[:80]!r}")
    if not isinstance(fortran, bool):
        raise ValueError(f"the npy header has no valid fortran_order: {text[:80]!r}")
    if dtype.hasobject:
        raise ValueError(
            f"the npy file holds Python objects (dtype {dtype}), which are refused because only pickle reads them; "
            "store plain numbers, or pass a decoder for this field in decode={...}"
        )
    start = len(head)
    end = start + math.prod(shape) * dtype.itemsize
    return NpyLayout(shape, dtype, "F" if fortran else "C", start, end, start % dtype.alignment == 0)


def decode_npz(data: memoryview, limit_bytes: int = DECOMPRESSED_LIMIT_BYTES) -> dict[str, Any]:
    """Decode an npz file to a dict: arrays for members `name.npy` (as `name`), bytes for any other.

    Raises:
        ValueError: `data` is not a complete zip archive, a member is damaged, or neither stored nor deflated, a name
            occurs twice, or the contents exceed `data` by more than `limit_bytes`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            check_entries(entries, len(data), limit_bytes)
            values: dict[str, Any] = {}
            for entry in entries:
                name, content = entry.filename, archive.open(entry).read(entry.file_size)
                is_array = name.endswith(".npy")
                values[name.removesuffix(".npy")] = decode_npy(memoryview(content)) if is_array else content
            if len(values) < len(entries):
                raise ValueError("an array and another member have the same name, with and without .npy")
            return values
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, struct.error) as exc:
        raise ValueError(f"not a complete npz file: {exc}") from exc


def check_entries(entries: Sequence[zipfile.ZipInfo], archive_bytes: int, limit_bytes: int) -> None:
    """Check the entries of a zip archive before decompression.

    Raises:
        ExpansionError: the contents exceed the archive by more than the limit.
        ValueError: a name occurs twice, or a member is neither stored nor deflated.
    """
    decompressed = sum(entry.file_size for entry in entries)
    if decompressed > archive_bytes + limit_bytes:
        raise ExpansionError(
            f"the archive decompresses to {decompressed} bytes; the limit is {archive_bytes + limit_bytes}. If that is "
            "intended, store the values uncompressed as npy, or pass a decoder for this field in decode={...}"
        )
    if len({entry.filename for entry in entries}) != len(entries):
        raise ValueError("the archive holds two members with the same name")
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"member {entry.filename!r} is compressed with zip method {entry.compress_type}; "
                "only stored and deflated members are read"
            )


def decompress_gzip(data: memoryview, limit_bytes: int = DECOMPRESSED_LIMIT_BYTES) -> bytearray:
    """Decompress a gzip file of one or several members; trailing zeros are ignored.

    Raises:
        ExpansionError: the contents exceed the file by more than `limit_bytes`.
        ValueError: the file is damaged or cut off.
    """
    decompressed, most_bytes = bytearray(), len(data) + limit_bytes
    for piece in _gzip_pieces(data):
        decompressed += piece
        if len(decompressed) > most_bytes:
            raise ExpansionError(
                f"the gzip file decompresses to more than the limit of {most_bytes} bytes. If that is intended, store "
                "the values uncompressed, or pass a decoder for this field in decode={...}"
            )
    return decompressed


def _gzip_pieces(data: memoryview) -> Iterator[bytes]:
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


def _decode_torch(data: memoryview) -> Any:
    import torch

    content = pickled = bytes(data)
    stored_bytes = len(content)
    try:
        if content.startswith(_ZIP):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                entries = archive.infolist()
                check_entries(entries, len(content), DECOMPRESSED_LIMIT_BYTES)
                pickled = b"".join(archive.read(entry) for entry in entries if entry.filename.endswith("data.pkl"))
            stored_bytes = sum(entry.file_size for entry in entries if "/data/" in entry.filename)
        if any(name in pickled for name in _BYTEARRAYS):  # torch allocates any size that the file claims
            raise ValueError("it holds a bytearray; save bytes or a tensor of uint8 instead")
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except ExpansionError:
        raise
    except Exception as exc:  # damaged files make torch raise nearly anything
        problem = str(exc) if isinstance(exc, ValueError | RuntimeError) else f"{type(exc).__name__}: {exc}"
        raise ValueError(f"torch.load(weights_only=True) cannot read it: {problem}") from exc
    tensors = [each for each in _tensors(value) if each.layout is torch.strided]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (each.untyped_storage() for each in tensors)}
    if sum(storages.values()) > stored_bytes:  # torch trusts the claimed sizes, and would read beyond the stored bytes
        raise ValueError(f"its tensors claim more than the {counted(stored_bytes, 'byte')} stored for them")
    expanded_bytes = sum(each.numel() * each.element_size() for each in tensors)
    if expanded_bytes > len(content) + DECOMPRESSED_LIMIT_BYTES:
        raise ExpansionError(
            f"its tensors expand from {len(content)} bytes to {expanded_bytes}; the limit is "
            f"{len(content) + DECOMPRESSED_LIMIT_BYTES}. Store repeated values once, and expand them in your transform"
        )
    return value


def _tensors(value: Any) -> list[Any]:
    import torch

    tensors, pending, seen = [], [value], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        elif isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            pending += each
    return tensors


def _decode_by_library(data: memoryview, *, module: str, function: str, name: str, **options: Any) -> Any:
    try:
        decode = getattr(import_module(module), function)
    except ImportError as exc:
        package = module.partition(".")[0]
        raise ImportError(
            f'this field needs the package {package!r}, which is not installed: pip install "streamload[codecs]"'
        ) from exc
    try:
        return decode(bytes(data), **options)
    except Exception as exc:  # the libraries raise their own subclasses of Exception, among others
        raise ValueError(f"not a {name}: {exc or type(exc).__name__}") from exc


_BY_KIND: dict[Kind, Decoder] = {
    Kind.IMAGE: decode_image,
    Kind.TEXT: _decode_text,
    Kind.INTEGER: decode_integer,
    Kind.JSON: _decode_json,
    Kind.ARRAY: decode_npy,
    Kind.ARRAYS: decode_npz,
    Kind.TORCH: _decode_torch,
    Kind.SAFETENSORS: partial(_decode_by_library, module="safetensors.torch", function="load", name="safetensors file"),
    Kind.MSGPACK: partial(
        _decode_by_library, module="msgpack", function="unpackb", name="msgpack document", strict_map_key=False
    ),
    Kind.CBOR: partial(_decode_by_library, module="cbor2", function="loads", name="cbor document"),
}

_BY_EXTENSION = {extension: _BY_KIND[kind] for extension, kind in KIND_OF.items() if kind in _BY_KIND}

DECODED_EXTENSIONS = frozenset(_BY_EXTENSION)
"""Extensions decoded to something other than bytes."""
