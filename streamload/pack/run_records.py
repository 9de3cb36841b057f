"""The records of a run that packs into a bucket: small objects there, from which a later run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import escape
from typing import Any, TypeVar

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError
from streamload.index.dataset_index import MOST_INDEX_BYTES
from streamload.index.table_file import pack_table, unpack_table
from streamload.index.unfinished import PACKING
from streamload.pack.failures import UsageError
from streamload.pack.records import TABLE, Finished
from streamload.pack.sources.loading import Fault
from streamload.storage.protocol import Storage
from streamload.tar.table import ShardTable

_RECORDS, _RUN = PACKING.rsplit("/", 1)
_LISTING = "source.npz"
_AT_ONCE = 16
_MOST_RECORD_BYTES = 64 << 20

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class UploadedShard:
    """The record of a finished task and its shard.

    Attributes:
        task: the fingerprint of the task.
        name: the shard's name, or None if it would have no sample.
        etag: the object's ETag.
        faults: the files that could not be packed.
    """

    task: str
    name: str | None
    etag: str | None
    faults: tuple[Fault, ...]


class PackingRecords:
    """The records of an unfinished run.

    Args:
        storage: storage of the destination.
        destination: url of the destination.
    """

    def __init__(self, storage: Storage, destination: str) -> None:
        self._storage = storage
        self._destination = destination
        self._folder = f"{destination}/{_RECORDS}"

    def run(self) -> dict[str, Any] | None:
        """The record of a run that can be resumed, or None. Raises StorageError."""
        return self._document(_RUN)

    def begin(self, document: Mapping[str, Any], listing_path: str) -> None:
        """Record a new run, in place of any other. Raises StorageError.

        Args:
            document: the record of the run.
            listing_path: the file with the listing of its files.
        """
        self.remove()
        self._storage.write(f"{self._folder}/{_LISTING}", listing_path)
        self._write(_RUN, document)

    def fetch_listing(self, path: str) -> None:
        """Copy the listing of the recorded run to a local file. Raises OSError, StorageError."""
        with open(path, "wb") as file:
            file.write(self._storage.read_bytes(f"{self._folder}/{_LISTING}", most_bytes=MOST_INDEX_BYTES))

    def keep(self, key: str, shard: UploadedShard, table: ShardTable | None) -> None:
        """Record a finished task, and the table of its shard before. Raises StorageError."""
        if shard.name is not None and table is not None:
            self._storage.write(self._table_url(key), pack_table(table))
        document = {"task": shard.task, "name": shard.name, "etag": shard.etag, "faults": shard.faults}
        self._write(f"{key}.json", document)

    def uploaded(self) -> dict[str, UploadedShard]:
        """The finished tasks, by the keys given to `keep`. Raises StorageError; UsageError if a record is damaged."""
        names = [name for name in self._names() if name.endswith(".json") and name != _RUN]
        documents = _at_once(self._document, names)
        try:
            return {
                name.removesuffix(".json"): UploadedShard(
                    document["task"],
                    document["name"],
                    document["etag"],
                    tuple(Fault(*fault) for fault in document["faults"]),
                )
                for name, document in zip(names, documents, strict=True)
                if document is not None
            }
        except (LookupError, TypeError) as exc:
            raise UsageError(f"a record in {self._folder!r} is damaged; start over with --overwrite") from exc

    def tables(self, shards: Mapping[str, tuple[str, UploadedShard]]) -> dict[str, Finished]:
        """The results of finished tasks whose table and object still exist, by key. Raises StorageError.

        Args:
            shards: the folder and the shard of each key.
        """

        def find(key: str) -> Finished | None:
            folder, shard = shards[key]
            if shard.name is None:
                return Finished(key, None, shard.faults)
            url = self._table_url(key)
            try:
                table = unpack_table(self._storage.read_bytes(url, most_bytes=MOST_INDEX_BYTES), url)
                if self._storage.info(f"{folder}/{shard.name}").bytes != table.shard_bytes:
                    return None
            except (ShardNotFoundError, DatasetIndexError):
                return None
            return Finished(shard.name, table, shard.faults)

        found = _at_once(find, shards)
        return {key: finished for key, finished in zip(shards, found, strict=True) if finished is not None}

    def remove(self) -> None:
        """Remove all records, starting with the one that makes a run resumable. Raises StorageError."""
        self._storage.delete(f"{self._folder}/{_RUN}")
        _at_once(lambda name: self._storage.delete(f"{self._folder}/{name}"), self._names())

    def _table_url(self, key: str) -> str:
        return f"{self._folder}/{key}{TABLE}"

    def _names(self) -> list[str]:
        return [info.url.rpartition("/")[2] for info in self._storage.list(f"{escape(self._folder)}/*")]

    def _document(self, name: str) -> dict[str, Any] | None:
        url = f"{self._folder}/{name}"
        try:
            document = json.loads(self._storage.read_bytes(url, most_bytes=_MOST_RECORD_BYTES))
        except ShardNotFoundError:
            return None
        except ValueError as exc:
            raise StorageError("this record of an unfinished run is damaged; remove it", url=url) from exc
        return document if isinstance(document, dict) else None

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        self._storage.write(f"{self._folder}/{os.path.basename(name)}", json.dumps(document).encode("ascii"))


def _at_once(act: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    with ThreadPoolExecutor(_AT_ONCE, "streamload-records") as threads:
        return list(threads.map(act, items))
