"""`ShardWriter`, the face of writing shards: finds the destination, local or remote, that a path or url names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from streamload.byte_sizes import parse_bytes
from streamload.storage.local_storage import local_path
from streamload.storage.protocol import protocol_of
from streamload.storage.storages import Storages
from streamload.unknown_names import advises
from streamload.write.destination import Destination, LocalFolder
from streamload.write.remote_folder import RemoteFolder
from streamload.write.samples_to_shards import SamplesToShards

__all__ = ["ShardWriter", "destination_in"]


class ShardWriter(SamplesToShards):
    """Writes samples into numbered shards and an index beside them, here or in a bucket.

    Locally, each shard appears under its name only when it is complete and on the disk; until then it has a hidden
    name. Remotely, each is written to a temporary file without a name and uploaded when it is full, whole or not at
    all, while the next one is written; an upload that fails is raised by the next `write` or `close`, and then what
    was uploaded before stays. The index comes last.

    Bytes depend on the samples alone (no times, no owners), so the same samples give the same shards and the same
    index. Leaving the `with` block by an exception discards the unfinished shard and writes no index; shards that were
    published before stay, and readers refuse them as incomplete until they are written again with `overwrite=True` (or
    the mark `.streamload-unfinished.json` is removed). The tables for the index are kept in memory until `close()`:
    some 100 bytes a sample.
    Not safe for several threads, and only one process at a time may write to a remote folder.
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
        storages = Storages(storage_options, filesystem)
        super().__init__(
            pattern_or_folder,
            lambda folder: destination_in(folder, storages),
            max_bytes=parse_bytes("max_bytes", max_bytes),
            max_count=max_count,
            prefix=prefix,
            index=index,
            overwrite=overwrite,
        )


def destination_in(folder: str, storages: Storages) -> Destination:
    """A folder to write to: of this machine, or of the storage that its url names.

    Raises:
        ValueError: the url is that of no folder.
        StorageError: it is that of a web server.
    """
    if folder.endswith(":"):
        raise ValueError(f"{folder!r} names no bucket or folder; give one, as in s3://bucket/train-%06d.tar")
    if not storages.is_local(folder):
        return RemoteFolder(folder, storages)
    return LocalFolder(local_path(folder) if protocol_of(folder) == "file" and folder.startswith("file:") else folder)
