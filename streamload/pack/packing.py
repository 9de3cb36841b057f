"""Packs a listed source into shards in the staging folder, with several processes.

Unchanged files are packed directly into shards, since their sizes determine beforehand which sample goes where. Resized
files are first packed into pieces of a fixed number of samples, which are then joined to full shards.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Self

from streamload.cluster.ray_cluster import FileOfAll
from streamload.errors import ShardFormatError, WorkerError
from streamload.memory.channel import Frames, frame, read_from
from streamload.pack.planning import planned_parts, sample_bytes, shard_spans, table_sample_bytes
from streamload.pack.progress import open_progress
from streamload.pack.publishing import NAMES, Part
from streamload.pack.ray_pool import RayPool
from streamload.pack.records import Finished, kept
from streamload.pack.resizing import Resizing
from streamload.pack.sources.listing import Listing
from streamload.pack.sources.loading import Fault
from streamload.pack.sources.source import ArrayRow, Source, SourceFile
from streamload.pack.staging import RUN, Staging
from streamload.pack.work import (
    CallTask,
    CheckTask,
    Done,
    Failed,
    JoinTask,
    PackTask,
    Progressed,
    Report,
    Result,
    Task,
    do,
    fingerprint,
)
from streamload.tar.header_writer import END_OF_ARCHIVE
from streamload.workers.launch import launch


class Workforce:
    """A pool of worker processes, started when needed. After its `with` block no process is left."""

    def __init__(self, workers: int, kept_open: int) -> None:
        """Start no process yet.

        Args:
            workers: how many processes; with 1, tasks are done in the caller's process.
            kept_open: a descriptor, such as that of a lock, that every worker keeps open until it ends.
        """
        self._count = workers
        self._kept_open = kept_open
        self._workers: list[_Worker] = []

    def start(self, number: int) -> None:
        """Start the workers for at least this number of tasks now; none for a single task."""
        wanted = min(self._count, number)
        while wanted > 1 and len(self._workers) < wanted:
            self._workers.append(_Worker(self._kept_open))

    def results(self, tasks: Iterable[Task], number: int, report: Report) -> Iterator[Result]:
        """The results of tasks, in their order.

        Args:
            tasks: consumed one by one, as workers become free.
            number: an upper bound of the number of tasks.
            report: called with numbers of files and bytes as they are done.

        Raises:
            OSError, StreamloadError: a task failed.
            WorkerError: a process died.
        """
        if not self._workers and min(self._count, number) <= 1:
            for task in tasks:
                yield do(task, report)
            return
        while len(self._workers) < min(self._count, number):
            self._workers.append(_Worker(self._kept_open))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            yield from self._shared(iter(tasks), selector, report)

    def _shared(self, tasks: Iterator[Task], selector: selectors.BaseSelector, report: Report) -> Iterator[Result]:
        busy: dict[_Worker, int] = {}
        finished: dict[int, Result] = {}
        given = taken = 0

        def give(worker: _Worker) -> None:
            nonlocal given
            if (task := next(tasks, None)) is not None:
                worker.send(task)
                busy[worker] = given
                given += 1

        for worker in self._workers:
            give(worker)
        while busy:
            for key, _ in selector.select():
                worker = key.data
                for message in worker.messages():
                    match message:
                        case Progressed(items, item_bytes):
                            report(items, item_bytes)
                        case Failed(error):
                            raise error
                        case Done(result):
                            finished[busy.pop(worker)] = result
                            give(worker)
            while taken in finished:
                yield finished.pop(taken)
                taken += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._workers:
            self._workers.pop().end()


class _Worker:
    """One process. It has one task at most, so that the two sides cannot both block on writing."""

    def __init__(self, kept_open: int) -> None:
        self._child = launch("streamload.pack.worker", descriptors=(kept_open,))
        self.socket = self._child.socket
        self._frames = Frames()

    def send(self, task: Task) -> None:
        """Send it a task. If it is dead, `messages` raises the error."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(frame(task, ()))

    def messages(self) -> Iterator[Progressed | Done | Failed]:
        """Its next messages; blocks until there is data. Raises WorkerError if it has died."""
        data, ancillary = read_from(self.socket)
        if not data:
            raise WorkerError(f"a worker process {self._how_it_ended()}")
        self._frames.feed(data, ancillary)
        while (taken := self._frames.take()) is not None:
            yield taken[0]

    def _how_it_ended(self) -> str:
        status = self._child.process.wait()
        hint = "; if memory is short, fewer --workers need less" if status == -signal.SIGKILL else ""
        return f"{self._child.how_it_ended(status)}{hint}"

    def end(self) -> None:
        """Kill it and wait until it has exited."""
        self._child.end(0)
        self.socket.close()
        os.close(self._child.words)


_CHECKED_TOGETHER = 256
_CHECKED = "bad.json"
_JOINING = "joining.json"


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack a source; see the command's options of the same names.

    Attributes:
        max_bytes: maximum size of a shard.
        max_count: maximum number of samples in a shard, or None.
        shuffle: shuffle the samples.
        seed: seed of the shuffle and of the splits.
        fractions: the share of each split, or None.
        skip_bad: skip files that cannot be packed.
        resizing: how to resize images, or None.
        workers: number of processes.
        pool: packs on the nodes of a cluster instead.
        sync: flush shards to disk.
        piece_files: samples of a piece, which determines where a resumed run continues, but no published byte.
        many_files: from so many samples on, processes are started before the tasks are planned.
    """

    max_bytes: int
    max_count: int | None
    shuffle: bool
    seed: int
    fractions: dict[str, float] | None
    skip_bad: bool
    resizing: Resizing | None
    workers: int
    sync: bool
    pool: RayPool | None = None
    piece_files: int = 256
    many_files: int = 1000


def pack(source: Source, listing: Listing, options: PackOptions, staging: Staging) -> tuple[list[Part], list[Fault]]:
    """Pack everything that an earlier run has not packed already.

    Returns:
        The parts, which may be empty, and the files that cannot be packed. If there are any, there are no parts
        without `skip_bad`.

    Raises:
        OSError, StreamloadError: something cannot be written, or a process died.
        ValueError: a sample is larger than a shard may be.
    """
    with _force(options, staging, listing) as force:
        if len(source.samples) >= options.many_files:
            force.start(_fewest_tasks(len(source.samples), listing, options))  # they import while this process plans
        run = _Run(source, listing, options, staging, force)
        # Before splitting, so that every class keeps its share of whole files in every split.
        bad = run.check() if options.skip_bad and options.fractions is not None else []
        parts = planned_parts(
            source,
            options.fractions,
            frozenset(fault.path for fault in bad),
            shuffle=options.shuffle,
            seed=options.seed,
        )
        packed, faults = run.pack(parts)
        if faults and not options.skip_bad:
            return [], faults
        if options.resizing is not None:
            packed = run.join(packed)
        return [Part(name, shards) for name, shards in packed.items()], [*bad, *faults]


def pack_calls(
    function: bytes, inputs: Sequence[bytes], listing: Listing, options: PackOptions, staging: Staging
) -> Part:
    """Pack the samples that a pickled function gives of pickled inputs, in their order; like `pack` otherwise.

    Raises:
        StreamloadError: the function fails, or gives something that is no sample.
        ValueError: two samples have one key.
        OSError: something cannot be written.
    """
    # Neither published bytes nor the tasks of a resumed run may depend on the number of workers.
    together = max(1, min(options.piece_files, len(inputs) // 64))
    tasks = [
        CallTask(
            staging.path("pieces", "all", NAMES.name(number)), function, tuple(inputs[first : first + together]), first
        )
        for number, first in enumerate(range(0, len(inputs), together))
    ]
    with _force(options, staging, listing) as force:
        run = _Run(Source((), None, "input"), listing, options, staging, force)
        pieces = run.call(tasks)
        _refuse_equal_keys(pieces, staging)
        return Part("", run.join({"": pieces})[""])


def pack_shards(
    function: bytes,
    inputs: Sequence[bytes],
    listing: Listing,
    options: PackOptions,
    staging: Staging,
    *,
    names: Sequence[str],
    may_be_empty: bool,
) -> Part:
    """Pack the samples that a pickled function gives of each pickled input into a shard of the given name.

    Shards may be of any size, and two of them may hold the same keys, as those that are read may. An input without
    samples gives none, unless they `may_be_empty`.

    Raises:
        StreamloadError, OSError: as `pack_calls`.
    """
    tasks = [
        CallTask(staging.path("shards", "all", name), function, (given,), number, may_be_empty)
        for number, (name, given) in enumerate(zip(names, inputs, strict=True))
    ]
    with _force(options, staging, listing) as force:
        return Part("", _Run(Source((), None, "input"), listing, options, staging, force).call_for_shards(tasks))


@contextmanager
def _force(options: PackOptions, staging: Staging, listing: Listing) -> Iterator[Workforce]:
    """Provide this machine's processes, of which a cluster needs none; at the end none is left, and no task of Ray.

    Raises:
        ClusterError: a node does not see the staging folder, or the first or the last file to pack.
    """
    pool = options.pool
    if pool is None:
        with Workforce(options.workers, staging.lock) as force:
            yield force
        return
    inputs = [path for path in {*listing.paths[:1], *listing.paths[-1:]} if os.path.isfile(path)]
    files = [FileOfAll.at(path, "the files to pack as they are here") for path in inputs]
    pool.check_nodes([FileOfAll.at(staging.path(RUN), "the folder that is packed in as it is here"), *files])
    try:
        yield Workforce(1, staging.lock)
    finally:
        pool.end()


def _refuse_equal_keys(pieces: Sequence[Finished], staging: Staging) -> None:
    seen: set[str] = set()
    for piece in pieces:
        table = piece.table
        for number in range(0 if table is None else len(table)):
            assert table is not None
            key = table.key(number)
            if key in seen:
                staging.abandon()
                raise ValueError(
                    f"two samples have the key {key!r}, and nothing was published; give each one of its own"
                )
            seen.add(key)


def _fewest_tasks(count: int, listing: Listing, options: PackOptions) -> int:
    """A lower bound of the number of tasks for so many samples, before they are planned."""
    if options.skip_bad and options.fractions is not None:
        return -(-count // _CHECKED_TOGETHER)
    if options.resizing is not None:
        return -(-count // options.piece_files)
    by_bytes = -(-int(listing.sizes.clip(0).sum()) // options.max_bytes)
    return max(by_bytes, -(-count // (options.max_count or count)))


def _size(member: SourceFile | ArrayRow, size_of: Mapping[str, int]) -> int:
    return member.size if isinstance(member, ArrayRow) else size_of[member.path]


@dataclass(frozen=True, slots=True)
class _Run:
    source: Source
    listing: Listing
    options: PackOptions
    staging: Staging
    force: Workforce

    def results(self, tasks: Iterable[Task], number: int, report: Report) -> Iterator[Result]:
        """Do tasks in processes or, with a pool, each as a task of Ray; see `Workforce.results`."""
        if self.options.pool is None:
            return self.force.results(tasks, number, report)
        return self.options.pool.results((partial(do, task) for task in tasks), report)

    def check(self) -> list[Fault]:
        """Read all files, and return those that cannot be packed."""
        noted = self.staging.noted(_CHECKED)
        if noted is not None:
            return [Fault(*fault) for fault in noted]
        samples = self.source.samples
        tasks = [
            CheckTask(samples[first : first + _CHECKED_TOGETHER]) for first in range(0, len(samples), _CHECKED_TOGETHER)
        ]
        faults: list[Fault] = []
        with open_progress("checking", len(samples), f"{self.source.noun}s") as progress:
            for result in self.results(tasks, len(tasks), progress.advance):
                assert isinstance(result, tuple)
                faults += result
        self.staging.note(_CHECKED, faults)
        return faults

    def pack(self, parts: dict[str, list[int]]) -> tuple[dict[str, list[Finished]], list[Fault]]:
        """Pack each part's samples into tar files; those with samples, and the files that cannot be packed.

        Unless faults are skipped, the first one ends the writing and the remaining files are only checked: nothing will
        be published, and one run should report all faults.
        """
        size_of = dict(zip(self.listing.paths, self.listing.sizes.tolist(), strict=True))
        planned = [(name, task) for name, numbers in parts.items() for task in self._tasks(name, numbers, size_of)]
        if self._is_joining():  # joined pieces are removed, but their records remain
            return self._from_records(parts, planned)
        packed: dict[str, list[Finished]] = {name: [] for name in parts}
        faults: list[Fault] = []
        ready = self._known(planned) if self.options.resizing is None else {}

        def tasks() -> Iterator[Task]:
            for _, task in planned:
                if task.path not in ready:
                    yield CheckTask(task.samples) if faults and not self.options.skip_bad else task

        total = sum(map(len, parts.values()))
        with open_progress("packing", total, f"{self.source.noun}s") as progress:
            results = self.results(tasks(), len(planned) - len(ready), progress.advance)
            for name, task in planned:
                if task.path in ready:
                    progress.advance(len(task.samples), sum(map(sum, task.sizes)))
                result = ready[task.path] if task.path in ready else next(results)
                if isinstance(result, Finished):
                    faults += result.faults
                    if result.table is not None:
                        packed[name].append(result)
                    if self.options.resizing is None and (self.options.skip_bad or not faults):
                        self.staging.take(name, task.path, partial(fingerprint, task), result)
                else:
                    faults += result
        return packed, faults

    def call(self, tasks: Sequence[CallTask]) -> list[Finished]:
        """Do the tasks of a user's function; those with samples are pieces to join."""
        if self._is_joining():
            return self._from_records([""], [("", task) for task in tasks])[0][""]
        pieces = []
        with open_progress("packing", sum(len(task.inputs) for task in tasks), "inputs") as progress:
            for result in self.results(tasks, len(tasks), progress.advance):
                assert isinstance(result, Finished)
                if result.table is not None:
                    pieces.append(result)
        return pieces

    def call_for_shards(self, tasks: Sequence[CallTask]) -> list[Finished]:
        """Do the tasks of a user's function of which each makes a shard; those that were written."""
        known = self._known([("", task) for task in tasks])
        todo = [task for task in tasks if task.path not in known]
        shards = []
        with open_progress("mapping", len(tasks), "shards") as progress:
            results = self.results(todo, len(todo), progress.advance)
            for task in tasks:
                if task.path in known:
                    progress.advance(1, 0)
                result = known[task.path] if task.path in known else next(results)
                assert isinstance(result, Finished)
                if result.table is not None:
                    shards.append(result)
                self.staging.take("", task.path, partial(fingerprint, task), result)
        return shards

    def _is_joining(self) -> bool:
        """Whether an earlier run has removed pieces, of which the records remain."""
        return bool(self.staging.noted(_JOINING))

    def _from_records(
        self, parts: Iterable[str], planned: Sequence[tuple[str, PackTask | CallTask]]
    ) -> tuple[dict[str, list[Finished]], list[Fault]]:
        """The results of an earlier run, from its records."""
        packed: dict[str, list[Finished]] = {name: [] for name in parts}
        faults: list[Fault] = []
        for name, task in planned:
            known = kept(task.path, fingerprint(task), check=False)
            if known is None:
                reason = "what was packed before is missing or damaged; start over with --overwrite"
                raise ShardFormatError(reason, url=task.path)
            if known.table is not None:
                packed[name].append(known)
            faults += known.faults
        return packed, faults

    def _known(self, planned: Sequence[tuple[str, PackTask | CallTask | JoinTask]]) -> dict[str, Finished]:
        """The results that are known without a worker, by path."""
        found = {task.path: self.staging.known(task.path, partial(fingerprint, task)) for _, task in planned}
        return {path: finished for path, finished in found.items() if finished is not None}

    def join(self, pieces: dict[str, list[Finished]]) -> dict[str, list[Finished]]:
        """Join each part's pieces to shards; remove pieces as soon as they are joined."""
        self._check_pieces(pieces)
        planned = [(name, task) for name, finished in pieces.items() for task in self._join_tasks(name, finished)]
        needed: dict[str, int] = {}
        for _, task in planned:
            for path, _ in task.pieces:
                needed[path] = needed.get(path, 0) + 1
        self.staging.note(_JOINING, True)
        joined: dict[str, list[Finished]] = {name: [] for name in pieces}
        known = self._known(planned)
        todo = [task for _, task in planned if task.path not in known]
        with open_progress("joining", len(planned), "shards") as progress:
            results = self.results(todo, len(todo), progress.advance)
            for name, task in planned:
                result = known[task.path] if task.path in known else next(results)
                assert isinstance(result, Finished)
                joined[name].append(result)
                self.staging.take(name, task.path, partial(fingerprint, task), result)
                if task.path in known:
                    progress.advance(1, 0 if result.table is None else result.table.shard_bytes)
                for path, _ in task.pieces:
                    needed[path] -= 1
                    if not needed[path]:
                        with suppress(FileNotFoundError):
                            os.unlink(path)
        return joined

    def _tasks(self, name: str, numbers: Sequence[int], size_of: Mapping[str, int]) -> Iterator[PackTask]:
        """One task per shard of a part, or per piece if sizes are not known yet."""
        samples = [self.source.samples[number] for number in numbers]
        sizes = [tuple([_size(member, size_of) for member in sample.members]) for sample in samples]
        if self.options.resizing is None:
            stored = list(map(sample_bytes, samples, sizes))
            largest = max(range(len(stored)), key=stored.__getitem__, default=None)
            if largest is not None:
                self._check_fits(samples[largest].key, stored[largest])
            spans = shard_spans(stored, self.options.max_bytes, self.options.max_count)
        else:
            spans = shard_spans([1] * len(samples), len(samples) + len(END_OF_ARCHIVE), self.options.piece_files)
        kind = "pieces" if self.options.resizing is not None else "shards"
        for number, (start, end) in enumerate(spans):
            yield PackTask(
                self.staging.path(kind, name or "all", NAMES.name(number)),
                tuple(samples[start:end]),
                tuple(sizes[start:end]),
                self.options.resizing,
                self.options.skip_bad,
                self.options.sync and self.options.resizing is None,
            )

    def _join_tasks(self, name: str, pieces: Sequence[Finished]) -> Iterator[JoinTask]:
        tables = [piece.table for piece in pieces if piece.table is not None]
        sizes = [size for table in tables for size in table_sample_bytes(table).tolist()]
        firsts = list(accumulate((len(table) for table in tables), initial=0))
        for number, (start, end) in enumerate(shard_spans(sizes, self.options.max_bytes, self.options.max_count)):
            taken = [
                (piece.path, (max(start, first) - first, min(end, behind) - first))
                for piece, first, behind in zip(pieces, firsts[:-1], firsts[1:], strict=True)
                if max(start, first) < min(end, behind)
            ]
            yield JoinTask(
                self.staging.path("shards", name or "all", NAMES.name(number)), tuple(taken), self.options.sync
            )

    def _check_pieces(self, pieces: dict[str, list[Finished]]) -> None:
        """Raise ValueError if a sample is too large for any shard; no run with these options could resume."""
        tables = [piece.table for finished in pieces.values() for piece in finished if piece.table is not None]
        if not tables:
            return
        largest = [int(table_sample_bytes(table).max()) for table in tables]
        size = max(largest)
        table = tables[largest.index(size)]
        try:
            self._check_fits(table.key(int(table_sample_bytes(table).argmax())), size)
        except ValueError:
            self.staging.abandon()
            raise

    def _check_fits(self, key: str, size: int) -> None:
        """Raise ValueError if a sample is larger than a shard may be."""
        shard_bytes = size + len(END_OF_ARCHIVE)
        if shard_bytes > self.options.max_bytes:
            raise ValueError(
                f"sample {key!r} makes a shard of {shard_bytes:,} bytes on its own, and --max-bytes is "
                f"{self.options.max_bytes:,}; raise --max-bytes to {shard_bytes} at least"
            )
