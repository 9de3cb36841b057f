"""Packing into a bucket: shards are written to a local folder and uploaded when finished; records track progress.

Objects cannot be renamed, so shards get their final names before all of them exist. Until then each folder is marked as
unfinished, and readers refuse it. The index comes last, then the mark is removed. What cannot be resumed is removed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from streamload.errors import StorageError
from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard
from streamload.index.index_writer import IndexFolder, remove_entries, update_with_tables
from streamload.index.unfinished import SHARDIFY, UnfinishedSet, mark_finished, mark_unfinished
from streamload.pack.finished_options import options_content, options_path
from streamload.pack.output import shown_bytes
from streamload.pack.publishing import CLASSES, Part, classes_content, final_name
from streamload.pack.records import DONE, TABLE, Finished
from streamload.pack.run_records import PackingRecords, UploadedShard
from streamload.pack.staging import LISTING, RUN, Run, Staging, clear, has_finished, remove_unfinished
from streamload.storage.protocol import Storage
from streamload.storage.storages import Storages
from streamload.write.destination import existing_names, upload_shard

_UPLOADS_AT_ONCE = 4


class RemoteStaging(Staging):
    """A `Staging` whose finished shards go to a bucket, with copies of the records, so that any machine can resume.

    Args:
        folder: the local folder.
        run: what is packed, and where to.
        storages: with that of the bucket.
        splits: the names of the parts; "" where there is but one.
    """

    def __init__(self, folder: str, run: Run, storages: Storages, splits: Sequence[str]) -> None:
        super().__init__(folder, run)
        self._storages = storages
        self._storage: Storage = storages.for_url(run.destination)
        self._records = PackingRecords(self._storage, run.destination)
        self._splits = splits
        self._known: dict[str, tuple[UploadedShard, Finished]] = {}
        self._begun = False
        self._taken: dict[str, list[tuple[str, str]]] = {split: [] for split in splits}
        self._etags: dict[str, str | None] = {}
        self._threads = ThreadPoolExecutor(_UPLOADS_AT_ONCE, "streamload-upload")
        self._uploads: deque[Future[None]] = deque()

    def earlier(self) -> dict[str, Any] | None:
        """See `Staging.earlier`; its record is in the bucket."""
        return self._records.run()

    def begin(self) -> None:
        """See `Staging.begin`; the bucket gets a copy of the records."""
        super().begin()
        self._records.begin(self.noted(RUN), self.path(LISTING))

    def earlier_listing(self) -> str:
        """See `Staging.earlier_listing`."""
        path = self.path(LISTING)
        self._records.fetch_listing(path)
        return path

    def reuse(self, before: dict[str, Any]) -> None:
        """See `Staging.reuse`: what the run uploaded, and what is in the folder if it is of the same run."""
        if self.noted(RUN) == before:
            remove_unfinished(self.folder)
        else:
            clear(self.folder)
            self.note(RUN, before)
        uploaded = self._records.uploaded()
        tables = self._records.tables({key: (self._folder_of_key(key), shard) for key, shard in uploaded.items()})
        self._known = {key: (uploaded[key], finished) for key, finished in tables.items()}

    def known(self, path: str, fingerprint: Callable[[], str]) -> Finished | None:
        """See `Staging.known`."""
        shard, finished = self._known.get(self._key(path), (None, None))
        if shard is None or finished is None or shard.task != fingerprint():
            return None
        return replace(finished, path=path)

    def take(self, part: str, path: str, fingerprint: Callable[[], str], finished: Finished) -> None:
        """See `Staging.take`: upload the shard unless it is there; wait while too many uploads are in flight.

        Raises:
            StorageError: this or an earlier upload failed.
        """
        key = self._key(path)
        name = None if finished.table is None else final_name(self.run.naming, path, len(self._taken[part]))
        if name is not None:
            self._taken[part].append((key, name))
        before, task = self._known.get(key), fingerprint()
        if before is not None and before[0].task == task and before[0].name == name:
            self._etags[key] = before[0].etag
            return
        if not self._begun:
            self._begun = True
            self._remove_earlier()
        while len(self._uploads) >= _UPLOADS_AT_ONCE:
            self._uploads.popleft().result()
        self._uploads.append(self._threads.submit(self._upload, part, key, name, task, finished))

    def publish(self, parts: Sequence[Part], classes: Sequence[str] | None) -> None:
        """See `Staging.publish`: wait for the uploads, and write `classes.json` and the indexes."""
        while self._uploads:
            self._uploads.popleft().result()
        content = classes_content(classes)
        for part in parts:
            folder = self._folder(part.name)
            if not part.shards:
                continue
            if content is None:
                self._storage.delete(f"{folder}/{CLASSES}")
            else:
                self._storage.write(f"{folder}/{CLASSES}", content)
        for part in parts:
            tables = [shard.table for shard in part.shards if shard.table is not None]
            entries = [
                (IndexedShard.of(name, table, etag=self._etags[key]), table)
                for (key, name), table in zip(self._taken[part.name], tables, strict=True)
            ]
            if entries:
                options = options_content(self.run.options)
                self._storage.write(options_path(self._folder(part.name)), options)
                update_with_tables(self._index(self._folder(part.name)), entries)
        self._unmark()

    def has_results(self) -> bool:
        """See `Staging.has_results`."""
        if has_finished(self.folder):
            return True
        try:
            return bool(self._records.uploaded())
        except StorageError:  # perhaps the reason why the run failed
            return True

    def kept_where(self) -> str:
        """See `Staging.kept_where`."""
        paths = [os.path.join(top, name) for top, _, names in os.walk(self.folder) for name in names if name[0] != "."]
        kept = shown_bytes(sum(map(os.path.getsize, paths)))
        return f", {kept} of it in {self.folder!r}" if has_finished(self.folder) else " in the bucket"

    def stop(self) -> None:
        """See `Staging.stop`: start no more uploads, and wait for those in flight."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def withdraw(self) -> None:
        """See `Staging.withdraw`: remove what was uploaded, and the records."""
        if self._begun or self._known:
            for split in self._splits:
                folder = self._folder(split)
                remove_entries(self._index(folder), self.run.naming.matches)
                for name in existing_names(self._storage, folder, self.run.naming):
                    self._storage.delete(f"{folder}/{name}")
            self._unmark()
        self._records.remove()

    def finish(self) -> None:
        """See `Staging.finish`."""
        clear(self.folder)  # first, since a run with records can be resumed
        self._records.remove()
        super().finish()

    def _remove_earlier(self) -> None:
        """Mark the folders as unfinished, and remove the index entries and then the shards of an earlier dataset."""
        # Each step for all parts before the next step, so that whoever reads several parts at once sees all or none.
        for split in self._splits:
            mark_unfinished(self._storage, self._folder(split), UnfinishedSet(self.run.naming, SHARDIFY))
        kept = {(self._folder_of_key(key), shard.name) for key, (shard, _) in self._known.items()}
        there = {
            folder: existing_names(self._storage, folder, self.run.naming) for folder in map(self._folder, self._splits)
        }
        for folder, existing in there.items():
            if not any(place == folder for place, _ in kept):
                remove_entries(self._index(folder), self.run.naming.matches)
                if existing:
                    self._storage.delete(f"{folder}/{CLASSES}")
                    self._storage.delete(options_path(folder))
        for folder, existing in there.items():
            for name in existing:
                if (folder, name) not in kept:
                    self._storage.delete(f"{folder}/{name}")

    def _unmark(self) -> None:
        for split in self._splits:
            mark_finished(self._storage, self._folder(split), self.run.naming)

    def _upload(self, part: str, key: str, name: str | None, task: str, finished: Finished) -> None:
        etag = None
        if name is not None and finished.table is not None:
            url = f"{self._folder(part)}/{name}"
            etag = upload_shard(self._storage, url, finished.path, finished.table.shard_bytes)
        self._records.keep(key, UploadedShard(task, name, etag, finished.faults), finished.table)
        self._etags[key] = etag
        for path in (finished.path + DONE, finished.path + TABLE, finished.path):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _index(self, folder: str) -> IndexFolder:
        return IndexFolder(self._storage, f"{folder}/{INDEX_FOLDER}")

    def _folder(self, split: str) -> str:
        return f"{self.run.destination}/{split}" if split else self.run.destination

    def _folder_of_key(self, key: str) -> str:
        split = key.partition("~")[0]
        return self._folder(split if split in self._splits else "")

    def _key(self, path: str) -> str:
        """Return the key of a shard's record."""
        return os.path.relpath(path, self.folder).partition("/")[2].replace("/", "~")


def local_folder(destination: str, base: str | None) -> str:
    """The local folder for runs into a remote destination; it depends on that and the user, so later runs find it.

    Args:
        destination: url of the destination.
        base: the parent folder, which is created; None is the system's folder for temporary files.

    Raises:
        OSError: the parent folder cannot be created.
    """
    parent = tempfile.gettempdir() if base is None else base
    digest = hashlib.sha256(destination.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    os.makedirs(parent, exist_ok=True)
    return os.path.join(parent, f"streamload-shardify-{os.geteuid()}-{digest}")
