"""What scans of shards without an index learned, kept on disk for later runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import sys
import time
import zlib

from streamload.errors import DatasetIndexError, without_secrets, without_signature
from streamload.index.table_file import TABLE_FORMAT, pack_table, unpack_table
from streamload.storage.local_files import make_private_folder, replace_file, why_not_private
from streamload.tar.decompression import is_compressed
from streamload.tar.table import ShardTable

__all__ = ["ScanCache"]

_log = logging.getLogger("streamload")

_KEPT_FORMAT = (TABLE_FORMAT, 2)
"""Of the files here: a table's file, and four bytes with the crc32 of that. Those of another format are not found."""

_CRC32_BYTES = 4


MOST_BYTES = 1 << 30
MOST_IDLE_S = 90 * 86_400.0
_DAY_S = 86_400.0
_MARK = ".pruned"
_KEPT, _KEPT_BEFORE = ".table", ".npz"
"""Of this release and of earlier ones, whose files are only removed."""

_UNFINISHED = ".tmp"


def note_use(file: str, now_s: float) -> None:
    """Remember that a file was used, by its time of change; at most once a day, and never an error."""
    with contextlib.suppress(OSError):
        if now_s - os.stat(file).st_mtime > _DAY_S:
            os.utime(file, (now_s, now_s))


def prune_once_a_day(
    folder: str, now_s: float, *, most_bytes: int = MOST_BYTES, most_idle_s: float = MOST_IDLE_S
) -> None:
    """Remove what was not used for `most_idle_s`, then the least recently used until at most `most_bytes` are left.

    Nothing happens within a day of the last time that any process did it. Others may load, store and prune meanwhile:
    whoever opens a file that is gone scans the shard again. Only files of the kinds that are kept here are touched.
    What cannot be removed stays, and nothing is raised.

    Args:
        folder: where the files are; it need not exist.
        now_s: the time, as `time.time()` gives it.
        most_bytes: what may stay.
        most_idle_s: since when a file was not used.
    """
    mark = os.path.join(folder, _MARK)
    with contextlib.suppress(OSError):
        if now_s - os.stat(mark).st_mtime < _DAY_S:
            return
    with contextlib.suppress(OSError):
        with open(mark, "ab"):  # first, so that others who start now need not do it as well
            os.utime(mark, (now_s, now_s))
        _prune(folder, now_s, most_bytes, most_idle_s)


def _prune(folder: str, now_s: float, most_bytes: int, most_idle_s: float) -> None:
    longest_idle_s = {_KEPT: most_idle_s, _KEPT_BEFORE: most_idle_s, _UNFINISHED: _DAY_S}
    kept: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                idle_s = now_s - status.st_mtime
                if idle_s > longest_idle_s.get(os.path.splitext(entry.name)[1], math.inf):
                    os.unlink(entry.path)
                elif entry.name.endswith((_KEPT, _KEPT_BEFORE)):
                    kept.append((status.st_mtime, status.st_size, entry.path))
    total_bytes = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total_bytes <= most_bytes:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
            total_bytes -= size


def user_cache_folder() -> str:
    """Where scans are kept by default: `streamload/scans` in the user's cache folder, which need not exist."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # which the XDG Base Directory Specification says to ignore
        root = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return os.path.join(root, "streamload", "scans")


class ScanCache:
    """Tables by shard, on disk. It never fails: what cannot be read is absent, what cannot be written is left out.

    A table is found again for the same path, size, time of modification, inode and time of change (or ETag, where the
    storage has one) and strictness, and by the same release's layout: `cp -p` and `rsync -t` keep the time of
    modification and no other. A URL with an ETag is found again however it is signed, because the ETag shows
    objects apart if what looks like a signature chooses among them. Several processes may share a folder. It stays
    within a GiB, and what was not used for 90 days goes: the first store of a process looks after that, at most once a
    day.

    Attributes:
        folder: where the tables are.
        enabled: False once the folder turned out not to be writable; nothing is loaded or stored from then on.
    """

    def __init__(self, folder: str | None = None) -> None:
        """Use a folder, by default the user's; it is made when the first table is stored."""
        self.folder = user_cache_folder() if folder is None else folder
        self.enabled = True
        self._pruned = False
        self._checked = False
        self._looked_for: dict[str, tuple[int, int] | None] = {}

    def load(
        self, path: str, shard_bytes: int, mtime_ns: int | None, strict: bool, *, etag: str | None = None
    ) -> ShardTable | None:
        """The table of a shard as it was when it had this size and time of change, or None if it is not known.

        Args:
            path: the shard's path or URL.
            shard_bytes: its size now.
            mtime_ns: when it was last changed; None where that is not known.
            strict: as for `scan_shard`.
            etag: which version of an object it is, where the storage says so; then the time means nothing.
        """
        if not self._can_be_used():
            return None
        version = mtime_ns if etag is None else etag
        found = self._looked_for[path] = _inode_and_change(path, version)
        file = self._file(path, shard_bytes, version, strict, found)
        try:
            with open(file, "rb") as opened:
                content = opened.read()
        except OSError:
            return None
        kept, crc32 = content[:-_CRC32_BYTES], int.from_bytes(content[-_CRC32_BYTES:], "little")
        try:
            table = unpack_table(kept, file, crc32)
        except (DatasetIndexError, MemoryError) as exc:
            what = "scanning %s again, since what was kept of the last scan is not readable: %s"
            _log.info(what, without_secrets(path), exc)
            return None
        note_use(file, time.time())
        del self._looked_for[path]
        return table if is_compressed(path) or table.shard_bytes == shard_bytes else None

    def store(
        self,
        path: str,
        shard_bytes: int,
        mtime_ns: int | None,
        strict: bool,
        table: ShardTable,
        *,
        etag: str | None = None,
    ) -> None:
        """Keep a table for later runs; the arguments are those of `load`.

        Where that was called before the shard was scanned, it is kept for the file that was there then: another one
        that took its place since has another inode or time.
        """
        if not self._can_be_used():
            return
        version = mtime_ns if etag is None else etag
        found = self._looked_for.pop(path) if path in self._looked_for else _inode_and_change(path, version)
        file = self._file(path, shard_bytes, version, strict, found)
        if not self._pruned:
            self._pruned = True
            prune_once_a_day(self.folder, time.time())
        try:
            make_private_folder(self.folder)
            packed = pack_table(table)
            content = packed + zlib.crc32(packed).to_bytes(_CRC32_BYTES, "little")
            # Not durable: what a crash of the machine leaves behind is found damaged, and scanned again.
            replace_file(file, lambda opened: opened.write(content), durable=False, mode=0o600)
        except OSError as exc:
            self._turn_off(f"{self.folder} cannot be written ({exc.strerror or exc})")

    def _can_be_used(self) -> bool:
        """Whether tables may be loaded and stored; what another user has put there is not believed."""
        if self.enabled and not self._checked:
            self._checked = True
            if (why := why_not_private(self.folder)) is not None:
                self._turn_off(f"{why}; remove it, or set XDG_CACHE_HOME to a folder of your own")
        return self.enabled

    def _turn_off(self, why: str) -> None:
        self.enabled = False
        _log.warning("scans are not kept for later runs, since %s", why)

    def _file(
        self, path: str, shard_bytes: int, version: int | str | None, strict: bool, found: tuple[int, int] | None
    ) -> str:
        if "://" in path:
            place = without_signature(path) if isinstance(version, str) else path
        else:
            place = os.path.abspath(path)
        identity = repr((place, shard_bytes, version, strict, _KEPT_FORMAT, found))
        digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        return os.path.join(self.folder, f"{digest}{_KEPT}")


def _inode_and_change(path: str, version: int | str | None) -> tuple[int, int] | None:
    """What distinguishes a local file from another one of its size and time; None for what is no local file."""
    if "://" in path or isinstance(version, str):
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns
