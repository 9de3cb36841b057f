"""One run into a destination: marks it, does the tasks that are not done yet, and writes the index last.

Every reader refuses what a killed run leaves, because the mark stands. Until a run is complete, `run.json` beside the
shards names all shards that may be there, and each task that is done has a record.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from streamload.errors import ShardNotFoundError, StorageError, StreamloadError, without_secrets
from streamload.index.columns import CLASSES_FILE
from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard, is_plain_name
from streamload.index.listing import IndexLookup
from streamload.index.shard_names import PACKING_FOLDER, SHARDIFY
from streamload.limits import SMALL_REQUESTS
from streamload.pack.output import Progress, UsageError, say
from streamload.pack.processes import Processes
from streamload.pack.ray_pool import RayPool, open_pool
from streamload.pack.tasks import Record, Target, Task, do, read_record, record_url
from streamload.storage.protocol import ShardInfo, escaped, same_etag
from streamload.text import counted
from streamload.workers.launchers import available_processors
from streamload.write.destination import Destination

Pool = Processes | RayPool

_MOST_BYTES = 1 << 30
_RESUME, _OVERWRITE = "--resume (resume=True)", "--overwrite (overwrite=True)"
_FURTHER = re.compile(r"_\d{6}(?=\.tar\Z)")
_HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class Start:
    """How a run begins and who does the work.

    Attributes:
        resume: go on with an interrupted run.
        overwrite: remove the shards that are there, or an interrupted run.
        workers: number of processes, or of tasks of Ray in flight; None chooses.
        ray: the address of a Ray cluster, or None for this machine.
    """

    resume: bool = False
    overwrite: bool = False
    workers: int | None = None
    ray: str | None = None


def pack_into(
    target: Target,
    start: Start,
    plan: Callable[[Pool], Sequence[Task]],
    check: Callable[[Sequence[Record]], None],
    *,
    label: str,
    unit: str,
    splits: Sequence[str] = ("",),
    classes: Sequence[str] | None = None,
) -> list[Record] | None:
    """Do a plan, and complete the destination; what was done before is not done again.

    Args:
        target: where and how shards are written.
        start: how the run begins.
        plan: makes the tasks, in the order of their shards. It may not depend on the number of workers.
        check: called with all records before the index is written; what it raises ends the run.
        label: the activity, for the progress.
        unit: what the tasks' items are, in the plural.
        splits: the folders in the destination, or "" for itself.
        classes: the names of the classes, or None.

    Returns:
        The records in the order of the tasks; None if the destination is complete already.

    Raises:
        UsageError: there are shards or an unfinished run already, or another run is at work.
        StreamloadError, OSError, ValueError: a task failed. What is finished is kept for a run with `resume`.
    """
    run = _Run(target, splits, start)
    with run.locked():
        if not run.may_begin():
            return None
        try:
            with _open_workers(target, start) as pool:
                tasks = plan(pool)
                records = run.begin(tasks)
                todo = [task for task in tasks if task.digest not in records]
                calls = (partial(do, target, task, run.is_faulty) for task in todo)
                with Progress(label, sum(task.items for task in tasks), unit) as progress:
                    progress.advance(sum(task.items for task in tasks if task.digest in records), 0)
                    for record in pool.results(calls, progress.advance):
                        records[record.digest] = record
                        run.note(record)
            ordered = [records[task.digest] for task in tasks]
            check(ordered)
            run.finish(ordered, classes)
        except BaseException as exc:
            run.leave(exc)
            raise
    return ordered


@contextmanager
def _open_workers(target: Target, start: Start) -> Iterator[Pool]:
    alone = target.storages.is_process_local(target.dest)
    if start.ray is not None and alone:
        raise UsageError(f"only this process can write to {target.dest!r}; leave out ray, or choose another folder")
    with open_pool(start.ray, start.workers) as cluster:
        if cluster is not None:
            yield cluster
            return
        with Processes(1 if alone else start.workers or available_processors()) as processes:
            yield processes


class _Run:
    """The state of one destination.

    Attributes:
        is_faulty: whether there was a fault that may not be skipped. Tasks that begin later only look for faults.
    """

    def __init__(self, target: Target, splits: Sequence[str], start: Start) -> None:
        self._target, self._start = target, start
        self._root = target.folder("")
        self._folders = {split: target.folder(split) for split in splits}
        self._storage = self._root.storage
        self._path = self._root.path
        self._run_file = f"{target.dest}/{PACKING_FOLDER}/run.json"
        self._names: dict[str, set[str]] = {}
        self._is_begun = False
        self._has_shards = False
        self.is_faulty = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other runs from a local destination, which is created. A bucket has no locks.

        Raises:
            UsageError: another run is at work.
            OSError: the destination cannot be created.
        """
        if self._path is None:
            yield
            return
        folder = os.path.join(self._path, PACKING_FOLDER)
        made = [] if os.path.isdir(self._path) else [self._path]
        os.makedirs(self._path, exist_ok=True)
        try:
            lock = _lock(folder, self._path)
            try:
                yield
            finally:
                os.close(lock)
        finally:
            for each in [*(one.folder for one in self._folders.values() if one.folder != self._path), folder, *made]:
                with suppress(OSError):  # usually something is in it
                    os.rmdir(each)

    def may_begin(self) -> bool:
        """Return False if a run that is to be resumed is complete already.

        Raises:
            UsageError: there are shards or an unfinished run, and neither option says what to do with them; or shards
                that no index and no run names.
            StreamloadError: the destination cannot be read.
        """
        start, naming = self._start, self._target.naming
        unfinished = self._read_run_file()
        if unfinished is None:
            self._remove_records()  # of a run that was complete, but was killed before they were removed
        elif not (start.resume or start.overwrite):
            raise UsageError(
                f"{self._target.dest!r} holds a run that was not finished; go on with {_RESUME}, or discard it with "
                f"{_OVERWRITE}"
            )
        self._names = unfinished or {}
        for split, folder in self._folders.items():
            existing = folder.existing(naming)
            if existing and unfinished is None:
                there = f"{folder.folder!r} holds {counted(len(existing), 'shard')} already"
                if start.overwrite:
                    index = IndexLookup(None, self._target.storages).of_folder(folder.folder)
                    self._names[split] = set() if index is None else {shard.name for shard in index.shards}
                elif start.resume:
                    say(f"note: there is no unfinished run to resume, and {there}; to pack again, add {_OVERWRITE}")
                    return False
                else:
                    raise UsageError(f"{there}; replace them with {_OVERWRITE}, or choose another destination")
            if foreign := [name for name in existing if not self._is_ours(split, name)]:
                raise UsageError(
                    f"{folder.folder!r} holds {foreign[0]!r}, which no index and no run of packing names; move it "
                    "away, or choose another destination"
                )
        if unfinished is None:
            self._refuse_other_splits()
            if start.resume:
                say("note: there is no unfinished run to resume; packing from the start")
        return True

    def _is_ours(self, split: str, name: str) -> bool:
        """Return True if an index or a run names a shard, or the first shard of its task."""
        return not {name, _FURTHER.sub("", name)}.isdisjoint(self._names.get(split, ()))

    def _refuse_other_splits(self) -> None:
        if "" in self._folders:
            return
        pattern = f"{escaped(self._target.dest)}/*/{self._target.naming.before}*{self._target.naming.after}"
        others = {info.url.rsplit("/", 2)[-2] for info in self._storage.list(pattern)} - self._folders.keys()
        if others or self._root.existing(self._target.naming):
            folder = self._target.folder(min(others, default="")).folder
            raise UsageError(
                f"{folder!r} holds shards of an earlier run with other splits, or none, which would stay beside "
                "the new ones; remove them first"
            )

    def begin(self, tasks: Sequence[Task]) -> dict[str, Record]:
        """Mark the destination, remove what no task has made, and return the records of tasks that are done."""
        records = self._records(tasks)
        self._has_shards = any(record.shards for record in records.values())
        replaced = set(self._names)
        for task in tasks:
            self._names.setdefault(task.split, set()).add(task.name)
        self._is_begun = True
        content = {split: sorted(names) for split, names in self._names.items()}
        self._storage.write(self._run_file, json.dumps(content, indent=0).encode("ascii"))
        kept = {(record.split, shard.name) for record in records.values() for shard in record.shards}
        for folder in self._marked().values():  # all of them, before a shard is gone: what is left is not taken for all
            folder.mark(self._target.naming, SHARDIFY)
            folder.remove(self._target.naming, ())
        for split, folder in self._marked().items():
            folder.remove_abandoned(self._target.naming)
            self._remove_half_written(folder.folder, os.path.join(folder.folder, INDEX_FOLDER))
            self._remove_shards(split, folder, kept)
            if split in replaced:
                self._storage.delete(f"{folder.folder}/{CLASSES_FILE}")
        self._remove_half_written(f"{self._target.dest}/{PACKING_FOLDER}")
        self._remove_records(keep=records.keys())
        if records:
            say(f"note: {len(records):,} of {counted(len(tasks), 'task')} are done already")
        return records

    def _marked(self) -> dict[str, Destination]:
        """Return all folders of this and of the earlier run."""
        others = {split: self._target.folder(split) for split in self._names}
        return {"": self._root, **others, **self._folders}

    def _remove_shards(self, split: str, folder: Destination, kept: Collection[tuple[str, str]]) -> None:
        """Remove the index and the shards that this or an earlier run has made, but for those that are kept."""
        existing = folder.existing(self._target.naming) if self._names.get(split) else []
        ours = [name for name in existing if self._is_ours(split, name) and (split, name) not in kept]
        folder.remove(self._target.naming, ours)

    def _remove_half_written(self, *folders: str) -> None:
        for folder in folders if self._path is not None else ():
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                if _HALF_WRITTEN.fullmatch(name):
                    os.unlink(os.path.join(folder, name))

    def _records(self, tasks: Sequence[Task]) -> dict[str, Record]:
        """Return the records of these tasks whose shards are as they were."""
        names = self._record_names() if self._start.resume else set()
        if not names:
            return {}
        there: dict[tuple[str, str], ShardInfo] = {}
        for split, folder in self._folders.items():
            listed = self._storage.list(f"{escaped(folder.folder)}/*")
            there |= {(split, info.url.rpartition("/")[2]): info for info in listed}

        def record_of(task: Task) -> Record | None:
            with suppress(ValueError, LookupError, TypeError, StreamloadError):
                content = self._storage.read_bytes(record_url(self._target.dest, task.digest), most_bytes=_MOST_BYTES)
                record = read_record(content, task)
                kept = all(_is_same(shard.info, there.get((task.split, shard.name))) for shard in record.shards)
                if kept and (not record.faults or self._target.skip_bad):
                    return record
            return None

        with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-records") as threads:
            found = threads.map(record_of, [task for task in tasks if f"{task.digest}.record" in names])
            return {record.digest: record for record in found if record is not None}

    def _record_names(self) -> set[str]:
        pattern = f"{escaped(self._target.dest)}/{PACKING_FOLDER}/*.record"
        return {info.url.rpartition("/")[2] for info in self._storage.list(pattern)}

    def _remove_records(self, *, keep: Collection[str] = ()) -> None:
        for name in sorted(self._record_names()):
            if name.removesuffix(".record") not in keep:
                self._storage.delete(f"{self._target.dest}/{PACKING_FOLDER}/{name}")

    def note(self, record: Record) -> None:
        """Note that a task is done. Raise StorageError if its shards are not to be seen from here."""
        for shard in record.shards if self._path is not None else ():
            path = os.path.join(self._path or "", record.split, shard.name)
            if not os.path.exists(path):
                raise StorageError(
                    "this shard was finished, but is not here; give a bucket, or a folder that all nodes have",
                    url=path,
                )
        self._has_shards = self._has_shards or bool(record.shards)
        self.is_faulty = self.is_faulty or bool(record.faults and not self._target.skip_bad)

    def finish(self, records: Sequence[Record], classes: Sequence[str] | None) -> None:
        """Write the indexes and the names of the classes; then remove the marks and what a later run would need."""
        for split, folder in self._folders.items():
            shards = [shard for record in records if record.split == split for shard in record.shards]
            if not shards:
                continue
            folder.write_index([(IndexedShard.of(name, table, etag=info.etag), table) for name, info, table in shards])
            if classes is not None:
                numbers = {name: number for number, name in enumerate(classes)}
                content = json.dumps({"classes": list(classes), "class_to_idx": numbers}, indent=1) + "\n"
                self._storage.write(f"{folder.folder}/{CLASSES_FILE}", content.encode("ascii"))
        self._unmark()

    def _unmark(self) -> None:
        for folder in self._marked().values():
            folder.finish(self._target.naming)
        self._storage.delete(self._run_file)  # from here on nothing is unfinished
        self._remove_records()

    def leave(self, exc: BaseException) -> None:
        """Keep what a later run can use; if there is nothing, leave no trace. Say how to go on."""
        if not self._is_begun:
            return
        with suppress(OSError, StreamloadError):
            for folder in self._marked().values():
                folder.remove_abandoned(self._target.naming)
            if not self._has_shards:
                for split, folder in self._marked().items():
                    self._remove_shards(split, folder, ())
                self._unmark()
                return
        exc.add_note(
            f"what is finished is kept: run the same again with {_RESUME} to go on, or {_OVERWRITE} to start over"
        )

    def _read_run_file(self) -> dict[str, set[str]] | None:
        """Return the names of all shards that an unfinished run may have left, by split."""
        try:
            content = self._storage.read_bytes(self._run_file, most_bytes=_MOST_BYTES)
        except ShardNotFoundError:
            return None
        with suppress(ValueError, TypeError, AttributeError):
            names = {str(split): set(map(str, shards)) for split, shards in json.loads(content).items()}
            if all(map(is_plain_name, names.keys() - {""})):
                return names
        raise UsageError(f"{without_secrets(self._run_file)!r} was not made by a run, or is damaged; remove it")


def _is_same(one: ShardInfo, other: ShardInfo | None) -> bool:
    if other is None or one.bytes != other.bytes or not same_etag(one.etag, other.etag):
        return False
    return one.etag is not None or one.mtime_ns == other.mtime_ns


def _lock(folder: str, destination: str) -> int:
    """Create the folder of records and lock it; return its descriptor."""
    with suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"another run of packing is writing to {destination!r}; wait until it ends") from None
    except OSError:  # some network file systems have no locks
        pass
    return lock
