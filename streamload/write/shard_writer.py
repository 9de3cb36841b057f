"""`ShardWriter`: samples to shards of bounded size, published whole or not at all; same samples, same bytes."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import advises, as_python, parse_bytes
from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import IndexedShard
from streamload.index.shard_names import destination_of
from streamload.storage.storages import Storages
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, member_header
from streamload.tar.scan import LABEL_FIELD
from streamload.tar.table import ShardTable
from streamload.text import counted
from streamload.warn_at_caller import warn_at_caller
from streamload.write.destination import destination_in
from streamload.write.encode import encode_field
from streamload.write.shard_file import GrowingShard, Member

_LABEL = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class ShardWriter:
    """Writes samples into numbered shards and an index beside them, here or in a bucket.

    Locally, each shard appears under its name only when it is complete and on the disk; until then it has a hidden
    name. Remotely, each is written to a temporary file without a name and uploaded when it is full, whole or not at
    all, before the next one begins; what was uploaded before a failure stays. The index comes last. `pack` uploads
    from several processes.

    Bytes depend on the samples alone (no times, no owners), so the same samples give the same shards and the same
    index. Leaving the `with` block by an exception discards the unfinished shard and writes no index; shards that were
    published before stay, and readers refuse them as incomplete until they are written again with `overwrite=True` (or
    the mark `.streamload-unfinished.json` is removed). The tables for the index are kept in memory until `close()`:
    some 100 bytes a sample.
    Not safe for several threads, and only one process at a time may write to a remote folder.

    Attributes:
        folder: where the shards and the index go.
        samples: how many samples were written so far.
        bytes: the size of the published shards together.
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
            pattern_or_folder: a folder, which is made if needed and where shards are named `<prefix>-000000.tar`, or a
                path that ends in `.tar` and holds a `%06d` for the shard's number: `s3://bucket/train-%06d.tar`.
            max_bytes: no shard is larger than this, headers and end-of-archive marker included: a number of bytes, or
                "256MB".
            max_count: no shard holds more samples than this.
            prefix: how names begin where a folder was given.
            index: write `.streamload/` beside the shards at `close()`.
            overwrite: replace the shards of this name that exist already. All of them are removed, and their entries
                in the index, when the first new shard is published.
            storage_options: credentials and the like, as for `StreamLoader`.
            filesystem: an fsspec filesystem to write with, as for `StreamLoader`.

        Raises:
            TypeError, ValueError: an argument of the wrong kind; the message names it.
            StorageError: shards of this name exist and `overwrite` is false, or the folder cannot be read or written.
        """
        folder, self._names = destination_of(pattern_or_folder, prefix)
        self._max_bytes = parse_bytes("max_bytes", max_bytes)
        self._max_count = None if max_count is None else _positive("max_count", max_count)
        self._index = index
        self.samples = 0
        self.bytes = 0
        self._published: list[tuple[IndexedShard, ShardTable]] = []
        self._shard: GrowingShard | None = None
        self._closed = False
        self._destination = destination_in(folder, Storages(storage_options, filesystem))
        self.folder = self._destination.folder
        try:
            existing = self._destination.existing(self._names)
        except OSError as exc:
            raise self._storage_error(exc) from exc
        self._overwrite = overwrite
        self._keeps_old = bool(existing)
        if existing and not overwrite:
            raise StorageError(
                f"{without_secrets(self.folder)!r} holds {counted(len(existing), 'shard')} of this name already, from "
                f"{existing[0]!r} on; choose another folder or prefix, or pass overwrite=True to replace them",
                url=os.path.join(self.folder, existing[0]),
            )

    @property
    def shards(self) -> tuple[str, ...]:
        """The paths or urls of the shards published so far."""
        return tuple(os.path.join(self.folder, shard.name) for shard, _ in self._published)

    @property
    def tables(self) -> tuple[tuple[IndexedShard, ShardTable], ...]:
        """What an index of the shards published so far holds, as `write_index` takes it."""
        return tuple(self._published)

    def write(self, sample: Mapping[str, object]) -> None:
        """Append one sample; its members are stored in the mapping's order.

        Args:
            sample: `"__key__"` and one value for each field, encoded by the field's extension (`encode_field`). Other
                names of the form `__x__` are skipped, so a sample that a loader gave can be written as it is.

        Raises:
            TypeError, ValueError: the sample cannot be stored, or would not be read back as it is, or its key stands
                in the shard already, or it is too large for a shard of its own. Nothing of it was written, and the
                writer can go on.
            StorageError: the shard cannot be written; the unfinished shard is gone and the writer is closed.
            DatasetIndexError: shards are to be overwritten and the index beside them is broken; the same holds.
        """
        if self._closed:
            raise ValueError("this ShardWriter is closed; make a new one, with another prefix or folder")
        self._keeps_old = False
        key = checked_key(sample)
        members = sample_members(key, sample)
        sample_bytes = sum(member_bytes(header, len(payload)) for _, header, payload in members)
        if sample_bytes + len(END_OF_ARCHIVE) > self._max_bytes:
            raise ValueError(
                f"sample {key!r} makes a shard of {sample_bytes + len(END_OF_ARCHIVE):,} bytes on its own, and "
                f"max_bytes is {self._max_bytes:,}; raise max_bytes or make the sample smaller"
            )
        shard = self._shard
        full = shard is not None and (shard.bytes + sample_bytes > self._max_bytes or len(shard) == self._max_count)
        if self._shard is not None and not full and key in self._shard:
            raise ValueError(f"key {key!r} stands in this shard already; keys must differ, for example by a number")
        try:
            if self._shard is not None and full:
                self._publish(self._shard)
            if self._shard is None:
                self._shard = self._destination.create(self._names.name(len(self._published)))
            self._shard.append(key, members, label_of(members))
        except OSError as exc:
            self._abandon()
            raise self._storage_error(exc) from exc
        except StreamloadError:
            self._abandon()
            raise
        self.samples += 1

    def write_arrays(self, **columns: Any) -> None:
        """Append one sample for each row of arrays of equal length, in their order.

        Keys are the numbers of the writer's samples, of nine digits: `000000000`.

        Args:
            columns: by name, arrays or CPU tensors of the same first dimension, as `x=X, y=y`. A row is stored as the
                field `<name>.npy` with the array's type and the row's shape; a column `cls` of integers (N,) is the
                label. The arrays of a `.npz` file are given as `write_arrays(**np.load("data.npz"))`.

        Raises:
            TypeError, ValueError: there is no column, a column is no array of rows, or lengths differ; nothing was
                written. Or a row cannot be stored, as by `write`; the rows before it were written.
            StorageError, DatasetIndexError: as by `write`.
        """
        arrays = _checked_columns(columns)
        fields = {name: name if name == LABEL_FIELD else f"{name.lower()}.npy" for name in arrays}
        for row in range(len(next(iter(arrays.values())))):
            sample: dict[str, object] = {"__key__": f"{self.samples:09d}"}
            for name, array in arrays.items():
                sample[fields[name]] = int(array[row]) if name == LABEL_FIELD else np.asarray(array[row])
            self.write(sample)

    def close(self) -> None:
        """Publish the last shard and write the index; a second call does nothing.

        Raises:
            StorageError: the shard or the index cannot be written; the unfinished shard is gone.
        """
        if self._closed:
            return
        try:
            if self._shard is not None:
                self._publish(self._shard)
            if self._index and self._published:
                self._destination.write_index(self._published)
            if self._published:
                self._destination.finish(self._names)
            if self._keeps_old:
                warn_at_caller(
                    f"no sample was written, so the shards in {without_secrets(self.folder)!r} to be overwritten are "
                    "there still"
                )
        except OSError as exc:
            raise self._storage_error(exc) from exc
        finally:
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def __del__(self) -> None:
        if getattr(self, "_shard", None) is not None:
            self._abandon()
            warnings.warn(
                f"a ShardWriter for {without_secrets(self.folder)!r} was dropped without close(): its last shard is "
                "discarded and no index is written; use it in a with block",
                stacklevel=2,
            )

    def _publish(self, shard: GrowingShard) -> None:
        if not self._published:
            self._destination.clear(self._names, shards=self._overwrite)
        table = shard.publish(replace=self._overwrite)
        self._shard = None
        self.bytes += table.shard_bytes
        # No time of modification: it would make the bytes of the index differ from run to run.
        entry = IndexedShard.of(shard.name, table, etag=shard.etag)
        self._published.append((entry, table))

    def _abandon(self) -> None:
        self._closed = True
        if self._shard is not None:
            shard, self._shard = self._shard, None
            shard.discard()
        self._destination.close()

    def _storage_error(self, exc: OSError) -> StorageError:
        return StorageError(
            f"cannot write shards to {self.folder!r}: {exc.strerror or exc}; check that the folder can be written and "
            "the disk is not full",
            url=exc.filename if isinstance(exc.filename, str) else None,
        )


def _positive(argument: str, value: object) -> int:
    value = as_python(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an int, not {type(value).__name__}: {value!r}")
    if value <= 0:
        raise ValueError(f"{argument} must be at least 1, not {value}")
    return value


def _checked_columns(columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The columns as arrays of one length, at least one of them."""
    if not columns:
        raise ValueError("write_arrays needs at least one array, as in write_arrays(x=X, y=y)")
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    for name, array in arrays.items():
        if array.ndim == 0 or array.dtype == object:
            shape = f"an array of shape {array.shape} and type {array.dtype}"
            raise TypeError(f"column {name!r} must be an array of numbers with one row per sample, not {shape}")
    label = arrays.get(LABEL_FIELD)
    if label is not None and (label.ndim != 1 or label.dtype.kind not in "iu"):
        raise TypeError(
            f"column {LABEL_FIELD!r} is the label, one integer per sample, not {label.dtype} of shape {label.shape}; "
            "give it another name, such as y"
        )
    if len({name.lower() for name in arrays}) < len(arrays):
        raise ValueError(f"columns {sorted(arrays)} differ only in case, and fields are lower-case; rename them")
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} {len(array):,}" for name, array in arrays.items())
        raise ValueError(f"the arrays differ in length ({lengths} rows); give each the same number of rows")
    return arrays


def checked_key(sample: Mapping[str, object]) -> str:
    """The sample's key, if readers would find exactly this key again; else TypeError or ValueError."""
    if not isinstance(sample, Mapping):
        raise TypeError(f"a sample must be a mapping of fields, not {type(sample).__name__}")
    if "__key__" not in sample:
        raise ValueError(f"a sample needs a '__key__'; this one has {sorted(map(str, sample))}")
    key = sample["__key__"]
    if not isinstance(key, str):
        raise TypeError(f"'__key__' must be a str, not {type(key).__name__}: {key!r}")
    wrong = _wrong_with_key(key)
    if wrong:
        raise ValueError(f"key {key!r} {wrong}")
    return key


def _wrong_with_key(key: str) -> str | None:
    components = key.split("/")
    if not key:
        return "is empty; give every sample a name of its own"
    if "" in components or "." in components or ".." in components:
        return "is not a plain relative path; leave out empty components, '.' and '..'"
    if "." in components[-1]:
        return "has a dot in its last component, where readers end the key; replace it, for example by '_'"
    if components[0].startswith("__") or components[-1].startswith("__"):
        return "begins with '__', which readers take for something that is no sample; choose another name"
    if _CONTROL.search(key):
        return "holds a control character; replace it"
    try:
        key.encode("utf-8")
    except UnicodeEncodeError:
        return "cannot be written as UTF-8; replace its surrogates"
    return None


def sample_members(key: str, sample: Mapping[str, object]) -> list[Member]:
    """Each field with its header blocks and payload, checked and encoded, nothing written.

    Raises:
        TypeError, ValueError, ImportError: a field cannot be stored.
    """
    members = []
    for field, value in sample.items():
        if not isinstance(field, str):
            raise TypeError(f"sample {key!r}: a field's name must be a str, not {field!r}")
        is_special = field.startswith("__") and field.endswith("__")
        if is_special and field.strip("_"):
            continue
        if is_special or "" in field.split(".") or "/" in field or _CONTROL.search(field) or field != field.lower():
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
    """The integer in the field that holds the label, by the rules of `scan_shard`."""
    for field, _, payload in members:
        if field == LABEL_FIELD:
            match = _LABEL.fullmatch(payload) if len(payload) <= 64 else None
            label = int(match[1]) if match else None
            return label if label is not None and -(1 << 63) <= label < 1 << 63 else None
    return None
