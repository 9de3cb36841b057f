"""`ShardWriter`: samples to shards of bounded size, published whole or not at all; same samples, same bytes."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import numpy as np

from streamload.arguments import advises, check_int, parse_bytes
from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import IndexedShard
from streamload.index.shard_names import SHARD_WRITER, ShardNaming, destination_of, write_mark
from streamload.storage.storages import Storages
from streamload.tar.header_writer import member_header
from streamload.tar.scan import LABEL_FIELD
from streamload.tar.table import ShardTable
from streamload.text import counted
from streamload.warn_at_caller import warn_at_caller
from streamload.write.destination import ConsecutiveShards, Destination, indexed
from streamload.write.encode import encode_field
from streamload.write.shard_file import Member

_LABEL = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class ShardWriter:
    """Writes samples into numbered shards with an index, locally or in a bucket; the same samples, the same bytes.

    Locally, a shard has a hidden name until it is complete and on the disk. Remotely, it grows in an unnamed temporary
    file and is uploaded when it is full, completely or not at all. The index comes last; its tables are held in memory,
    about 100 bytes per sample. `pack` writes with several processes.

    An exception in the `with` block discards the unfinished shard and writes no index. Readers refuse the published
    shards as incomplete until they are written again with `overwrite=True` (or `.streamload-unfinished.json` is
    removed). Not thread-safe, and only one process at a time may write to a remote folder.

    Attributes:
        folder: the folder of the shards and the index.
        samples: number of samples written so far.
    """

    @advises
    def __init__(
        self,
        pattern_or_folder: str | os.PathLike[str],
        *,
        max_bytes: int | str = 256_000_000,
        max_count: int | None = None,
        prefix: str = "shard",
        index: bool = True,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
    ) -> None:
        """Check the destination; nothing is written yet. A remote folder is listed once.

        Args:
            pattern_or_folder: a folder, where shards are named `<prefix>-000000.tar`, or a path that ends in `.tar` and
                has a `%06d` for the shard's number: `s3://bucket/train-%06d.tar`. A missing folder is created.
            max_bytes: maximum size of a shard with headers and end-of-archive marker: a number of bytes, or "256MB".
            max_count: maximum number of samples in a shard.
            prefix: the beginning of names in a folder.
            index: write `.streamload/` beside the shards at `close()`.
            overwrite: remove existing shards with such names, and their index entries, when the first new shard is
                published.
            storage_options: credentials and the like, as for `StreamLoader`.
            filesystem: an fsspec filesystem to write with, as for `StreamLoader`.

        Raises:
            TypeError, ValueError: an argument is wrong.
            StorageError: there are shards with such names and `overwrite` is false, or the folder cannot be accessed.
        """
        folder, self._names = destination_of(pattern_or_folder, prefix)
        check_counts(max_count=max_count)
        self._index = index
        self._closed = False
        self._destination = Destination(folder, Storages(storage_options, filesystem))
        self._shards = ConsecutiveShards(
            self._destination,
            self._names.name,
            max_bytes=parse_bytes("max_bytes", max_bytes),
            max_count=max_count,
            replace=overwrite,
            before_first=partial(_clear, self._destination, self._names, overwrite),
        )
        self.folder = self._destination.folder
        self.samples = 0
        existing = self._destination.existing(self._names)
        self._replaces = bool(existing)
        if existing and not overwrite:
            raise StorageError(
                f"{without_secrets(self.folder)!r} holds {counted(len(existing), 'shard')} of this name already, from "
                f"{existing[0]!r} on; choose another folder or prefix, or pass overwrite=True to replace them",
                url=os.path.join(self.folder, existing[0]),
            )

    @property
    def bytes(self) -> int:
        """The size of the published shards together."""
        return sum(shard.table.shard_bytes for shard in self._shards.published)

    @property
    def shards(self) -> tuple[str, ...]:
        """The paths or urls of the published shards."""
        return tuple(os.path.join(self.folder, shard.name) for shard in self._shards.published)

    @property
    def tables(self) -> tuple[tuple[IndexedShard, ShardTable], ...]:
        """The index entries and tables of the published shards, as `IndexFolder.update_with_tables` takes them."""
        return tuple(indexed(self._shards.published))

    def write(self, sample: Mapping[str, object]) -> None:
        """Append a sample; its fields are stored in the mapping's order.

        Args:
            sample: `"__key__"` and one value for each field, encoded by the field's extension (`encode_field`). Other
                names of the form `__x__` are skipped, so a sample from a loader can be written as it is.

        Raises:
            TypeError, ValueError: the sample cannot be stored, or would be read back differently, or its key is in the
                shard already, or it is too large. Nothing of it was written, and the writer can go on.
            StorageError, DatasetIndexError: the shard cannot be written, or the index of old shards is broken; the
                unfinished shard is discarded and the writer is closed.
        """
        if self._closed:
            raise ValueError("this ShardWriter is closed; make a new one, with another prefix or folder")
        key = checked_key(sample)
        members = sample_members(key, sample)
        try:
            if not self.samples and self._shards.growing is None:
                self._destination.remove_abandoned(self._names)
            self._shards.append(key, members, label_of(members))
        except StreamloadError:
            self._abandon()
            raise
        self.samples += 1

    def write_arrays(self, **columns: Any) -> None:
        """Append one sample for each row of arrays of equal length, with keys of nine digits: `000000000`.

        Args:
            columns: arrays or CPU tensors with the same first dimension, by name, as `x=X, y=y`. A row is stored as the
                field `<name>.npy` with the array's type and the row's shape; a column `cls` of integers (N,) is the
                label. The arrays of a `.npz` file are given as `write_arrays(**np.load("data.npz"))`.

        Raises:
            TypeError, ValueError: there is no column, a column is not an array of rows, or lengths differ; nothing was
                written. Or a row cannot be stored, as by `write`; the rows before it were written.
            StorageError, DatasetIndexError: as by `write`.
        """
        arrays = {name: np.asarray(column) for name, column in columns.items()}
        for name, array in arrays.items():
            no_label = name == LABEL_FIELD and (array.ndim != 1 or array.dtype.kind not in "iu")
            if no_label or array.ndim == 0 or array.dtype == object:
                raise TypeError(
                    f"column {name!r} is {array.dtype} of shape {array.shape}; it must be an array of numbers with one "
                    f"row per sample, and the label {LABEL_FIELD!r} one integer per sample"
                )
        if len({len(array) for array in arrays.values()}) != 1 or len({*map(str.lower, arrays)}) < len(arrays):
            rows = ", ".join(f"{name} {len(array):,}" for name, array in arrays.items())
            raise ValueError(
                f"write_arrays needs arrays with the same number of rows, whose names differ not only in case ({rows})"
            )
        fields = {name: name if name == LABEL_FIELD else f"{name.lower()}.npy" for name in arrays}
        for row in range(len(next(iter(arrays.values())))):
            sample: dict[str, object] = {"__key__": f"{self.samples:09d}"}
            for name, array in arrays.items():
                sample[fields[name]] = int(array[row]) if name == LABEL_FIELD else np.asarray(array[row])
            self.write(sample)

    def close(self) -> None:
        """Publish the last shard and write the index. Idempotent. Raises StorageError."""
        if self._closed:
            return
        try:
            self._shards.finish()
            if self._shards.published:
                if self._index:
                    self._destination.index.update_with_tables(self.tables)
                write_mark(self._destination.storage, self.folder, self._names, None)
            elif self._replaces:
                warn_at_caller(
                    f"no sample was written, so the shards in {without_secrets(self.folder)!r} to be overwritten are "
                    "there still"
                )
        finally:
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def __del__(self) -> None:
        shards = getattr(self, "_shards", None)
        if shards is not None and shards.growing is not None:
            self._abandon()
            warnings.warn(
                f"a ShardWriter for {without_secrets(self.folder)!r} was dropped without close(): its last shard is "
                "discarded and no index is written; use it in a with block",
                stacklevel=2,
            )

    def _abandon(self) -> None:
        self._closed = True
        self._shards.close()


def _clear(folder: Destination, names: ShardNaming, overwrite: bool) -> None:
    """Mark a folder as unfinished; remove shards to be overwritten, and entries of shards deleted by hand."""
    write_mark(folder.storage, folder.folder, names, SHARD_WRITER)
    existing = folder.existing(names)
    if overwrite or not existing:
        folder.remove(names, existing)


def check_counts(**numbers: int | None) -> None:
    """Raise TypeError or ValueError for a number that is neither None nor an integer of at least 1."""
    for name, number in numbers.items():
        if number is not None:
            check_int(name, number, 1, "or None")


def checked_key(sample: Mapping[str, object]) -> str:
    """Return the key of a sample. Raise TypeError or ValueError for one that readers would not find again."""
    if not isinstance(sample, Mapping):
        raise TypeError(f"a sample must be a mapping of fields, not {type(sample).__name__}")
    if "__key__" not in sample:
        raise ValueError(f"a sample needs a '__key__'; this one has {sorted(map(str, sample))}")
    key = sample["__key__"]
    if not isinstance(key, str):
        raise TypeError(f"'__key__' must be a str, not {type(key).__name__}: {key!r}")
    components = key.split("/")
    first, last = components[0], components[-1]
    is_special = first.startswith("__") or last.startswith("__")
    if is_special or "." in last or not {"", ".", ".."}.isdisjoint(components) or _UNSAFE.search(key):
        raise ValueError(
            f"key {key!r} would be read back differently; a key is a plain relative path, without control characters, "
            "surrogates, a dot in its last component, or '__' at the beginning of the first or last one"
        )
    return key


def sample_members(key: str, sample: Mapping[str, object]) -> list[Member]:
    """Encode the fields of a sample. Raises TypeError, ValueError or ImportError for a field that cannot be stored."""
    members = []
    for field, value in sample.items():
        if not isinstance(field, str):
            raise TypeError(f"sample {key!r}: a field's name must be a str, not {field!r}")
        is_special = field.startswith("__") and field.endswith("__")
        if is_special and field.strip("_"):
            continue
        if is_special or "" in field.split(".") or "/" in field or _UNSAFE.search(field) or field != field.lower():
            raise ValueError(
                f"sample {key!r}: {field!r} is no field; a field is a lower-case file name extension such as 'jpg' or "
                "'seg.png', without '/', empty parts or control characters, and not underscores alone"
            )
        try:
            payload = encode_field(field, value)
        except (TypeError, ValueError, ImportError) as exc:
            exc.add_note(f"in sample {key!r}")
            raise
        members.append((field, member_header(f"{key}.{field}", len(payload)), payload))
    if not members:
        raise ValueError(f"sample {key!r} has no field; give it at least one beside '__key__'")
    return members


def label_of(members: list[Member]) -> int | None:
    """Return the integer in the label's field, by the rules of `scan_shard`; or None."""
    payload = next((payload for field, _, payload in members if field == LABEL_FIELD), b"")
    match = _LABEL.fullmatch(payload) if len(payload) <= 64 else None
    label = int(match[1]) if match else None
    return label if label is not None and -(1 << 63) <= label < 1 << 63 else None
