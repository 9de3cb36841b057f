"""A shard under construction. Its table is built while members are appended, so the index needs no second pass."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO
from itertools import accumulate
from typing import Any

import numpy as np

from streamload.index.shard_names import locked_folder
from streamload.storage.protocol import Storage
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, padding
from streamload.tar.table import ShardTable

_BUFFER_BYTES = 1 << 17
_MAX_FIELDS = 1 << 16

Member = tuple[str, bytes, bytes]  # a field, its header blocks and its payload


def size_of(members: Sequence[Member]) -> int:
    """Return the bytes of a sample in a shard."""
    return sum(member_bytes(header, len(payload)) for _, header, payload in members)


class GrowingShard:
    """An open file, and the table of its content. Not thread-safe.

    In a local folder it is `.<name>.<random>.partial` until `publish()`, locked while the writer lives. For a bucket it
    is an unnamed temporary file (a hidden one on systems that cannot reopen it).

    Attributes:
        bytes: the size of the shard if it ended here.
        keys: the keys of the samples so far, in order.
    """

    def __init__(self, name: str, folder: str | None, *, durable: bool) -> None:
        """Create the file in a local folder, or a temporary one. Raises OSError.

        Without `durable`, a shard may be short or empty if the machine crashes within half a minute.
        """
        self.name = name
        self.bytes = len(END_OF_ARCHIVE)
        self.keys: dict[str, None] = {}
        self._durable = durable
        self._hidden: str | None = None
        self._file: Any  # a BufferedWriter, or its wrapper that deletes the file
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
        self._members = array("q")  # offset, size, field and CRC-32 of each
        self._sample_start = array("q", [0])
        self._labels: list[int | None] = []

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Append a sample. Raises ValueError for too many distinct fields, before any change, and OSError."""
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
        """Complete the shard under its url, wholly or not at all; return its table.

        Raises StorageError and OSError; in a local folder FileExistsError, unless `replace`.
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
        with locked_folder(folder):  # a hard link would check and name in one step, but exFAT, SMB and FUSE have none
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
        """Close and remove the file without writing what is buffered. Idempotent."""
        self._file.raw.close()
        self._file.close()
        if self._hidden is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._hidden)
