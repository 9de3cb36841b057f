"""The mark of a remote folder in which not all shards of a set are there; see `streamload.index.unfinished`."""

from __future__ import annotations

from streamload.errors import ShardNotFoundError
from streamload.index.shard_naming import ShardNaming
from streamload.index.unfinished import MOST_MARK_BYTES, UnfinishedSet, mark_path, with_set, without_set
from streamload.storage.protocol import Storage

__all__ = ["mark_remote_finished", "mark_remote_unfinished", "read_mark"]


def read_mark(storage: Storage, folder: str) -> bytes | None:
    """The mark of a folder, local or remote, or None. Raises StorageError."""
    try:
        return storage.read_bytes(mark_path(folder), most_bytes=MOST_MARK_BYTES)
    except ShardNotFoundError:
        return None


def mark_remote_unfinished(storage: Storage, folder: str, added: UnfinishedSet) -> None:
    """Mark a folder before anything of a set is changed in it. Idempotent.

    Raises:
        StorageError: the mark cannot be read or written.
        DatasetIndexError: there is one that is damaged.
    """
    storage.write(mark_path(folder), with_set(read_mark(storage, folder), folder, added))


def mark_remote_finished(storage: Storage, folder: str, shards: ShardNaming) -> None:
    """Take the mark of a set from a folder, since all of the set is there, or nothing. Idempotent.

    Raises:
        StorageError: the mark cannot be read or removed.
        DatasetIndexError: it is damaged.
    """
    before = read_mark(storage, folder)
    if before is None:
        return
    content = without_set(before, folder, shards)
    if content is None:
        storage.delete(mark_path(folder))
    else:
        storage.write(mark_path(folder), content)
