"""Write samples into shards: `ShardWriter`, and its parts that packing uses.

A shard has a maximum size, and is published whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import json
import operator
import os
import re
import secrets
import sys
import tempfile
import warnings
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedWriter, FileIO
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np

from streamload.arguments import advises, check_int, parse_bytes
from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard, IndexFolder, locked_folder
from streamload.index.listing import SHARD_WRITER, ShardNaming, destination_of, write_mark
from streamload.storage.local_files import LocalStorage, local_path
from streamload.storage.protocol import WEB, ShardInfo, Storage, escaped, protocol_of
from streamload.storage.storages import Storages
from streamload.tar.extensions import IMAGE_FORMATS, KIND_OF, Kind
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, member_header, padding
from streamload.tar.scan import LABEL_FIELD, ShardTable, parse_label
from streamload.text import counted, warn_at_caller

Member = tuple[str, bytes, bytes]  # a field, its header blocks and its payload

_BUFFER_BYTES = 1 << 17
_MAX_FIELDS = 1 << 16
_INT64_LIMIT = 1 << 63
_DECIMAL = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_JPEG_QUALITY = 95
_PILLOW_MODES = {
    "JPEG": ("L", "RGB", "CMYK"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
}
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")


class ShardWriter:
    """Write samples into numbered shards with an index, in a local folder or a bucket.

    A local shard has a hidden name until it is complete and flushed to disk. A remote shard grows in an unnamed
    temporary file, and is uploaded when it is full. `close()` writes the index; until then its tables are held in
    memory, about 100 bytes per sample. The same samples give the same bytes. `pack` writes with several processes.

    An exception in the `with` block discards the unfinished shard and writes no index. Readers refuse the
    published shards as incomplete until the shards are written again with `overwrite=True` (or
    `.streamload-unfinished.json` is removed). Not thread-safe, and only one process at a time may write to a remote
    folder.

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
        """Check the arguments and the destination, and write nothing yet. A remote folder is listed once.

        Args:
            pattern_or_folder: a folder, where shards are named `<prefix>-000000.tar`, or a path that ends in `.tar` and
                has a `%06d` for the shard's number: `s3://bucket/train-%06d.tar`. A missing folder is created.
            max_bytes: maximum size of a shard with headers and end-of-archive marker: a number of bytes, or "256MB".
            max_count: maximum number of samples in a shard.
            prefix: the beginning of names in a folder.
            index: write `.streamload/` beside the shards at `close()`.
            overwrite: remove existing shards whose names match, and their index entries, when the first new shard is
                published.
            storage_options: credentials and options, as for `StreamLoader`.
            filesystem: an fsspec filesystem to write with, as for `StreamLoader`.

        Raises:
            TypeError, ValueError: an argument is wrong.
            StorageError: matching shards exist and `overwrite` is false, or the folder cannot be accessed.
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
            before_first=partial(_mark_and_clear, self._destination, self._names, overwrite),
        )
        self.folder = self._destination.folder
        self.samples = 0
        existing = self._destination.existing(self._names)
        self._replaces = bool(existing)
        if existing and not overwrite:
            raise StorageError(
                f"{without_secrets(self.folder)!r} already holds {counted(len(existing), 'shard')} named like "
                f"{existing[0]!r}; choose another folder or prefix, or pass overwrite=True to replace them",
                url=os.path.join(self.folder, existing[0]),
            )

    @property
    def bytes(self) -> int:
        """Return the total size of the published shards."""
        return sum(shard.table.shard_bytes for shard in self._shards.published)

    @property
    def shards(self) -> tuple[str, ...]:
        """Return the paths or urls of the published shards."""
        return tuple(os.path.join(self.folder, shard.name) for shard in self._shards.published)

    @property
    def tables(self) -> tuple[tuple[IndexedShard, ShardTable], ...]:
        """Return the index entries and tables of the published shards, for `IndexFolder.update_with_tables`."""
        return tuple(indexed(self._shards.published))

    def write(self, sample: Mapping[str, object]) -> None:
        """Append a sample; its fields are stored in the mapping's order.

        Args:
            sample: `"__key__"` and one value for each field, encoded by the field's extension (`encode_field`). Other
                names of the form `__x__` are skipped, so a loader's samples can be written unchanged.

        Raises:
            TypeError, ValueError, ImportError: the sample cannot be stored, would be read back differently, is too
                large, or has a key that the shard already has. The sample was not written; the writer can still be
                used.
            StorageError, DatasetIndexError: the shard cannot be written, or the index of the shards to overwrite is
                damaged; the unfinished shard is discarded and the writer is closed.
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
        """Append one sample per row of equally long arrays. The keys are the samples' numbers: `000000000`.

        Args:
            columns: arrays or CPU tensors with the same first dimension, by name, as `x=X, y=y`. A row is stored as the
                field `<name>.npy` with the array's type and the row's shape; a column `cls` of integers (N,) is the
                label. To write the arrays of a `.npz` file, call `write_arrays(**np.load("data.npz"))`.

        Raises:
            TypeError, ValueError: no column is given, a column is not an array of rows, or lengths or names conflict
                (nothing was written); or `write` refused a row (earlier rows were written).
            StorageError, DatasetIndexError: raised by `write`.
        """
        arrays = {name: np.asarray(column) for name, column in columns.items()}
        for name, rows in arrays.items():
            is_bad_label = name == LABEL_FIELD and (rows.ndim != 1 or rows.dtype.kind not in "iu")
            if is_bad_label or rows.ndim == 0 or rows.dtype == object:
                raise TypeError(
                    f"column {name!r} is {rows.dtype} of shape {rows.shape}; it must be an array of numbers with one "
                    f"row per sample, and the label {LABEL_FIELD!r} one integer per sample"
                )
        if len(set(map(len, arrays.values()))) != 1 or len({*map(str.lower, arrays)}) < len(arrays):
            lengths = ", ".join(f"{name} {len(rows):,}" for name, rows in arrays.items())
            raise ValueError(
                f"write_arrays needs arrays of equal length, with names that differ in more than case ({lengths})"
            )
        fields = {name: name if name == LABEL_FIELD else f"{name.lower()}.npy" for name in arrays}
        for number in range(len(next(iter(arrays.values())))):
            sample: dict[str, object] = {"__key__": f"{self.samples:09d}"}
            for name, rows in arrays.items():
                sample[fields[name]] = int(rows[number]) if name == LABEL_FIELD else np.asarray(rows[number])
            self.write(sample)

    def close(self) -> None:
        """Publish the last shard and write the index. Idempotent. Raises StorageError, DatasetIndexError."""
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
                    f"no sample was written, so the shards in {without_secrets(self.folder)!r} were not overwritten"
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


def _mark_and_clear(folder: Destination, names: ShardNaming, overwrite: bool) -> None:
    """Mark a folder as unfinished; remove shards to be overwritten, and index entries of shards deleted by hand."""
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
    """Return a sample's key. Raise TypeError or ValueError for a key that would be read back differently."""
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
    """Return a sample's encoded fields. Raise TypeError, ValueError or ImportError if one cannot be stored."""
    members = []
    for field, value in sample.items():
        if not isinstance(field, str):
            raise TypeError(f"sample {key!r}: a field's name must be a str, not {field!r}")
        is_special = field.startswith("__") and field.endswith("__")
        if is_special and field.strip("_"):
            continue
        if is_special or "" in field.split(".") or "/" in field or _UNSAFE.search(field) or field != field.lower():
            raise ValueError(
                f"sample {key!r}: {field!r} is not a field's name; a name is a file extension in lower case, such as "
                "'jpg' or 'seg.png', without '/', empty parts or control characters, and not underscores alone"
            )
        try:
            payload = encode_field(field, value)
        except (TypeError, ValueError, ImportError) as exc:
            exc.add_note(f"in sample {key!r}")
            raise
        members.append((field, member_header(f"{key}.{field}", len(payload)), payload))
    if not members:
        raise ValueError(f"sample {key!r} has no field; give it at least one besides '__key__'")
    return members


def label_of(members: list[Member]) -> int | None:
    """Return the integer in a sample's label field, or None."""
    return parse_label(next((payload for field, _, payload in members if field == LABEL_FIELD), b""))


class ConsecutiveShards:
    """Distribute samples over consecutive shards, each as full as allowed.

    Attributes:
        growing: the unpublished shard, or None.
        published: the published shards in order.
    """

    def __init__(
        self,
        folder: Destination,
        name: Callable[[int], str],
        *,
        max_bytes: int | None,
        max_count: int | None,
        replace: bool = True,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        """Write nothing yet.

        `name` returns a shard's name by its number. `before_first` is called before the first shard is published.
        """
        self._folder, self._name = folder, name
        self._max_bytes, self._max_count = max_bytes, max_count
        self._replace, self._before_first = replace, before_first
        self.growing: GrowingShard | None = None
        self.published: list[PublishedShard] = []

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Append a sample; if the growing shard is full, publish it and start another.

        Raises StreamloadError if a shard cannot be written; ValueError, before writing, if the sample is too large,
        repeats a key, or adds too many fields.
        """
        size, limit = size_of(members), self._max_bytes
        if limit is not None and size + len(END_OF_ARCHIVE) > limit:
            raise too_large(key, size, limit)
        with self._explained_errors():
            shard = self.growing
            if shard is not None and (
                (limit is not None and shard.bytes + size > limit) or len(shard.keys) == self._max_count
            ):
                self._publish(shard)
                shard = None
            if shard is None:
                shard = self.growing = self._folder.create(self._name(len(self.published)))
            if key in shard.keys:
                raise ValueError(f"two samples have the key {key!r}; give each its own")
            shard.append(key, members, label)

    def finish(self, *, may_be_empty: bool = False) -> None:
        """Publish the last shard. With `may_be_empty`, publish an empty shard if no sample was appended."""
        with self._explained_errors():
            if self.growing is None and may_be_empty and not self.published:
                self.growing = self._folder.create(self._name(0))
            if self.growing is not None:
                self._publish(self.growing)

    def close(self) -> None:
        """Discard the unpublished shard, and remove created folders that are empty. Idempotent."""
        shard, self.growing = self.growing, None
        if shard is not None:
            shard.discard()
        self._folder.close()

    def _publish(self, shard: GrowingShard) -> None:
        if not self.published:
            self._before_first()
        url, storage = f"{self._folder.folder}/{shard.name}", self._folder.storage
        table = shard.publish(storage, url, replace=self._replace)
        self.growing = None
        info = storage.info(url)
        if info.bytes != table.shard_bytes:
            storage.delete(url)
            raise StorageError(
                f"the shard has {info.bytes:,} bytes after the upload instead of {table.shard_bytes:,}; write it again",
                url=without_secrets(url),
            )
        self.published.append(PublishedShard(shard.name, info, table))

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Raise OSErrors as StorageError, with advice."""
        try:
            yield
        except OSError as exc:
            folder, url = self._folder, exc.filename if isinstance(exc.filename, str) else None
            reason = exc.strerror or exc
            if folder.path is None:
                raise StorageError(
                    f"cannot write the shard to the folder for temporary files, {tempfile.tempdir!r} ({reason}); make "
                    "room there, choose another folder with TMPDIR, or make shards smaller with max_bytes",
                    url=url,
                ) from exc
            message = f"cannot write to {folder.folder!r}: {reason}; check permissions and space, or use another folder"
            raise StorageError(message, url=url) from exc


def too_large(key: str, size: int, max_bytes: int) -> ValueError:
    """Return the error for a sample that is larger than a shard may be."""
    shard_bytes = size + len(END_OF_ARCHIVE)
    return ValueError(
        f"sample {key!r} alone makes a shard of {shard_bytes:,} bytes, but a shard may have {max_bytes:,}; raise "
        f"--max-bytes (max_bytes) to at least {shard_bytes}"
    )


def size_of(members: Sequence[Member]) -> int:
    """Return the size of a sample in a shard, with headers and padding."""
    return sum(member_bytes(header, len(payload)) for _, header, payload in members)


class PublishedShard(NamedTuple):
    """A complete shard: its name in the folder, its file or object, and its table."""

    name: str
    info: ShardInfo
    table: ShardTable


def indexed(shards: Iterable[PublishedShard]) -> list[tuple[IndexedShard, ShardTable]]:
    """Return the index entries and tables of shards."""
    return [(IndexedShard(name, info.bytes, len(table), info.etag), table) for name, info, table in shards]


class Destination:
    """Create, list and remove the shards of one folder. Methods can raise OSError or StreamloadError.

    Attributes:
        folder: the folder's path or url, without a slash at the end.
        path: the folder's path; None if remote.
    """

    def __init__(self, folder: str, storages: Storages, *, durable: bool = True) -> None:
        """Write nothing yet. With `durable`, local shards are flushed to disk before they are published.

        Raises:
            ValueError: the url does not name a folder.
            StorageError: the url names a web server or a file.
        """
        if folder.endswith(":") or ("://" in folder and not folder.rstrip("/").partition("://")[2]):
            raise ValueError(
                f"{without_secrets(folder)!r} does not name a bucket or folder; give one, as in s3://bucket/train"
            )
        if protocol_of(folder) in WEB:
            url = without_secrets(folder)
            raise StorageError("a web server cannot be written to; name a bucket or a folder", url=url)
        self.storage = storages.for_url(folder.rstrip("/") or "/")
        self.path = None
        if isinstance(self.storage, LocalStorage):
            folder = local_path(folder) if folder.startswith("file:") else folder
            if os.path.isfile(folder):
                raise StorageError("this is a file; name a folder", url=folder)
            self.storage = LocalStorage(durable=durable)
            self.path = folder.rstrip("/") or "/"
        self.folder = folder.rstrip("/") or "/"
        self.index = IndexFolder(self.storage, f"{self.folder}/{INDEX_FOLDER}")
        self._durable = durable
        self._created: list[str] = []

    def existing(self, names: ShardNaming) -> list[str]:
        """Return the names of existing shards that match `names`, sorted."""
        listed = [info.url.rpartition("/")[2] for info in self.storage.list(f"{escaped(self.folder)}/*")]
        return sorted(filter(names.matches, listed))

    def remove(self, names: ShardNaming, shards: Sequence[str]) -> None:
        """Remove the index entries of all shards whose names match, then the files of `shards`."""
        self.index.remove(names.matches)
        for shard in shards:
            self.storage.delete(f"{self.folder}/{shard}")

    def remove_abandoned(self, names: ShardNaming) -> None:
        """Remove hidden files that killed writers left for matching shards; a bucket has no hidden files."""
        for hidden in os.listdir(self.path) if self.path is not None and os.path.isdir(self.path) else ():
            match = _HIDDEN.fullmatch(hidden)
            if match is not None and names.matches(match[1]):
                # The file may be gone by now, belong to another user, or be locked by a running writer.
                with suppress(OSError), open(f"{self.path}/{hidden}", "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(f"{self.path}/{hidden}")

    def create(self, name: str) -> GrowingShard:
        """Start a shard, creating a missing local folder."""
        if self.path is not None:
            missing = os.path.abspath(self.path)
            while not os.path.isdir(missing):
                self._created.append(missing)
                missing = os.path.dirname(missing)
            os.makedirs(self.path, exist_ok=True)
        return GrowingShard(name, self.path, durable=self._durable)

    def close(self) -> None:
        """Remove the folders that `create` made, if they are empty. Idempotent."""
        created, self._created = self._created, []
        with suppress(OSError):  # not empty
            for folder in created:
                os.rmdir(folder)


class GrowingShard:
    """Write one shard, and record the table of its content. Not thread-safe.

    In a local folder, the file is named `.<name>.<random>.partial` until `publish()`, and locked while the writer runs.
    For a bucket, the file is temporary and unnamed (hidden on systems that cannot reopen an unnamed file).

    Attributes:
        bytes: the size of the shard if it ended here.
        keys: the keys of the samples so far, in order.
    """

    def __init__(self, name: str, folder: str | None, *, durable: bool) -> None:
        """Create the file in a local folder, or a temporary file. Raises OSError.

        Without `durable`, a published shard may be cut or empty if the machine crashes soon after.
        """
        self.name = name
        self.bytes = len(END_OF_ARCHIVE)
        self.keys: dict[str, None] = {}
        self._durable = durable
        self._hidden: str | None = None
        self._file: Any  # a BufferedWriter, or the wrapper of `tempfile` that deletes the file
        if folder is None:
            temporary = tempfile.TemporaryFile if os.path.isdir("/proc/self/fd") else tempfile.NamedTemporaryFile
            self._file = temporary("wb", _BUFFER_BYTES, prefix=".streamload-")
        else:
            self._hidden = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.partial")
            descriptor = os.open(self._hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = BufferedWriter(FileIO(descriptor, "wb"), _BUFFER_BYTES)
        self._fields: dict[str, int] = {}
        self._members = array("q")  # the offset, size, field and CRC-32 of each member
        self._sample_start = array("q", [0])
        self._labels: list[int | None] = []

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Append a sample. Raises OSError; ValueError, before writing, for too many distinct fields."""
        if len(self._fields) + len({field for field, _, _ in members} - self._fields.keys()) > _MAX_FIELDS:
            raise ValueError(f"with sample {key!r} this shard would have more than {_MAX_FIELDS} distinct fields")
        position = self.bytes - len(END_OF_ARCHIVE)
        for field, header, payload in members:
            self._file.writelines((header, payload, padding(len(payload))))
            number = self._fields.setdefault(field, len(self._fields))
            self._members.extend((position + len(header), len(payload), number, zlib.crc32(payload)))
            position += member_bytes(header, len(payload))
        self.bytes = position + len(END_OF_ARCHIVE)
        self.keys[key] = None
        self._sample_start.append(len(self._members) // 4)
        self._labels.append(label)

    def publish(self, storage: Storage, url: str, *, replace: bool) -> ShardTable:
        """Publish the complete shard under its url, and return its table.

        Raises StorageError or OSError; FileExistsError if a local shard exists and `replace` is false.
        """
        self._file.write(END_OF_ARCHIVE)
        self._file.flush()
        if self._hidden is None:
            name = self._file.name
            storage.write(url, name if isinstance(name, str) else f"/proc/self/fd/{name}")
        else:
            self._rename(self._hidden, replace=replace)
        self.discard()
        offsets, sizes, fields, crc32 = np.array(self._members, np.int64).reshape(-1, 4).T
        keys = [key.encode("utf-8") for key in self.keys]
        labels = [label for label in self._labels if label is not None]
        return ShardTable(
            shard_bytes=self.bytes,
            fields=tuple(self._fields),
            member_offset=offsets.copy(),
            member_size=sizes.copy(),
            member_field=fields.astype(np.uint16),
            sample_start=np.array(self._sample_start, np.int64),
            key_bytes=np.frombuffer(b"".join(keys), np.uint8),
            key_start=np.array(list(accumulate(map(len, keys), initial=0)), np.int64),
            member_crc32=crc32.astype(np.uint32),
            labels=np.array(labels, np.int64) if len(labels) == len(self._labels) else None,
        )

    def _rename(self, hidden: str, *, replace: bool) -> None:
        folder, path = os.path.dirname(hidden), os.path.join(os.path.dirname(hidden), self.name)
        if self._durable:
            os.fsync(self._file.fileno())
        self._file.close()
        with locked_folder(folder):  # a hard link would check and rename in one step, but exFAT, SMB and FUSE lack them
            if not replace and os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            os.replace(hidden, path)
        if self._durable:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self) -> None:
        """Close and remove the file without flushing its buffer. Idempotent."""
        self._file.raw.close()
        self._file.close()
        if self._hidden is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._hidden)


def encode_field(field: str, value: object) -> bytes:
    """Return the bytes to store for one field of a sample, encoded by the last extension of its name.

    Every extension takes `bytes`, `bytearray` and `memoryview`. Some extensions take other values too, most of which
    the loader returns in the same form by default:

    - text (`txt`, `json`, `csv`, ...) takes `str`, which for `json` must be finished JSON
    - `cls`, `cls2`, `count`, `index`, `id`, `inx` and `txt` take `int`, which the loader returns as text for `txt`
    - `json` and `jsn` take dicts, lists, numbers, bools and None
    - `jpg`, `jpeg`, `jpe`, `jfif`, `png`, `apng` and `webp` take a uint8 HW or HWC array or a Pillow image
    - `npy` takes an array, `npz` and `safetensors` a mapping of arrays
    - `pt` and `pth` take a torch tensor, or plain containers of tensors and plain values
    - `msgpack`, `msg`, `mp` and `cbor` take plain data
    - `x.gz` takes the values of `x`

    Raises:
        TypeError: the extension does not take the value; the message names the field, the type and the accepted
            values.
        ValueError: the type is right, but the value is not (NaN in JSON, an RGBA image for `jpg`).
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


def _text(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return value.encode("utf-8")


def _txt(value: object) -> bytes:
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return b"%d" % int(value)
    return _text(value)


def _integer(value: Any) -> bytes:
    try:
        if isinstance(value, bool | np.bool_) or (isinstance(value, str) and not _DECIMAL.fullmatch(value)):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        raise TypeError(f"{value!r:.40} is not an integer; number the classes, and name them in classes.json") from None
    if not -_INT64_LIMIT <= number < _INT64_LIMIT:
        raise ValueError(f"{number} is beyond int64 and could not be read back; store it as txt")
    return value.encode("utf-8") if isinstance(value, str) else b"%d" % number


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
        raise ValueError(f"{form} has no mode {image.mode}; convert the image first, for example with .convert('RGB')")
    buffer = io.BytesIO()
    image.save(buffer, form, **({} if form == "PNG" else {"quality": _JPEG_QUALITY}))
    return buffer.getvalue()


def _npy(value: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, _array(value), allow_pickle=False)
    return buffer.getvalue()


def _npz(value: object) -> bytes:
    # np.savez takes names as keyword arguments, so an array cannot be called "file".
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in _arrays(value).items():
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), _npy(array))  # no time: equal arrays give equal bytes
    return buffer.getvalue()


def _arrays(value: object) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return {name: _array(array) for name, array in value.items()}


def _array(value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if _is_tensor(value):
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{type(value).__name__} is not an array")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("objects would have to be pickled")
    return array


def _pt(value: object) -> bytes:
    if not _is_plain(value):
        raise TypeError
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _is_plain(value: Any) -> bool:
    """Return True if `torch.load(weights_only=True)` restores the value."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_plain, value)) and (type(value) is not dict or all(map(_is_plain, value.values())))
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or _is_tensor(value)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a program with tensors has imported torch; others should not pay for it
    return torch is not None and isinstance(value, torch.Tensor)


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
# Extensions that take more than bytes.
ENCODED_EXTENSIONS = frozenset(name for name, (encode, _) in _ENCODERS.items() if encode is not None)
