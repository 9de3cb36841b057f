"""A shard under construction: a hidden file that gets its name only when it is complete and on the disk.

Its table is built while members are appended, so the index needs no second pass over the bytes.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import secrets
import zlib
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO

import numpy as np

from streamload.index.shard_names import locked_folder
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, padding
from streamload.tar.table import ShardTable

_BUFFER_BYTES = 1 << 17
_MAX_FIELDS = 1 << 16

Member = tuple[str, bytes, bytes]
"""A field, its header blocks and its payload."""


class GrowingShard:
    """An open file, and the table of its content. Not thread-safe.

    Attributes:
        bytes: the size of the shard if it ended here.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        """Start an empty shard in a file, which is closed with it."""
        self.name = name
        self.bytes = len(END_OF_ARCHIVE)
        self._file = BufferedWriter(FileIO(descriptor, "wb"), _BUFFER_BYTES)
        self._keys: dict[str, None] = {}
        self._fields: dict[str, int] = {}
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._field_numbers: list[int] = []
        self._crc32: list[int] = []
        self._sample_start: list[int] = [0]
        self._labels: list[int | None] = []

    def __len__(self) -> int:
        """Return the number of samples so far."""
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        """Return True if a sample with this key was appended."""
        return key in self._keys

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Append a sample. Raises ValueError for too many distinct fields, before any change, and OSError."""
        if (
            len(self._fields) + len(members) > _MAX_FIELDS
            and len(self._fields.keys() | {m[0] for m in members}) > _MAX_FIELDS
        ):
            raise ValueError(f"with sample {key!r} this shard would have more than {_MAX_FIELDS} distinct fields")
        position = self.bytes - len(END_OF_ARCHIVE)
        for field, header, payload in members:
            self._file.writelines((header, payload, padding(len(payload))))
            self._offsets.append(position + len(header))
            self._sizes.append(len(payload))
            self._field_numbers.append(self._fields.setdefault(field, len(self._fields)))
            self._crc32.append(zlib.crc32(payload))
            position += member_bytes(header, len(payload))
        self.bytes = position + len(END_OF_ARCHIVE)
        self._keys[key] = None
        self._sample_start.append(len(self._offsets))
        self._labels.append(label)

    def publish(self, *, replace: bool) -> ShardTable:
        """Complete the shard under its name, replacing a file of that name if `replace`."""
        raise NotImplementedError

    def discard(self) -> None:
        """Close the file without writing what is buffered. Idempotent."""
        self._file.raw.close()

    def _end(self) -> None:
        self._file.write(END_OF_ARCHIVE)
        self._file.flush()

    def _table(self) -> ShardTable:
        keys = [key.encode("utf-8") for key in self._keys]
        labels = [label for label in self._labels if label is not None]
        return ShardTable(
            shard_bytes=self.bytes,
            fields=tuple(self._fields),
            member_offset=np.array(self._offsets, np.int64),
            member_size=np.array(self._sizes, np.int64),
            member_field=np.array(self._field_numbers, np.uint16),
            sample_start=np.array(self._sample_start, np.int64),
            key_bytes=np.frombuffer(b"".join(keys), np.uint8),
            key_start=np.array(list(itertools.accumulate(map(len, keys), initial=0)), np.int64),
            member_crc32=np.array(self._crc32, np.uint32),
            labels=np.array(labels, np.int64) if len(labels) == len(self._labels) else None,
        )


class ShardFile(GrowingShard):
    """A shard in a local folder, at `<folder>/.<name>.<random>.partial` until `publish()`.

    No listing takes the hidden name for a shard. Its lock is released by the kernel when the writer dies.
    """

    def __init__(self, path: str, *, durable: bool = True) -> None:
        """Create the hidden file. Raises OSError.

        Without `durable`, a shard may be short or empty if the machine crashes within half a minute.
        """
        self._path = path
        self._folder, name = os.path.split(path)
        self._durable = durable
        self._hidden = os.path.join(self._folder, f".{name}.{secrets.token_hex(8)}.partial")
        descriptor = os.open(self._hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        super().__init__(name, descriptor)

    def publish(self, *, replace: bool) -> ShardTable:
        """Complete the shard under its name. Raises OSError; FileExistsError without `replace`.

        (A hard link would check and name it in one step, but exFAT, SMB and many FUSE mounts have none.)
        """
        self._end()
        if self._durable:
            os.fsync(self._file.fileno())
        self._file.close()
        with locked_folder(self._folder):
            if not replace and os.path.lexists(self._path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._path)
            os.replace(self._hidden, self._path)
        if self._durable:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return self._table()

    def discard(self) -> None:
        """Close and remove the hidden file. Idempotent."""
        super().discard()
        with suppress(FileNotFoundError):
            os.unlink(self._hidden)
