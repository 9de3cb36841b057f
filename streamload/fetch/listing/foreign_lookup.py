"""Other tools' indexes in folders that have none of ours: the counts that they promise, and DALI's tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from streamload.dataset.foreign_index import foreign_counts, foreign_table
from streamload.dataset.table import ShardTable
from streamload.errors import StorageError
from streamload.fetch.storage.protocol import ShardInfo
from streamload.fetch.storage.storages import Storages

__all__ = ["ForeignLookup"]

_log = logging.getLogger("streamload")

_MOST_JSON_BYTES = 32 << 20
"""A larger JSON file is not taken for a list of shards; it may be annotations, and reading it would take long."""

_MOST_BYTES = 1 << 30
_ENERGON_INFO = ".nv-meta/.info.json"


class ForeignLookup:
    """Looks into folders; each is listed once.

    Remotely, only files about many shards are read: one for each shard would be a request for each shard.

    Args:
        storages: how files are read.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._names: dict[str, Sequence[str]] = {}

    def counts(self, folder: str, sizes: Mapping[str, int], listed: Sequence[ShardInfo] | None) -> dict[str, int]:
        """What is promised of some shards in a folder; nothing of those that no index names.

        Args:
            folder: the folder.
            sizes: the bytes of the shards, by name; negative where they are not known.
            listed: what lies in a remote folder, if it was listed; otherwise nothing is asked.

        Raises:
            DatasetIndexError: an index is damaged, contradicts another one, or belongs to other shards.
            ShardFormatError: a shard's samples are not in order, as its DALI index shows by their names.
        """
        local = self._storages.is_local(folder)
        names = self._local_names(folder) if local else _remote_names(listed or ())
        beside = [name for name in names if not name.endswith(".tar") or name in sizes]
        known = {name: size for name, size in sizes.items() if size >= 0}
        try:
            found = foreign_counts(lambda name: self._read(folder, name), beside, known, each_shard=local)
        except StorageError as exc:
            _log.warning("going on without other tools' indexes, since one of them cannot be read: %s", exc)
            return {}
        return {name: count for name, count in found.items() if name in sizes}

    def table(self, folder: str, name: str, shard_bytes: int) -> ShardTable | None:
        """The table of a local shard, where a DALI index says beyond doubt where its samples lie.

        Raises:
            DatasetIndexError, ShardFormatError: as for `counts`.
        """
        if not self._storages.is_local(folder):
            return None
        return foreign_table(lambda file: self._read(folder, file), self._local_names(folder), name, shard_bytes)

    def _local_names(self, folder: str) -> Sequence[str]:
        if folder not in self._names:
            try:
                with os.scandir(folder) as entries:
                    found = [entry.name for entry in entries if _may_be_read(entry)]
            except OSError:
                found = []
            if os.path.exists(os.path.join(folder, _ENERGON_INFO)):
                found.append(_ENERGON_INFO)
            self._names[folder] = sorted(found)
        return self._names[folder]

    def _read(self, folder: str, name: str) -> bytes:
        url = f"{folder.rstrip('/')}/{name}"
        return self._storages.for_url(url).read_bytes(url, most_bytes=_MOST_BYTES)


def _may_be_read(entry: os.DirEntry[str]) -> bool:
    if entry.name == ".nv-meta":
        return False
    return not entry.name.endswith(".json") or (entry.is_file() and entry.stat().st_size <= _MOST_JSON_BYTES)


def _remote_names(listed: Sequence[ShardInfo]) -> Sequence[str]:
    """Hidden folders are not listed; Energon, which has one, writes its other files beside the shards."""
    sizes = {info.url.rpartition("/")[2]: info.bytes for info in listed}
    names = sorted(name for name, size in sizes.items() if not name.endswith(".json") or size <= _MOST_JSON_BYTES)
    return [*names, _ENERGON_INFO] if any(name.endswith(".tar.idx") for name in names) else names
