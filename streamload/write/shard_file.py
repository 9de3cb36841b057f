"""One shard being written: a hidden file that gets its name only when it is whole and on the disk.

While members are appended, the shard's table (offsets, keys, crc32, labels) is built beside them, so that an index
needs no second pass over the bytes.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import secrets
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO

import numpy as np

from streamload.index.shard_names import locked_folder
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, padding
from streamload.tar.table import ShardTable

_BUFFER_BYTES = 1 << 17
_MAX_FIELDS = 1 << 16
_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")

Member = tuple[str, bytes, bytes]
"""A field, its header blocks and its payload."""


class GrowingShard:
    """A shard under construction: an open file, and the table of what is in it. Not safe for several threads.

    Attributes:
        name: what the shard will be called.
        bytes: its size if it ended here.
        etag: its version in a remote storage, once it is published.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        """Start an empty shard in a file, which is closed with it."""
        self.name = name
        self.bytes = len(END_OF_ARCHIVE)
        self.etag: str | None = None
        self._file: BufferedWriter | None = BufferedWriter(FileIO(descriptor, "wb"), _BUFFER_BYTES)
        self._keys: dict[str, None] = {}
        self._fields: dict[str, int] = {}
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._field_numbers: list[int] = []
        self._crc32: list[int] = []
        self._sample_start: list[int] = [0]
        self._labels: list[int | None] = []

    def __len__(self) -> int:
        """The number of samples so far."""
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        """Whether a sample of this key was appended."""
        return key in self._keys

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Add one sample. Raises OSError, after which only `discard()` makes sense; ValueError before any change."""
        if (
            len(self._fields) + len(members) > _MAX_FIELDS
            and len(self._fields.keys() | {m[0] for m in members}) > _MAX_FIELDS
        ):
            raise ValueError(f"with sample {key!r} this shard would have more than {_MAX_FIELDS} distinct fields")
        if self._file is None:
            raise ValueError("the shard was published or discarded already")
        position = self.bytes - len(END_OF_ARCHIVE)
        for field, header, payload in members:
            for piece in (header, payload, padding(len(payload))):
                self._file.write(piece)
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
        """Give the shard its name, replacing a file of that name if `replace`."""
        raise NotImplementedError

    def discard(self) -> None:
        """Close the file without what is buffered; nothing happens after another `discard()`."""
        file, self._file = self._file, None
        if file is not None:
            file.raw.close()

    def _end(self) -> BufferedWriter:
        """Write the end-of-archive marker and hand everything to the system."""
        if self._file is None:
            raise ValueError("the shard was published or discarded already")
        self._file.write(END_OF_ARCHIVE)
        self._file.flush()
        return self._file

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
    """A shard in a folder, at `<folder>/.<name>.<random>.partial` until `publish()`.

    The hidden name ends in `.partial`, so no glob, no listing and no other loader takes it for a shard even when its
    writer was killed. The writer holds a lock on it, which the kernel takes from the dead.
    """

    def __init__(self, path: str, *, durable: bool = True) -> None:
        """Create the hidden file.

        Args:
            path: the shard's final path.
            durable: flush the shard to the disk when it is published; otherwise a crash of the machine in the next half
                minute may leave it short or empty.

        Raises:
            OSError: the file cannot be created.
        """
        folder, name = os.path.split(path)
        self.path = path
        self._durable = durable
        self._folder = folder or "."
        self._hidden = os.path.join(self._folder, f".{name}.{secrets.token_hex(8)}.partial")
        descriptor = os.open(self._hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(descriptor)
        super().__init__(name, descriptor)

    def publish(self, *, replace: bool) -> ShardTable:
        """Write the end-of-archive marker, and give the shard its name.

        Args:
            replace: replace a file of that name; otherwise raise FileExistsError if there is one. (A hard link would
                do both at once, but exFAT, SMB and many FUSE mounts have none.)

        Raises:
            OSError: any of that fails.
        """
        file = self._end()
        if self._durable:
            os.fsync(file.fileno())
        file.close()
        with locked_folder(self._folder):
            if not replace and os.path.lexists(self.path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
            os.replace(self._hidden, self.path)
        self._file = None
        if self._durable:
            sync_folder(self._folder)
        return self._table()

    def discard(self) -> None:
        """See `GrowingShard.discard`."""
        if self._file is not None:
            super().discard()
            os.unlink(self._hidden)


def remove_abandoned(folder: str, matches: Callable[[str], bool]) -> None:
    """Remove the hidden files of writers that were killed, as far as their locks show.

    Args:
        folder: where they lie.
        matches: whether a shard of this name is one of those that are written there now.

    Raises:
        OSError: the folder cannot be listed.
    """
    for hidden in os.listdir(folder):
        found = _HIDDEN.fullmatch(hidden)
        if found is None or not matches(found[1]):
            continue
        path = os.path.join(folder, hidden)
        with suppress(OSError):  # it may be gone by now, or another user's
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock(descriptor):
                    os.unlink(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed; False where another one holds it, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_folder(folder: str) -> None:
    """Make the names in a folder as durable as their files' bytes. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
