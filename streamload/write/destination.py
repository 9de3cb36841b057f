"""Where a writer's shards go: what it needs of a folder, and the folders of the local file system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard, write_index
from streamload.index.shard_names import ShardNaming, remove_shards, remove_stale_entries
from streamload.index.unfinished import SHARD_WRITER, UnfinishedSet, mark_finished, mark_unfinished
from streamload.tar.table import ShardTable
from streamload.write.shard_file import GrowingShard, ShardFile, remove_abandoned

__all__ = ["Destination", "LocalFolder"]


class Destination(Protocol):
    """A folder for shards. Every method may raise OSError or StreamloadError.

    Attributes:
        folder: the folder, as users know it.
    """

    folder: str

    def existing(self, names: ShardNaming) -> list[str]:
        """The shards of this form that are there, sorted."""
        ...

    def clear(self, names: ShardNaming, *, shards: bool) -> None:
        """Make way for shards of this form, and mark the folder as unfinished.

        Args:
            names: their form.
            shards: remove all of them and their entries in the index; otherwise only entries whose shards are all gone.
        """
        ...

    def create(self, name: str) -> GrowingShard:
        """Begin a shard."""
        ...

    def check(self) -> None:
        """Raise what has become of a shard since it was published."""
        ...

    def write_index(self, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> None:
        """Add published shards to the index, when all of them are there."""
        ...

    def settle(self) -> None:
        """Wait until all that was published is there."""
        ...

    def finish(self, names: ShardNaming) -> None:
        """All of the shards of this form are there: the folder is not unfinished any more."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


class LocalFolder:
    """A folder of the local file system, made when the first shard is begun."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def existing(self, names: ShardNaming) -> list[str]:
        """See `Destination`."""
        return names.existing(self.folder)

    def clear(self, names: ShardNaming, *, shards: bool) -> None:
        """See `Destination`."""
        mark_unfinished(self.folder, UnfinishedSet(names, SHARD_WRITER))
        remove_abandoned(self.folder, names.matches)
        if shards:
            remove_shards(self.folder, names)
        else:
            remove_stale_entries(self.folder, names)

    def create(self, name: str) -> GrowingShard:
        """See `Destination`."""
        os.makedirs(self.folder, exist_ok=True)
        return ShardFile(os.path.join(self.folder, name))

    def check(self) -> None:
        """See `Destination`: what was published is there."""

    def write_index(self, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> None:
        """See `Destination`."""
        write_index(os.path.join(self.folder, INDEX_FOLDER), entries)

    def settle(self) -> None:
        """See `Destination`."""

    def finish(self, names: ShardNaming) -> None:
        """See `Destination`."""
        mark_finished(self.folder, names)

    def close(self) -> None:
        """See `Destination`."""
