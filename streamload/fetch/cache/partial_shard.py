"""A shard that is being filled in a cache's folder, part by part, by one process or by several.

Two files: the shard itself, sparse until its parts come, with the crc32 of each part behind its last byte, and its
state, which is a header and one byte for each part (0 absent, 1 present). The byte is set after the part's data and
checksum were written, so within one boot of the machine, where all
processes see the same pages, a set byte is true however its process ended. A crash of the machine may lose pages and
keep the byte; therefore the names hold the boot's identity, and files of another boot are not looked at.

A part is claimed by a lock on its byte. The kernel takes the lock from a process that dies, so all that is lost with
it is the part in hand.

The state is read and written by `pread` and `pwrite` and not mapped: on a full disk a mapping may end the process.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from streamload.fetch.cache.file_locks import LOCKS_BYTES, mark_in_use, try_lock, unlock

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["PartialFiles", "PartialShard", "boot_tag", "cached_bytes", "private_tag", "stored_crc32", "true_crc32"]

_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"strmld\x00\x01"
_PRESENT = b"\x01"
_CRC32 = struct.Struct("<I")
_PIECE_BYTES = 1 << 20
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_tag() -> str | None:
    """The identity of this boot of the machine; None where it is not known or files have no locks on bytes.

    Without it nothing that is being filled can be shared.
    """
    try:
        with open(_BOOT_ID) as file:
            return file.read().strip() if LOCKS_BYTES else None
    except OSError:
        return None


def private_tag() -> str:
    """A tag that no other process has."""
    return f"own-{os.getpid()}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class PartialFiles:
    """The two files' names, and what they must hold.

    Attributes:
        folder: where they are.
        name: of the finished file.
        tag: of the boot, or of one process where nothing can be shared.
        shard_bytes: the shard's size.
        part_bytes: the size of all parts but the last.
    """

    folder: str
    name: str
    tag: str
    shard_bytes: int
    part_bytes: int

    @cached_property
    def data(self) -> str:
        """The path of the shard's bytes."""
        return os.path.join(self.folder, f"{self.name}.{self.tag}.part")

    @cached_property
    def state(self) -> str:
        """The path of the state."""
        return os.path.join(self.folder, f"{self.name}.{self.tag}.state")

    @property
    def n_parts(self) -> int:
        """How many parts the shard has."""
        return -(-self.shard_bytes // self.part_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the file with the shard's bytes."""
        return cached_bytes(self.shard_bytes, self.part_bytes)

    @property
    def header(self) -> bytes:
        """What the state begins with."""
        return _HEADER.pack(_MAGIC, self.shard_bytes, self.part_bytes)

    def unlink(self) -> None:
        """Remove both, if they are there."""
        for path in (self.data, self.state):
            with suppress(FileNotFoundError):
                os.unlink(path)


class PartialShard:
    """Both files, open. Not safe to be used by two threads at once, `write` excepted.

    Attributes:
        files: their names.
        descriptor: of the shard's bytes, for reading and writing; it marks the file as in use.
    """

    def __init__(self, files: PartialFiles, descriptor: int, state: int) -> None:
        self.files = files
        self.descriptor = descriptor
        self._state = state
        found = os.fstat(descriptor)
        self._inode = (found.st_dev, found.st_ino)
        self._present = bytes(files.n_parts)

    @classmethod
    def create(cls, files: PartialFiles) -> PartialShard:
        """Make the files, with no part present, in place of any that are there.

        Raises:
            OSError: they cannot be made; then neither is there.
        """
        files.unlink()
        opened: list[int] = []
        try:
            for path in (files.data, files.state):
                opened.append(os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600))
            os.ftruncate(opened[0], files.file_bytes)
            write_all(opened[1], 0, files.header + bytes(files.n_parts))
            mark_in_use(opened[0])
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            files.unlink()
            raise
        return cls(files, *opened)

    @classmethod
    def join(cls, files: PartialFiles) -> PartialShard | None:
        """Open files that this process or another one of this boot has made; None if there are none that fit.

        Raises:
            OSError: they cannot be opened or read.
        """
        opened: list[int] = []
        try:
            for path in (files.data, files.state):
                opened.append(os.open(path, _OPEN))
            state_bytes = len(files.header) + files.n_parts
            fits = (
                os.fstat(opened[0]).st_size == files.file_bytes
                and os.fstat(opened[1]).st_size == state_bytes
                and os.pread(opened[1], len(files.header), 0) == files.header
            )
            if fits:
                mark_in_use(opened[0])
                joined = cls(files, *opened)
                opened = []
                return joined
        except FileNotFoundError:
            pass
        finally:
            for descriptor in opened:
                os.close(descriptor)
        return None

    @property
    def complete(self) -> bool:
        """Whether all parts are present.

        Raises:
            OSError: the state cannot be read.
        """
        if b"\x00" in self._present:
            self._refresh()
        return b"\x00" not in self._present

    def has(self, part: int) -> bool:
        """Whether a part is present; one that is stays so.

        Raises:
            OSError: the state cannot be read.
        """
        if not self._present[part]:
            self._refresh()
        return bool(self._present[part])

    def try_claim(self, part: int) -> bool:
        """Take the part's lock; False if another one has it."""
        return try_lock(self._state, self._place(part))

    def release(self, part: int) -> None:
        """Let go of the part's lock."""
        unlock(self._state, self._place(part))

    def write(self, offset: int, data: Buffer) -> None:
        """Write to the shard.

        Raises:
            OSError: some of it may have been written.
        """
        write_all(self.descriptor, offset, data)

    def set_present(self, part: int, crc32: int) -> None:
        """All of the part's bytes are written, and have this checksum.

        Raises:
            OSError: it cannot be recorded.
        """
        place = self._place(part)
        write_all(self.descriptor, self.files.shard_bytes + part * _CRC32.size, _CRC32.pack(crc32))
        write_all(self._state, place, _PRESENT)

    def has_its_name(self) -> bool:
        """Whether the file of this name still is this one, and not gone or made anew; also when this is closed."""
        try:
            named = os.stat(self.files.data, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) == self._inode

    def remove(self) -> None:
        """Unlink the files, if their names still are theirs and the disk allows it; also when this is closed."""
        with suppress(OSError):
            if self.has_its_name():
                self.files.unlink()

    def duplicate(self) -> PartialShard:
        """The same openings of the files once more, with the same locks; both must be closed."""
        descriptor = os.dup(self.descriptor)
        try:
            return PartialShard(self.files, descriptor, os.dup(self._state))
        except OSError:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close both files, which releases all locks; a second time does nothing."""
        for descriptor in (self.descriptor, self._state):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._state = -1

    def _place(self, part: int) -> int:
        if not 0 <= part < self.files.n_parts:
            raise IndexError(f"part {part} is not one of {self.files.n_parts}")
        return _HEADER.size + part

    def _refresh(self) -> None:
        # Whatever is missing, should someone have cut the file, is absent.
        found = os.pread(self._state, self.files.n_parts, _HEADER.size)
        self._present = found.ljust(self.files.n_parts, b"\x00")


def cached_bytes(shard_bytes: int, part_bytes: int) -> int:
    """The size of the file that holds a shard and the checksums of its parts."""
    return shard_bytes + -(-shard_bytes // part_bytes) * _CRC32.size


def stored_crc32(descriptor: int, shard_bytes: int, part: int) -> int | None:
    """The checksum that a part had when it was fetched; None where the file ends before it. Raises OSError."""
    found = os.pread(descriptor, _CRC32.size, shard_bytes + part * _CRC32.size)
    return int(_CRC32.unpack(found)[0]) if len(found) == _CRC32.size else None


def true_crc32(descriptor: int, start: int, end: int) -> int:
    """The checksum of what a file holds from one place to another, or to its end. Raises OSError."""
    crc32 = 0
    while start < end and (piece := os.pread(descriptor, min(_PIECE_BYTES, end - start), start)):
        crc32 = zlib.crc32(piece, crc32)
        start += len(piece)
    return crc32


def write_all(descriptor: int, offset: int, data: Buffer) -> None:
    """Write everything at its place.

    Raises:
        OSError: some of it may have been written.
    """
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
