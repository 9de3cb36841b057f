"""Run tasks into a destination: mark it, run unfinished tasks, and write the index last.

Until then readers refuse it, `run.json` names all shards that may exist, and each finished task has a record.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob

from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.columns import CLASSES_FILE
from streamload.index.dataset_index import INDEX_FOLDER, is_plain_name
from streamload.index.listing import ShardFinder
from streamload.index.shard_names import PACKING_FOLDER, SHARDIFY, read_if_there, write_mark
from streamload.limits import SMALL_REQUESTS
from streamload.pack.output import Progress, UsageError, say
from streamload.pack.pools import Pool, open_pool, processes
from streamload.pack.tasks import Record, Target, Task, read_record, run_task
from streamload.storage.protocol import ShardInfo, escaped, same_etag
from streamload.text import counted
from streamload.workers.launchers import available_processors
from streamload.write.destination import indexed

_MOST_BYTES = 1 << 30
_RUN_FILE = "run.json"
_RESUME, _OVERWRITE = "--resume (resume=True)", "--overwrite (overwrite=True)"
_FURTHER = re.compile(r"_\d{6}(?=\.tar\Z)")
_HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def pack_into(
    target: Target,
    plan: Callable[[Pool], Sequence[Task]],
    check: Callable[[Sequence[Record]], None],
    *,
    label: str,
    unit: str,
    splits: Sequence[str] = ("",),
    classes: Sequence[str] | None = None,
) -> list[Record] | None:
    """Run the unfinished tasks of a plan, and complete the destination; return the records in order.

    Returns None if the destination is already complete.

    Args:
        target: where and how to write shards.
        plan: returns the tasks in the order of their shards, for any number of workers.
        check: called with all records before the index is written; may raise to end the run.
        label: the activity, for the progress.
        unit: the tasks' items, in the plural.
        splits: the folders in the destination, or "" for itself.
        classes: the names of the classes, or None.

    Raises:
        UsageError: there are shards already, or an unfinished or concurrent run.
        StreamloadError, OSError, ValueError: a task failed; finished shards are kept for `resume`.
    """
    run = _Run(target, splits)
    with run.locked():
        if not run.may_begin():
            return None
        try:
            alone = target.storages.is_process_local(target.dest)
            if target.ray is not None and alone:
                raise UsageError(f"only this process can write to {target.dest!r}; leave out ray")
            count = 1 if alone or target.ray is not None else target.workers or available_processors()
            with open_pool(target.ray, target.workers) as cluster, processes(count) as here:
                pool = here if cluster is None else cluster
                tasks = plan(pool)
                run.begin(tasks)
                items = {task.digest: task.items for task in tasks}
                todo = [task for task in tasks if task.digest not in run.records]
                with Progress(label, sum(items.values()), unit) as progress:
                    progress.advance(sum(map(items.__getitem__, run.records)), 0)
                    for record in pool(partial(run_task, target, task) for task in todo):
                        run.records[record.digest] = record
                        progress.advance(items[record.digest], sum(shard.info.bytes for shard in record.shards))
            records = [run.records[task.digest] for task in tasks]
            check(records)
            run.finish(records, classes)
        except BaseException as exc:
            run.leave(exc)
            raise
    return records


class _Run:
    """The state of one destination.

    Attributes:
        records: of the finished tasks, by digest.
    """

    def __init__(self, target: Target, splits: Sequence[str]) -> None:
        self._target, self._splits = target, splits
        self._root = target.folder("")
        self._storage, self._path = self._root.storage, self._root.path
        self._packing = f"{self._root.folder}/{PACKING_FOLDER}"
        self._folders = {split: target.folder(split) for split in ("", *splits)}  # including those of an unfinished run
        self._names: dict[str, set[str]] = {}  # of all shards that may exist, by split
        self._is_begun = False
        self.records: dict[str, Record] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other runs from a local destination, which is created. Buckets have no locks."""
        if self._path is None:
            yield
            return
        created = [] if os.path.isdir(self._path) else [self._path]
        lock = -1
        try:
            os.makedirs(self._packing, 0o700, exist_ok=True)
            lock = os.open(self._packing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"another run of packing is writing to {self._path!r}; wait until it ends") from None
            except OSError:  # some network file systems have no locks
                pass
            yield
        finally:
            if lock >= 0:
                os.close(lock)
            for folder in [*(self._folders[split].folder for split in self._splits if split), self._packing, *created]:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)

    def may_begin(self) -> bool:
        """Return False if a run to resume is already complete. Raises UsageError for shards that must stay."""
        target, unfinished = self._target, self._read_run_file()
        if unfinished is None:
            self._remove_records()  # left by a complete run that was killed before removing them
        elif not (target.resume or target.overwrite):
            advice = f"go on with {_RESUME}, or discard it with {_OVERWRITE}"
            raise UsageError(f"{target.dest!r} holds a run that was not finished; {advice}")
        self._names = unfinished or {}
        self._folders |= {split: target.folder(split) for split in self._names}
        for split in self._splits:
            folder = self._folders[split]
            existing = folder.existing(target.naming)
            if existing and unfinished is None:
                state = f"{folder.folder!r} holds {counted(len(existing), 'shard')} already"
                if not (target.resume or target.overwrite):
                    raise UsageError(f"{state}; replace them with {_OVERWRITE}, or choose another destination")
                if not target.overwrite:
                    say(f"note: there is no unfinished run to resume, and {state}; to pack again, add {_OVERWRITE}")
                    return False
                index = ShardFinder(None, target.storages).index_of(folder.folder)
                self._names[split] = set() if index is None else {shard.name for shard in index.shards}
            if foreign := set(existing).difference(self._ours(split)):
                reason = "which no index and no run of packing names; move it away"
                raise UsageError(f"{folder.folder!r} holds {min(foreign)!r}, {reason}")
        if unfinished is None and "" not in self._splits:
            self._refuse_other_splits()
        if unfinished is None and target.resume:
            say("note: there is no unfinished run to resume; packing from the start")
        return True

    def _ours(self, split: str) -> list[str]:
        """Return the existing shards that an index or a run names, and further ones of their tasks."""
        names = self._names.get(split)
        existing = self._folders[split].existing(self._target.naming) if names else []
        return [name for name in existing if names and (name in names or _FURTHER.sub("", name) in names)]

    def _refuse_other_splits(self) -> None:
        naming = self._target.naming
        shards = self._storage.list(f"{escaped(self._target.dest)}/*/{naming.before}*{naming.after}")
        others = {info.url.rsplit("/", 2)[-2] for info in shards} - self._folders.keys()
        if others or self._root.existing(naming):
            folder = self._target.folder(min(others, default="")).folder
            raise UsageError(f"{folder!r} holds shards of an earlier run with other splits, or none; remove them first")

    def begin(self, tasks: Sequence[Task]) -> None:
        """Mark the destination, and remove everything except the shards of finished tasks."""
        naming, replaced = self._target.naming, set(self._names)
        self.records = self._finished(tasks)
        for task in tasks:
            self._names.setdefault(task.split, set()).add(task.name)
        self._is_begun = True
        content = {split: sorted(names) for split, names in self._names.items()}
        self._storage.write(f"{self._packing}/{_RUN_FILE}", json.dumps(content, indent=0).encode("ascii"))
        for folder in self._folders.values():  # all before any shard is removed, or a glob could list the rest
            write_mark(self._storage, folder.folder, naming, SHARDIFY)
            folder.remove(naming, ())
        self._remove_half_written()
        self._remove_shards({(record.split, each.name) for record in self.records.values() for each in record.shards})
        for split in replaced:
            self._storage.delete(f"{self._folders[split].folder}/{CLASSES_FILE}")
        self._remove_records(keep=self.records.keys())
        if self.records:
            say(f"note: {len(self.records):,} of {counted(len(tasks), 'task')} are done already")

    def _remove_half_written(self) -> None:
        for each in self._folders.values() if self._path is not None else ():
            each.remove_abandoned(self._target.naming)
            for folder in (each.folder, f"{each.folder}/{INDEX_FOLDER}", self._packing):
                for path in filter(_HALF_WRITTEN.fullmatch, glob(".*.tmp", root_dir=folder)):
                    os.unlink(f"{folder}/{path}")

    def _remove_shards(self, kept: Collection[tuple[str, str]]) -> None:
        for split, folder in self._folders.items():
            folder.remove(self._target.naming, [name for name in self._ours(split) if (split, name) not in kept])

    def _finished(self, tasks: Sequence[Task]) -> dict[str, Record]:
        stored = self._record_urls() if self._target.resume else {}

        def record_of(task: Task) -> Record | None:
            folder = self._folders[task.split].folder
            with suppress(ValueError, LookupError, TypeError, StreamloadError):
                record = read_record(self._storage.read_bytes(stored[task.digest], most_bytes=_MOST_BYTES), task)
                kept = all(_is_same(info, self._storage.info(f"{folder}/{name}")) for name, info, _ in record.shards)
                return record if kept and (not record.faults or self._target.skip_bad) else None
            return None

        with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-records") as threads:
            records = threads.map(record_of, [task for task in tasks if task.digest in stored])
            return {record.digest: record for record in records if record is not None}

    def _record_urls(self) -> dict[str, str]:
        urls = [info.url for info in self._storage.list(f"{escaped(self._packing)}/*.record")]
        return {url.rpartition("/")[2].removesuffix(".record"): url for url in urls}

    def _remove_records(self, *, keep: Collection[str] = ()) -> None:
        for digest, url in self._record_urls().items():
            if digest not in keep:
                self._storage.delete(url)

    def finish(self, records: Sequence[Record], classes: Sequence[str] | None) -> None:
        """Write the indexes and the names of the classes; then remove marks and state.

        Raises StorageError if a shard is not visible here.
        """
        for split in self._splits:
            shards = [shard for record in records if record.split == split for shard in record.shards]
            folder = self._folders[split]
            if missing := {shard.name for shard in shards}.difference(folder.existing(self._target.naming)):
                message = "this shard was finished, but is not here; give a bucket, or a folder that all nodes have"
                raise StorageError(message, url=f"{folder.folder}/{min(missing)}")
            if shards:
                folder.index.update_with_tables(indexed(shards))
            if shards and classes is not None:
                numbers = {name: number for number, name in enumerate(classes)}
                content = json.dumps({"classes": list(classes), "class_to_idx": numbers}, indent=1) + "\n"
                self._storage.write(f"{folder.folder}/{CLASSES_FILE}", content.encode("ascii"))
        self._unmark()

    def _unmark(self) -> None:
        for folder in self._folders.values():
            write_mark(self._storage, folder.folder, self._target.naming, None)
        self._storage.delete(f"{self._packing}/{_RUN_FILE}")  # from now on, nothing is unfinished
        self._remove_records()

    def leave(self, exc: BaseException) -> None:
        """Keep finished shards, with a note on how to resume; without any, leave no trace."""
        if not self._is_begun:
            return
        with suppress(OSError, StreamloadError):
            self._remove_half_written()
            if not any(record.shards for record in self.records.values()):
                self._remove_shards(())
                self._unmark()
                return
        exc.add_note(
            f"what is finished is kept: run the same again with {_RESUME} to go on, or {_OVERWRITE} to start over"
        )

    def _read_run_file(self) -> dict[str, set[str]] | None:
        """Return the names of all shards that an unfinished run may have left, by split."""
        path = f"{self._packing}/{_RUN_FILE}"
        content = read_if_there(self._storage, path, _MOST_BYTES)
        if content is None:
            return None
        with suppress(ValueError, TypeError, AttributeError):
            names = {str(split): set(map(str, shards)) for split, shards in json.loads(content).items()}
            if all(map(is_plain_name, names.keys() - {""})):
                return names
        raise UsageError(f"{without_secrets(path)!r} was not made by a run, or is damaged; remove it")


def _is_same(one: ShardInfo, other: ShardInfo) -> bool:
    has_etags = one.etag is not None and other.etag is not None
    is_same_version = same_etag(one.etag, other.etag) if has_etags else one.mtime_ns == other.mtime_ns
    return one.bytes == other.bytes and is_same_version
