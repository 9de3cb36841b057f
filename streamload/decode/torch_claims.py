"""Memory claims: how much memory a file of `torch.save` would take, checked before torch allocates it.

torch trusts the pickle in such a file: `bytearray(2_000_000_000)` and storages of any size take memory that no byte of
the file accounts for, and a tensor may repeat one element a billion times. So the pickle is read twice: first here,
where every name that it calls is a stand-in that only inspects its arguments.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from pickle import _Unpickler
from typing import Any, ClassVar, NamedTuple

from streamload.decode.array_files import check_entries, expansion_error

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
        limit_bytes: by how much its tensors may exceed the file.

    Raises:
        ExpansionError: all tensors together exceed the file by more than `limit_bytes`.
        ValueError: a storage is larger than what is stored, a tensor lies beyond its storage, or an object is made
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
    """Adds up what the file claims.

    Args:
        file_bytes: the size of the file.
        stored: bytes of the members of its archive; None where the storages follow the pickles.
        limit_bytes: by how much all tensors may exceed the file.
    """

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
            there, claimed = self._file_bytes, self._storage_bytes
        else:
            there, claimed = self._stored.get(f"data/{key}".lower(), 0), size_bytes
        if size_bytes < 0 or claimed > there:
            raise ValueError(f"a storage of {size_bytes} bytes is announced, and {there} bytes are there")
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


class _Made:
    """The result of calling a stand-in."""

    def __init__(self, claims: _Claims) -> None:
        self._claims = claims

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state and isinstance(state[0], _Storage):  # torch calls `set_` with it
            storage, start, shape, strides = state
            self._claims.add_tensor(storage, start, shape, strides, storage.element_bytes)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accepted for any class: torch itself refuses those that it does not know."""

    def append(self, value: Any) -> None:
        """See `__setitem__`."""

    def extend(self, values: Any) -> None:
        """See `__setitem__`."""


class _StandIn:
    """Replaces a class or function that a pickle names."""

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
        return _Made(self._claims)


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
