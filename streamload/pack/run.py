"""Run packing tasks into a destination, in processes or on Ray, so that an interrupted run can be resumed.

A task makes one shard (more if its samples do not fit) and a record, from its inputs and options alone, on any machine.
Readers refuse the destination until all tasks are recorded and the index is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import chdir, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from glob import glob
from importlib import import_module
from itertools import islice
from multiprocessing.connection import Connection
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import cloudpickle

from streamload.cluster.connection import check_version, connect, own_version
from streamload.decode.failure import error_from, failure_of, first_line
from streamload.decode.job_pickle import users_modules
from streamload.decode.tasks import Failure
from streamload.errors import ClusterError, StorageError, StreamloadError, WorkerError, without_secrets
from streamload.index.dataset import CLASSES_FILE
from streamload.index.dataset_index import INDEX_FOLDER, is_plain_name, pack_table, read_if_there, unpack_table
from streamload.index.listing import PACKING_FOLDER, SHARDIFY, ShardFinder, ShardNaming, write_mark
from streamload.limits import SMALL_REQUESTS
from streamload.storage.protocol import ShardInfo, escaped
from streamload.storage.storages import Storages
from streamload.tar.header_writer import END_OF_ARCHIVE
from streamload.text import counted, printable
from streamload.workers.launchers import available_processors
from streamload.write.shard_writer import ConsecutiveShards, Destination, Member, PublishedShard, indexed, size_of

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Span = tuple[int, int]  # consecutive items: the number of the first, and one past the last
Fault = tuple[str, str]  # a file that cannot be packed, and why
# Appends a sample: its key, its members and its label.
Append = Callable[[str, Sequence[Member], int | None], None]
# Appends all samples of a task, and returns the files that cannot be packed. Picklable.
Work = Callable[[Append], Sequence[Fault]]
# Runs picklable calls and yields their results in any order; raises the exception of a call that failed.
Pool = Callable[[Iterable[Callable[[], Any]]], Iterator[Any]]

SHARDS = ShardNaming("", None, ".tar")  # every shard in a folder: packing gives each dataset its own folder
_RUN_FILE = "run.json"
_RESUME, _OVERWRITE = "--resume (resume=True)", "--overwrite (overwrite=True)"
_FURTHER = re.compile(r"_\d{6}(?=\.tar\Z)")  # the end of the name of a task's second or later shard
_HALF_WRITTEN = f".*.{16 * '[0-9a-f]'}.tmp"
_MOST_RECORD_BYTES = 1 << 30
_SHARDS_AT_LEAST = 16
_MOST_MEASURED = 128
_FILL_TARGET = 0.9
_SPAWN = multiprocessing.get_context("spawn")
_TASK_NAME = "streamload"  # in Ray's lists of tasks and in process titles
_RETRIES = 3
_TASKS_PER_CPU = 4
_CANCEL_TIMEOUT_S = 10.0
_LINE_INTERVAL_S, _BAR_INTERVAL_S = 5.0, 0.1


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
    """Run the unfinished tasks of a plan, complete the destination, and return all records.

    Args:
        target: where and how to write shards.
        plan: returns the tasks in the order of their shards; may run calls in the pool.
        check: called with all records before the index is written; may raise.
        label: the name of the activity in progress lines.
        unit: the name of the tasks' items, in the plural.
        splits: the folders of shards in the destination; "" is the destination itself.
        classes: the names of the classes, or None.

    Returns:
        The records in the order of the tasks; None if the run to resume was already complete.

    Raises:
        UsageError: the destination holds shards or an unfinished run, is being packed, or cannot be written by Ray.
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
            count = 1 if alone else target.workers or available_processors()
            with processes(count) if target.ray is None else ray_pool(target.ray, target.workers) as pool:
                tasks = plan(pool)
                run.begin(tasks)
                items = {task.digest: task.items for task in tasks}
                todo = [task for task in tasks if task.digest not in run.records]
                with Progress(label, sum(items.values()), unit) as progress:
                    progress.advance(sum(map(items.__getitem__, run.records)), 0)
                    for record in pool(partial(run_task, target, task) for task in todo):
                        run.add(record)
                        progress.advance(items[record.digest], sum(shard.info.bytes for shard in record.shards))
            records = [run.records[task.digest] for task in tasks]
            check(records)
            run.finish(records, classes)
        except BaseException as exc:
            run.abort(exc)
            raise
    return records


class UsageError(ValueError):
    """Raised for wrong arguments; the message says what to do, without secrets of urls."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


@dataclass(frozen=True, slots=True)
class Target:
    """Say where and how to write shards. Picklable.

    Attributes:
        dest: a folder or a url, without a trailing slash.
        storages: the storage of `dest`.
        max_bytes: maximum size of a shard.
        max_count: maximum number of samples in a shard.
        skip_bad: skip faulty samples.
        resume: continue an unfinished run.
        overwrite: replace existing shards.
        workers: number of processes, or of Ray tasks in flight; None for the default.
        ray: the address of a Ray cluster.
    """

    dest: str
    storages: Storages
    max_bytes: int | None = None
    max_count: int | None = None
    skip_bad: bool = False
    resume: bool = False
    overwrite: bool = False
    workers: int | None = None
    ray: str | None = None

    def folder(self, split: str) -> Destination:
        """Return the folder of a split; "" is the destination."""
        return Destination(f"{self.dest}/{split}" if split else self.dest, self.storages, durable=False)


@dataclass(frozen=True, slots=True)
class Task:
    """Describe one shard to make.

    Attributes:
        split: the shard's folder in the destination, or "".
        digest: a digest of everything that determines the shard's bytes.
        items: number of samples, inputs or shards, for the progress.
        work: appends the samples.
        may_be_empty: make a shard even without samples.
    """

    split: str
    name: str
    digest: str
    items: int
    work: Work
    may_be_empty: bool = False


def digest_of(*parts: object) -> str:
    """Return a digest of values; their `repr` must show everything that matters."""
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


class Record(NamedTuple):
    """The outcome of a task: its shards in order, and its faulty files."""

    digest: str
    split: str
    shards: tuple[PublishedShard, ...]
    faults: tuple[Fault, ...]


def run_task(target: Target, task: Task) -> Record:
    """Write the shards of a task, then its record. If there are faults and no `skip_bad`, store no record.

    Raises StreamloadError, ValueError, OSError.
    """
    stem = task.name.removesuffix(".tar")
    shards = ConsecutiveShards(
        target.folder(task.split),
        lambda number: f"{stem}_{number:06d}.tar" if number else task.name,
        max_bytes=target.max_bytes,
        max_count=target.max_count,
    )
    with closing(shards):
        faults = tuple(task.work(shards.append))
        if faults and not target.skip_bad:
            return Record(task.digest, task.split, (), faults)
        shards.finish(may_be_empty=task.may_be_empty)
    tables = [pack_table(shard.table) for shard in shards.published]
    saved = [(shard.name, shard.info, len(table)) for shard, table in zip(shards.published, tables, strict=True)]
    head = json.dumps({"shards": saved, "faults": faults}).encode("ascii")
    url = f"{target.dest}/{PACKING_FOLDER}/{task.digest}.record"
    target.folder("").storage.write(url, b"\n".join((head, b"".join(tables))))
    return Record(task.digest, task.split, tuple(shards.published), faults)


def read_record(content: bytes, task: Task) -> Record:
    """Parse a record. Raises ValueError, LookupError, TypeError or StreamloadError if damaged."""
    head, _, tables = content.partition(b"\n")
    saved, shards, start = json.loads(head), [], 0
    for name, info, size in saved["shards"]:
        shards.append(PublishedShard(name, ShardInfo(*info), unpack_table(tables[start : start + size], name)))
        start += size
    return Record(task.digest, task.split, tuple(shards), tuple((path, reason) for path, reason in saved["faults"]))


class _Run:
    """Lock, fill and index one destination, and clean it up if the run fails.

    Attributes:
        records: the records of the finished tasks, by digest.
    """

    def __init__(self, target: Target, splits: Sequence[str]) -> None:
        self._target, self._splits = target, splits
        # By split; `may_begin` adds the folders of an unfinished run.
        self._folders = {split: target.folder(split) for split in ("", *splits)}
        root = self._folders[""]
        self._storage, self._path = root.storage, root.path
        self._packing = f"{root.folder}/{PACKING_FOLDER}"
        self._names: dict[str, set[str]] = {}  # the names of shards that may exist, by split
        self._is_begun = False
        self.records: dict[str, Record] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock a local destination against other runs, creating it if it is missing. Buckets have no locks."""
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
                raise UsageError(f"another packing run is writing to {self._path!r}; wait until it ends") from None
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
        """Find earlier runs; return False if the run to resume is complete.

        Raises UsageError if existing files are in the way.
        """
        target, unfinished = self._target, self._read_run_file()
        if unfinished is None:
            self._remove_records()  # of a complete run that was killed before it removed them
        elif not (target.resume or target.overwrite):
            advice = f"go on with {_RESUME}, or discard it with {_OVERWRITE}"
            raise UsageError(f"{target.dest!r} holds an unfinished run; {advice}")
        self._names = unfinished or {}
        self._folders |= {split: target.folder(split) for split in self._names}
        for split in self._splits:
            folder = self._folders[split]
            existing = folder.existing(SHARDS)
            if existing and unfinished is None:
                state = f"{without_secrets(folder.folder)!r} already holds {counted(len(existing), 'shard')}"
                if not (target.resume or target.overwrite):
                    raise UsageError(f"{state}; replace them with {_OVERWRITE}, or choose another destination")
                index = ShardFinder(None, target.storages).index_of(folder.folder)
                self._names[split] = set() if index is None else {shard.name for shard in index.shards}
            if foreign := set(existing).difference(self._ours(split)):
                reason = "which neither an index nor a packing run names; move it away"
                raise UsageError(f"{folder.folder!r} holds {min(foreign)!r}, {reason}")
            if existing and unfinished is None and not target.overwrite:
                say(f"note: there is no unfinished run to resume, and {state}; to pack again, add {_OVERWRITE}")
                return False
        if unfinished is None and "" not in self._splits:
            self._refuse_other_splits()
        if unfinished is None and target.resume:
            say("note: there is no unfinished run to resume; packing from the start")
        return True

    def _ours(self, split: str) -> list[str]:
        """Return the existing shards that an index or a run names, and further shards of the same tasks."""
        names = self._names.get(split)
        existing = self._folders[split].existing(SHARDS) if names else []
        return [name for name in existing if names and (name in names or _FURTHER.sub("", name) in names)]

    def _refuse_other_splits(self) -> None:
        shards = self._storage.list(f"{escaped(self._target.dest)}/*/*.tar")
        others = {info.url.rsplit("/", 2)[-2] for info in shards} - self._folders.keys()
        if others or self._folders[""].existing(SHARDS):
            folder = self._target.folder(min(others, default="")).folder
            raise UsageError(f"{folder!r} holds shards outside this run's splits; choose another DEST or remove them")

    def begin(self, tasks: Sequence[Task]) -> None:
        """Mark the destination as unfinished, and remove earlier runs' files, except those of finished tasks."""
        replaced = set(self._names)
        self.records = self._finished(tasks)
        for task in tasks:
            self._names.setdefault(task.split, set()).add(task.name)
        self._is_begun = True
        content = {split: sorted(names) for split, names in self._names.items()}
        self._storage.write(f"{self._packing}/{_RUN_FILE}", json.dumps(content, indent=0).encode("ascii"))
        for folder in self._folders.values():  # mark all before removing any shard, or readers would accept the others
            write_mark(self._storage, folder.folder, SHARDS, SHARDIFY)
            folder.remove(SHARDS, ())
        self._remove_half_written()
        self._remove_shards({(record.split, each.name) for record in self.records.values() for each in record.shards})
        for split in replaced:
            self._storage.delete(f"{self._folders[split].folder}/{CLASSES_FILE}")
        self._remove_records(keep=self.records.keys())
        if self.records:
            say(f"note: {len(self.records):,} of {counted(len(tasks), 'task')} are already done")

    def _remove_half_written(self) -> None:
        for each in self._folders.values() if self._path is not None else ():
            each.remove_abandoned(SHARDS)
            for folder in (each.folder, f"{each.folder}/{INDEX_FOLDER}", self._packing):
                for path in glob(_HALF_WRITTEN, root_dir=folder):
                    os.unlink(f"{folder}/{path}")

    def _remove_shards(self, kept: Collection[tuple[str, str]]) -> None:
        for split, folder in self._folders.items():
            folder.remove(SHARDS, [name for name in self._ours(split) if (split, name) not in kept])

    def _finished(self, tasks: Sequence[Task]) -> dict[str, Record]:
        stored = self._record_urls() if self._target.resume else {}

        def record_of(task: Task) -> Record | None:
            folder = self._folders[task.split].folder
            with suppress(ValueError, LookupError, TypeError, StreamloadError):
                record = read_record(self._storage.read_bytes(stored[task.digest], most_bytes=_MOST_RECORD_BYTES), task)
                intact = all(self._storage.info(f"{folder}/{name}")[1:] == info[1:] for name, info, _ in record.shards)
                return record if intact and (not record.faults or self._target.skip_bad) else None
            return None

        with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-records") as threads:
            records = threads.map(record_of, [task for task in tasks if task.digest in stored])
            finished = {record.digest: record for record in records if record is not None}
        if lost := len(stored) - len(finished):
            say(f"note: {counted(lost, 'finished task')} again to do: their files, options or shards have changed")
        return finished

    def _record_urls(self) -> dict[str, str]:
        urls = [info.url for info in self._storage.list(f"{escaped(self._packing)}/*.record")]
        return {url.rpartition("/")[2].removesuffix(".record"): url for url in urls}

    def _remove_records(self, *, keep: Collection[str] = ()) -> None:
        for digest, url in self._record_urls().items():
            if digest not in keep:
                self._storage.delete(url)

    def add(self, record: Record) -> None:
        """Add a task's record. Raises StorageError if its shards are not visible here."""
        for shard in record.shards if self._path is not None else ():
            path = f"{self._folders[record.split].folder}/{shard.name}"
            if not os.path.exists(path):
                message = "this shard was finished, but is not here; name a bucket, or a folder that all nodes share"
                raise StorageError(message, url=path)
        self.records[record.digest] = record

    def finish(self, records: Sequence[Record], classes: Sequence[str] | None) -> None:
        """Write the indexes and the names of the classes; then remove the marks and the records."""
        for split in self._splits:
            shards = [shard for record in records if record.split == split for shard in record.shards]
            folder = self._folders[split]
            if shards:
                folder.index.update_with_tables(indexed(shards))
            if shards and classes is not None:
                numbers = {name: number for number, name in enumerate(classes)}
                content = json.dumps({"classes": list(classes), "class_to_idx": numbers}, indent=1) + "\n"
                self._storage.write(f"{folder.folder}/{CLASSES_FILE}", content.encode("ascii"))
        self._unmark()

    def _unmark(self) -> None:
        for folder in self._folders.values():
            write_mark(self._storage, folder.folder, SHARDS, None)
        self._storage.delete(f"{self._packing}/{_RUN_FILE}")  # from here on, the run counts as complete
        self._remove_records()

    def abort(self, exc: BaseException) -> None:
        """Keep finished shards, and note on the exception how to resume; without finished shards, leave no trace."""
        if not self._is_begun:
            return
        with suppress(OSError, StreamloadError):
            self._remove_half_written()
            if not any(record.shards for record in self.records.values()):
                self._remove_shards(())
                self._unmark()
                return
        exc.add_note(f"finished shards are kept: go on with {_RESUME}, or start over with {_OVERWRITE}")

    def _read_run_file(self) -> dict[str, set[str]] | None:
        """Return the names of shards that an unfinished run may have left, by split; None if there is no such run."""
        path = f"{self._packing}/{_RUN_FILE}"
        content = read_if_there(self._storage, path, _MOST_RECORD_BYTES)
        if content is None:
            return None
        with suppress(ValueError, TypeError, AttributeError):
            names = {str(split): set(map(str, shards)) for split, shards in json.loads(content).items()}
            if all(map(is_plain_name, names.keys() - {""})):
                return names
        raise UsageError(f"{path!r} was not written by a packing run, or is damaged; remove it")


def shard_spans(sizes: Iterable[tuple[int, int]], max_bytes: int, max_count: int | None) -> list[Span]:
    """Split consecutive items, given as (bytes, samples), into shards as full as allowed.

    An item that is larger than a shard gets a span of its own.
    """
    spans: list[Span] = []
    start = end = filled = samples = 0
    for size, count in sizes:
        too_many = max_count is not None and samples + count > max_count
        if end > start and (filled + size + len(END_OF_ARCHIVE) > max_bytes or too_many):
            spans.append((start, end))
            start, filled, samples = end, 0, 0
        end, filled, samples = end + 1, filled + size, samples + count
    return [*spans, (start, end)] if end > start else spans


def numbered(spans: Iterable[Span]) -> list[tuple[Span, str]]:
    """Return spans with the names of their shards."""
    return [(span, f"shard-{number:06d}.tar") for number, span in enumerate(spans)]


def estimated_spans(pool: Pool, works: Sequence[Work], max_bytes: int | None, max_count: int | None) -> list[Span]:
    """Split items into equal spans of about nine tenths of `max_bytes`, or `max_count` samples, at most.

    Each of `works` packs one item; one in sixteen, at most 128, are tried to estimate sizes. There are at least sixteen
    spans, unless these would have fewer than sixteen items each.
    """
    count = len(works)
    number = min(_MOST_MEASURED, count // _SHARDS_AT_LEAST)
    trials = [partial(measure, works[position * count // number]) for position in range(number)]
    measured = list(pool(trials))
    all_bytes, samples = sum(size for size, _ in measured), sum(samples for _, samples in measured)
    each = max(_SHARDS_AT_LEAST, -(-count // _SHARDS_AT_LEAST))
    if all_bytes and max_bytes is not None:
        each = min(each, int(_FILL_TARGET * max_bytes * number / all_bytes))
    if max_count is not None:
        each = min(each, max_count * number // samples if samples else max_count)
    each = max(1, each)
    return [(start, min(start + each, count)) for start in range(0, count, each)]


def measure(work: Work) -> tuple[int, int]:
    """Return the number of bytes and of samples that the work would write."""
    sizes: list[int] = []
    work(lambda _, members, __: sizes.append(size_of(members)))
    return sum(sizes), len(sizes)


@contextmanager
def processes(count: int) -> Iterator[Pool]:
    """Open a pool of processes, which end even if this one is killed. A count of 1 runs calls in this process.

    The pool raises WorkerError if a process died.
    """
    if count == 1:
        yield lambda calls: (call() for call in calls)
        return
    inherited, life = _SPAWN.Pipe(duplex=False)
    executor = ProcessPoolExecutor(count, _SPAWN, _exit_at_close, (inherited,))

    def results(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        with _starting_processes():
            futures = [executor.submit(_outcome, call) for call in calls]
        for future in as_completed(futures):
            try:
                outcome = future.result()
            except BrokenProcessPool:
                raise WorkerError("a worker process died; if memory is short, use fewer workers") from None
            if isinstance(outcome, Failure):
                raise error_from(outcome)
            yield outcome

    try:
        yield results
    finally:
        life.close()  # ends the workers, even busy ones
        executor.shutdown(wait=True, cancel_futures=True)
        inherited.close()


def _outcome(call: Callable[[], Any]) -> Any:
    """Return a call's result, or its StreamloadError as a Failure, which keeps the cause."""
    try:
        return call()
    except StreamloadError as exc:
        return failure_of(exc)


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Make processes that are started in this context ignore Ctrl-C and not rerun the user's script."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_at_close(life: Connection) -> None:
    """Exit this process, busy or not, when the other end of the pipe is closed."""

    def wait() -> None:
        life.poll(None)  # until the other process closes the pipe, or dies
        os._exit(1)

    Thread(target=wait, daemon=True).start()


@contextmanager
def ray_pool(address: str, at_once: int | None) -> Iterator[Pool]:
    """Open a pool on the Ray cluster at an address. Raises ClusterError.

    Each call is a task of one CPU, which Ray repeats if its process or node is lost. At most `at_once` tasks are in
    flight, by default four per CPU. Results are in order. On exit, unfinished tasks are cancelled.
    """
    with closing(connect(address)) as cluster:
        cluster.require({"CPU": 1})
        ray = cluster.ray
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(run_call).options(name=_TASK_NAME)
        limit = at_once or max(1, int(_TASKS_PER_CPU * ray.cluster_resources().get("CPU", 0)))
        in_flight: deque[Any] = deque()

        def results(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
            waiting = iter(calls)
            while True:
                for call in islice(waiting, limit - len(in_flight)):
                    in_flight.append(task.remote(own_version(), os.getcwd(), cloudpickle.dumps(call)))
                if not in_flight:
                    return
                try:
                    result = pickle.loads(ray.get(in_flight[0]))
                except ray.exceptions.RayTaskError as exc:
                    raise exc.cause if isinstance(exc.cause, Exception) else exc from None
                except ray.exceptions.RayError as exc:
                    raise ClusterError(
                        f"the Ray cluster at {cluster.address} was lost, or a task lost its process or node "
                        f"{_RETRIES + 1} times ({first_line(exc)}); if memory is short, lower --workers"
                    ) from None
                in_flight.popleft()
                yield result

        try:
            yield results
        finally:
            with suppress(ray.exceptions.RayError):
                for each in in_flight:
                    if not ray.wait([each], timeout=0, fetch_local=False)[0]:  # Ray can crash if it has failed
                        ray.cancel(each, force=True)
                if in_flight:
                    ray.wait([*in_flight], num_returns=len(in_flight), timeout=_CANCEL_TIMEOUT_S, fetch_local=False)


def run_call(version: str, folder: str, pickled: bytes) -> bytes:
    """Run a pickled call in a Ray task, and return its pickled result.

    Raises ClusterError if versions differ, or modules are missing.
    """
    node = str(import_module("ray").util.get_node_ip_address())
    check_version(own_version(), node, version)
    try:
        with chdir(folder) if os.path.isdir(folder) else nullcontext():
            return pickle.dumps(cloudpickle.loads(pickled)())
    except ImportError as exc:
        raise ClusterError(
            f"a module of the program is not installed on {node} ({exc}); install it on all nodes"
        ) from exc
    except Exception as exc:
        exc.add_note(f"on the Ray node {node}")
        raise


def pickled_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function and the user's code that it uses, which nodes may lack."""
    registered = cloudpickle.list_registry_pickle_by_value()
    modules = [module for name, module in users_modules().items() if name not in registered]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


class Progress:
    """Report progress on standard error: a line every five seconds, or rich's bar on a terminal."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._bytes = 0
        self._start = self._last = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns, screen = (TextColumn("{task.description}"), BarColumn(None)), Console(stderr=True)
            self._bar = Progress(*columns, console=screen, transient=True, redirect_stdout=sys.stdout.isatty())
            self._bar.add_task(self._label, total=self._total)
            self._bar.start()
        return self

    def advance(self, items: int, item_bytes: int) -> None:
        """Add finished items and bytes."""
        self._done += items
        self._bytes += item_bytes
        if time.monotonic() - self._last >= (_LINE_INTERVAL_S if self._bar is None else _BAR_INTERVAL_S):
            self._report()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._report()

    def _report(self) -> None:
        self._last = time.monotonic()
        spent_s = max(self._last - self._start, 1e-9)
        line = (
            f"{self._label}: {self._done:,} of {self._total:,} {self._unit}, {self._done / spent_s:,.0f} {self._unit}/s"
        )
        line += f", {shown_bytes(self._bytes / spent_s)}/s" if self._bytes else ""
        if 0 < self._done < self._total:
            line += f", {shown_time((self._total - self._done) * spent_s / self._done)} left"
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=line)


def say(line: str) -> None:
    """Print a line to standard error, with control characters escaped."""
    print(printable(line), file=sys.stderr, flush=True)


def shown_bytes(size: float) -> str:
    """Format a number of bytes in a suitable unit, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def shown_time(seconds: float) -> str:
    """Format seconds as `1.2 s`, or as `0:03:04` from a minute on."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
