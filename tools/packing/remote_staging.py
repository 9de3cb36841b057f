"""Packing into a bucket: shards grow in a local folder and are uploaded when finished; records say how far it is.

Objects cannot be renamed, so shards get their names before all of them are there; until then each folder has the mark
of an unfinished set, which readers refuse. What makes them a dataset, the index, comes last, and then the mark goes.
What cannot be resumed is removed again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from streamload_tools.failures import UsageError
from streamload_tools.packing.publishing import CLASSES, NAMES, Part, classes_content
from streamload_tools.packing.records import DONE, TABLE, Finished
from streamload_tools.packing.run_records import PackingRecords, UploadedShard
from streamload_tools.packing.staging import Run, Staging, has_finished, locked_folder, remove_unfinished
from streamload_tools.sizes import shown_bytes

from streamload.errors import StorageError
from streamload.index.dataset_index import IndexedShard, table_path
from streamload.index.remote_index import (
    merge_remote_index,
    remote_index_folder,
    remove_remote_entries,
    write_remote_table,
)
from streamload.index.unfinished import SHARDIFY, UnfinishedSet, mark_remote_finished, mark_remote_unfinished
from streamload.storage.protocol import Storage
from streamload.write.destination import existing_names, upload_shard

__all__ = ["RemoteStaging", "remote_staging"]

_UPLOADS_AT_ONCE = 4
_RUN_ID = "id.json"
_SHARDS = "shards"


class RemoteStaging(Staging):
    """A `Staging` whose finished shards go to a bucket.

    Args:
        folder: the local folder.
        lock: the descriptor that holds its lock.
        resumed: whether there is something from an earlier run.
        storage: of the bucket.
        destination: the folder there.
        splits: the names of the parts; "" where there is but one.
    """

    def __init__(
        self,
        folder: str,
        lock: int,
        *,
        resumed: bool,
        storage: Storage,
        destination: str,
        splits: Sequence[str],
    ) -> None:
        super().__init__(folder, lock, resumed=resumed)
        self.records = PackingRecords(storage, destination)
        self._storage = storage
        self._destination = destination
        self._splits = splits
        self._known: dict[str, tuple[UploadedShard, Finished]] = {}
        self._begun = False
        self._taken: dict[str, list[tuple[str, str]]] = {split: [] for split in splits}
        self._etags: dict[str, str | None] = {}
        self._threads = ThreadPoolExecutor(_UPLOADS_AT_ONCE, "streamload-upload")
        self._uploads: deque[Future[None]] = deque()

    def learn(self) -> None:
        """Find out what an earlier run has uploaded. Raises StorageError."""
        uploaded = self.records.uploaded()
        tables = self.records.tables({key: (self._folder_of_key(key), shard) for key, shard in uploaded.items()})
        self._known = {key: (uploaded[key], finished) for key, finished in tables.items()}

    def known(self, path: str, fingerprint: Callable[[], str]) -> Finished | None:
        """See `Staging.known`."""
        shard, finished = self._known.get(self._key(path), (None, None))
        return finished if shard is not None and shard.task == fingerprint() else None

    def take(self, part: str, path: str, fingerprint: Callable[[], str], finished: Finished) -> None:
        """See `Staging.take`: upload what is not there yet, when fewer than some uploads are in flight.

        Raises:
            StorageError: this or an earlier upload failed.
        """
        key = self._key(path)
        name = None if finished.table is None else NAMES.name(len(self._taken[part]))
        if name is not None:
            self._taken[part].append((key, name))
        before, task = self._known.get(key), fingerprint()
        if before is not None and before[0].task == task and before[0].name == name:
            self._etags[key] = before[0].etag
            return
        if not self._begun:
            self._begun = True
            self._evict()
        while len(self._uploads) >= _UPLOADS_AT_ONCE:
            self._uploads.popleft().result()
        self._uploads.append(self._threads.submit(self._upload, part, key, name, task, finished))

    def publish(self, parts: Sequence[Part], classes: Sequence[str] | None) -> None:
        """Wait for the uploads, and write all that belongs to the shards, the indexes last.

        Raises:
            StorageError: something cannot be written; a run that resumes this one does it again.
        """
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
                IndexedShard.of(name, table, etag=self._etags[key])
                for (key, name), table in zip(self._taken[part.name], tables, strict=True)
            ]
            if entries:
                fields = {field for table in tables for field in table.fields}
                merge_remote_index(self._storage, remote_index_folder(self._folder(part.name)), entries, fields)
        self._finish()

    def stop(self) -> None:
        """Begin no more uploads, and wait for those that are in flight. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def withdraw(self) -> None:
        """Remove all that was uploaded, and the records. Raises StorageError."""
        if self._begun or self._known:
            for split in self._splits:
                folder = self._folder(split)
                remove_remote_entries(self._storage, remote_index_folder(folder), NAMES.matches)
                for name in existing_names(self._storage, folder, NAMES):
                    self._remove_shard(folder, name)
            self._finish()
        self.records.remove()

    def _evict(self) -> None:
        """Mark the folders, and remove the shards of an earlier dataset, and their entries in the indexes first."""
        # One step for all of them, then the next: whoever reads several must not take some for the whole.
        for split in self._splits:
            mark_remote_unfinished(self._storage, self._folder(split), UnfinishedSet(NAMES, SHARDIFY))
        kept = {(self._folder_of_key(key), shard.name) for key, (shard, _) in self._known.items()}
        there = {folder: existing_names(self._storage, folder, NAMES) for folder in map(self._folder, self._splits)}
        for folder, existing in there.items():
            if not any(place == folder for place, _ in kept):
                remove_remote_entries(self._storage, remote_index_folder(folder), NAMES.matches)
                if existing:
                    self._storage.delete(f"{folder}/{CLASSES}")
        for folder, existing in there.items():
            for name in existing:
                if (folder, name) not in kept:
                    self._remove_shard(folder, name)

    def _finish(self) -> None:
        for split in self._splits:
            mark_remote_finished(self._storage, self._folder(split), NAMES)

    def _remove_shard(self, folder: str, name: str) -> None:
        self._storage.delete(f"{folder}/{name}")
        self._storage.delete(table_path(remote_index_folder(folder), name))

    def _upload(self, part: str, key: str, name: str | None, task: str, finished: Finished) -> None:
        etag = None
        if name is not None and finished.table is not None:
            folder, table = self._folder(part), finished.table
            etag = upload_shard(self._storage, f"{folder}/{name}", finished.path, table.shard_bytes)
            write_remote_table(self._storage, remote_index_folder(folder), name, table)
        self.records.keep(key, UploadedShard(task, name, etag, finished.faults))
        self._etags[key] = etag
        for path in (finished.path + DONE, finished.path + TABLE, finished.path):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def _folder(self, split: str) -> str:
        return f"{self._destination}/{split}" if split else self._destination

    def _folder_of_key(self, key: str) -> str:
        split = key.partition("~")[0]
        return self._folder(split if split in self._splits else "")

    def _key(self, path: str) -> str:
        """How the record of a shard is called; "" for what is no shard."""
        kind, _, rest = os.path.relpath(path, self.folder).partition("/")
        return rest.replace("/", "~") if kind == _SHARDS else ""


@contextmanager
def remote_staging(run: Run, storage: Storage, splits: Sequence[str], base: str | None) -> Iterator[RemoteStaging]:
    """Open the local folder for a run that packs into a bucket, and its records there.

    If the block is left by an error, what was uploaded stays for a run with `resume`, and so does what is finished
    locally; or nothing does, if it was abandoned. If it is left otherwise, only what was published stays.

    Args:
        run: what it is about.
        storage: of the bucket.
        splits: the names of the parts.
        base: where the local folder is made; None is the system's folder for temporary files.

    Raises:
        UsageError: as for `staging_folder`.
        OSError, StorageError: something cannot be written.
    """
    folder = _local_folder(run.destination, base)
    with locked_folder(folder, run.destination) as lock:
        staging = RemoteStaging(
            folder, lock, resumed=False, storage=storage, destination=run.destination, splits=splits
        )
        try:
            _prepare(staging, run)
        except BaseException:
            staging.stop()
            if not has_finished(folder):
                shutil.rmtree(folder)
            raise
        try:
            yield staging
        except BaseException as exc:
            staging.stop()
            _leave(staging, exc)
            raise
        else:
            staging.records.remove()
            shutil.rmtree(folder)
        finally:
            staging.stop()


def _prepare(staging: RemoteStaging, run: Run) -> None:
    before, scratch = staging.records.run(), staging.path("listing.npz")
    if before is not None and run.resume:
        difference = staging.records.difference(run.options, run.listing, scratch)
        if difference is not None:
            raise UsageError(
                f"the unfinished run in {run.destination!r} cannot be resumed: {difference}; give the same options and "
                "files, or start anew with --overwrite"
            )
        staging.resumed = True
        if staging.noted(_RUN_ID) == before["id"]:
            remove_unfinished(staging.folder)
        else:
            _clear(staging.folder)
            staging.note(_RUN_ID, before["id"])
        staging.learn()
        return
    if before is not None and not run.overwrite:
        raise UsageError(
            f"{run.destination!r} holds a run that was not finished; go on with --resume, or throw it away with "
            "--overwrite"
        )
    _clear(staging.folder)
    staging.note(_RUN_ID, staging.records.begin(run.options, run.listing, staging.path("listing.npz")))


def _leave(staging: RemoteStaging, exc: BaseException) -> None:
    """Keep what a later run can use, and nothing else."""
    if staging.keeps and (has_finished(staging.folder) or _has_uploaded(staging)):
        exc.add_note(
            f"what is finished is kept{_kept_here(staging.folder)}: run the same command with --resume to go on, or "
            "with --overwrite to start anew"
        )
        if has_finished(staging.folder):
            remove_unfinished(staging.folder)
            return
    else:
        staging.withdraw()
    shutil.rmtree(staging.folder, ignore_errors=True)


def _kept_here(folder: str) -> str:
    """Where and how much it is that a run leaves on this machine."""
    paths = [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names if name[0] != "."]
    kept = shown_bytes(sum(map(os.path.getsize, paths)))
    return f", {kept} of it in {folder!r}" if has_finished(folder) else " in the bucket"


def _has_uploaded(staging: RemoteStaging) -> bool:
    try:
        return bool(staging.records.uploaded())
    except StorageError:  # which may be why the run has ended
        return True


def _local_folder(destination: str, base: str | None) -> str:
    """The same folder for each run into a destination, so that a later one finds what an earlier one left."""
    parent = tempfile.gettempdir() if base is None else base
    digest = hashlib.sha256(destination.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    folder = os.path.join(parent, f"streamload-shardify-{os.geteuid()}-{digest}")
    os.makedirs(parent, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or not os.path.isdir(folder) or os.path.islink(folder):
        raise UsageError(f"{folder!r} is another user's; name another folder with --staging")
    return folder


def _clear(folder: str) -> None:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
