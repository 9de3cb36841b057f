"""What scans of shards without an index learned, kept on disk for later runs."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time

from streamload.dataset.atomic import replace_file
from streamload.dataset.compressed_names import is_compressed
from streamload.dataset.scan_pruning import note_use, prune_once_a_day
from streamload.dataset.table import ShardTable
from streamload.dataset.table_file import TABLE_FORMAT, table_from_npz, table_to_npz
from streamload.errors import DatasetIndexError, without_signature

__all__ = ["ScanCache", "user_cache_folder"]

_log = logging.getLogger("streamload")


def user_cache_folder() -> str:
    """Where scans are kept by default: `streamload/scans` in the user's cache folder, which need not exist."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # which the XDG Base Directory Specification says to ignore
        root = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return os.path.join(root, "streamload", "scans")


class ScanCache:
    """Tables by shard, on disk. It never fails: what cannot be read is absent, what cannot be written is left out.

    A table is found again for the same path, size, time of change (or ETag, where the storage has one) and strictness,
    and by the same release's layout. A URL with an ETag is found again however it is signed, because the ETag tells
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
        if not self.enabled:
            return None
        file = self._file(path, shard_bytes, mtime_ns if etag is None else etag, strict)
        if not os.path.exists(file):
            return None
        try:
            table = table_from_npz(file, file)
        except DatasetIndexError as exc:
            _log.info("scanning %s again, since what was kept of the last scan is not readable: %s", path, exc)
            return None
        note_use(file, time.time())
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
        """Keep a table for later runs; the arguments are those of `load`."""
        if not self.enabled:
            return
        file = self._file(path, shard_bytes, mtime_ns if etag is None else etag, strict)
        if not self._pruned:
            self._pruned = True
            prune_once_a_day(self.folder, time.time())
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            # Not durable: what a crash of the machine leaves behind is found damaged, and scanned again.
            replace_file(file, lambda opened: table_to_npz(table, opened), durable=False)
        except OSError as exc:
            self.enabled = False
            _log.warning(
                "scans are not kept for later runs, since %s cannot be written (%s)", self.folder, exc.strerror
            )

    def _file(self, path: str, shard_bytes: int, version: int | str | None, strict: bool) -> str:
        if "://" in path:
            place = without_signature(path) if isinstance(version, str) else path
        else:
            place = os.path.abspath(path)
        identity = repr((place, shard_bytes, version, strict, TABLE_FORMAT))
        digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
        return os.path.join(self.folder, f"{digest}.npz")
