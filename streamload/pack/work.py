"""The tasks of workers: check samples, pack them into a tar file, or join samples of several tar files into a shard.

The result depends on the task alone, not on which worker does it, or when.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import reprlib
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cloudpickle
import numpy as np

from streamload.errors import ShardFormatError, StreamloadError
from streamload.pack.planning import Span, table_sample_bytes
from streamload.pack.reading import scanned_table
from streamload.pack.records import Finished, keep, kept
from streamload.pack.resizing import Resizing
from streamload.pack.sources.arrays import ArrayReader
from streamload.pack.sources.listing import meaning_of
from streamload.pack.sources.loading import ANY_SIZE, Fault, load
from streamload.pack.sources.source import ArrayRow, SourceSample, is_image
from streamload.tar.header_writer import END_OF_ARCHIVE, member_header
from streamload.tar.scan import LABEL_FIELD
from streamload.tar.table import ShardTable
from streamload.write.shard_file import Member, ShardFile
from streamload.write.shard_writer import checked_key, label_of, sample_members

_REPORT_INTERVAL_S = 0.1
_COPY_BYTES = 1 << 22
_SHOWN = reprlib.Repr()
_SHOWN.maxother = 200
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Report = Callable[[int, int], None]
"""Called with the number of samples, and of their bytes, since the last call."""


class CheckTask(NamedTuple):
    """Find the files that cannot be packed."""

    samples: tuple[SourceSample, ...]


class PackTask(NamedTuple):
    """Pack samples into one tar file.

    Attributes:
        path: the tar file, in the staging folder.
        samples: in order.
        sizes: the expected sizes of each one's members in bytes.
        resizing: how to resize images, or None.
        skip_faults: skip samples that cannot be packed; otherwise the first fault ends the writing, the tar file is
            removed, and the remaining samples are only checked.
        sync: flush the file to disk.
    """

    path: str
    samples: tuple[SourceSample, ...]
    sizes: tuple[tuple[int, ...], ...]
    resizing: Resizing | None
    skip_faults: bool
    sync: bool


class CallTask(NamedTuple):
    """Call a function of the user's with some inputs, and pack the samples that it gives into one tar file.

    Attributes:
        path: the tar file, in the staging folder.
        function: pickled.
        inputs: each pickled.
        first: the number of the first input.
        may_be_empty: write the file also where there is no sample.
    """

    path: str
    function: bytes
    inputs: tuple[bytes, ...]
    first: int
    may_be_empty: bool = False


class JoinTask(NamedTuple):
    """Join samples of several pieces to one shard.

    Attributes:
        path: the shard, in the staging folder.
        pieces: tar files with records, and the span of samples to take from each.
        sync: flush the file to disk.
    """

    path: str
    pieces: tuple[tuple[str, Span], ...]
    sync: bool


Task = CheckTask | PackTask | CallTask | JoinTask
Result = Finished | tuple[Fault, ...]


@dataclass(frozen=True)
class Progressed:
    """More files are done, of so many bytes in total."""

    items: int
    item_bytes: int


@dataclass(frozen=True)
class Done:
    """The current task is done."""

    result: Result


@dataclass(frozen=True)
class Failed:
    """The current task failed for a reason that is not a bug."""

    error: OSError | StreamloadError


def do(task: Task, report: Report) -> Result:
    """Do a task, or use what an earlier run has left of it, if that is complete.

    Raises:
        OSError: something cannot be written. Nothing of this task is left then.
    """
    counter = _Counter(report)
    if isinstance(task, CheckTask):
        return _check(task.samples, counter)
    known_as = fingerprint(task)
    done = kept(task.path, known_as)
    if done is None:
        if isinstance(task, JoinTask):
            done = _join(task)
        else:
            done = _pack(task, counter) if isinstance(task, PackTask) else _call(task, counter)
        if not isinstance(task, PackTask) or task.skip_faults or not done.faults:
            keep(done, known_as)
    elif isinstance(task, PackTask):
        counter.count(len(task.samples), sum(map(sum, task.sizes)))
    elif isinstance(task, CallTask):
        counter.count(len(task.inputs), 0)
    if isinstance(task, JoinTask):
        counter.count(1, 0 if done.table is None else done.table.shard_bytes)
    counter.report()
    return done


def fingerprint(task: PackTask | CallTask | JoinTask) -> str:
    """A digest of everything that determines a task's result; it does not depend on the staging folder."""
    content: object
    if isinstance(task, PackTask):
        content = [meaning_of(sample) for sample in task.samples], task.sizes, task.resizing
    elif isinstance(task, CallTask):
        content = task.inputs, task.first  # the function is compared by its code, with the options of the run
    else:
        content = [(os.path.basename(path), span) for path, span in task.pieces]
    return hashlib.sha256(repr(content).encode("utf-8", "backslashreplace")).hexdigest()


class _Counter:
    """Counts, and reports at most ten times a second."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._items = self._bytes = 0
        self._reported = time.monotonic()

    def count(self, items: int, item_bytes: int) -> None:
        self._items += items
        self._bytes += item_bytes
        if time.monotonic() - self._reported >= _REPORT_INTERVAL_S:
            self.report()

    def report(self) -> None:
        if self._items:
            self._report(self._items, self._bytes)
        self._items = self._bytes = 0
        self._reported = time.monotonic()


def _check(samples: Sequence[SourceSample], counter: _Counter) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    with ArrayReader() as arrays:
        for sample in samples:
            contents, wrong = _read(sample, [ANY_SIZE] * len(sample.members), None, arrays)
            faults += wrong
            counter.count(1, sum(len(data) for _, data in contents))
    counter.report()
    return tuple(faults)


def _pack(task: PackTask, counter: _Counter) -> Finished:
    faults: list[Fault] = []
    shard = ShardFile(task.path)
    try:
        with ArrayReader() as arrays:
            for sample, sizes in zip(task.samples, task.sizes, strict=True):
                writing = task.skip_faults or not faults
                contents, wrong = _read(sample, sizes, task.resizing if writing else None, arrays)
                counter.count(1, sum(sizes))
                if wrong:
                    faults += wrong
                elif writing:
                    shard.append(sample.key, _members(sample, contents), sample.label)
        if not len(shard) or (faults and not task.skip_faults):
            return Finished(task.path, None, tuple(faults))
        return Finished(task.path, shard.publish(replace=True, durable=task.sync), tuple(faults))
    finally:
        shard.discard()


def _call(task: CallTask, counter: _Counter) -> Finished:
    function = _loaded(task.function)
    shard = ShardFile(task.path)
    try:
        for number, pickled in enumerate(task.inputs, start=task.first):
            given = pickle.loads(pickled)
            before = shard.bytes
            try:
                for sample in _samples_of(function(given)):
                    key = checked_key(sample)
                    if key in shard:
                        raise ValueError(f"key {key!r} was given before; every sample needs a key of its own")
                    members = sample_members(key, sample)
                    shard.append(key, members, label_of(members))
            except Exception as exc:  # whatever the user's function raises
                if isinstance(exc, OSError) and exc.errno in _DISK_FULL:
                    raise
                raise _failed_input(number, given, exc) from exc
            counter.count(1, shard.bytes - before)
        is_written = len(shard) > 0 or task.may_be_empty
        return Finished(task.path, shard.publish(replace=True, durable=False) if is_written else None)
    finally:
        shard.discard()


def _loaded(function: bytes) -> Callable[[object], object]:
    try:
        loaded: Callable[[object], object] = cloudpickle.loads(function)
    except ImportError as exc:  # on another machine
        raise StreamloadError(f"the function needs what cannot be imported here ({exc}); install it") from exc
    return loaded


def _samples_of(result: object) -> Iterable[Mapping[str, object]]:
    """The samples in what a user's function gives: None, one sample, or samples."""
    if result is None:
        return ()
    if isinstance(result, Mapping):
        return (result,)
    if not isinstance(result, Iterable) or isinstance(result, str | bytes):
        raise TypeError(f"it gave a value of type {type(result).__name__}; give a dict, yield dicts, or give None")
    return result


def _failed_input(number: int, given: object, exc: Exception) -> StreamloadError:
    shown = _SHOWN.repr(given)
    notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if frame.filename != __file__]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return StreamloadError(
        f"input {number} ({shown}) cannot be packed: {type(exc).__name__}: {exc}{notes}{where}; nothing was published. "
        "Correct the function or the input, or give None for inputs to leave out"
    )


def _read(
    sample: SourceSample, sizes: Sequence[int], resizing: Resizing | None, arrays: ArrayReader
) -> tuple[list[tuple[str, bytes]], list[Fault]]:
    """The fields of a sample's members and their content, and what is wrong with them."""
    contents: list[tuple[str, bytes]] = []
    faults: list[Fault] = []
    for member, size in zip(sample.members, sizes, strict=True):
        if isinstance(member, ArrayRow):
            contents.append((member.field, arrays.content(member)))
            continue
        data, reason = load(member, size)
        field = member.field or ""
        if reason is None and resizing is not None:
            try:
                field, data = _resized(field, data, resizing)
            except ValueError as exc:
                reason = str(exc)
        if reason is not None:
            faults.append(Fault(member.path, reason))
        contents.append((field, data))
    return contents, faults


def _resized(field: str, data: bytes, resizing: Resizing) -> tuple[str, bytes]:
    if not is_image(field):
        return field, data
    name, dot, extension = field.rpartition(".")
    extension, data = resizing(extension, data)
    return f"{name}{dot}{extension}", data


def _members(sample: SourceSample, contents: list[tuple[str, bytes]]) -> list[Member]:
    key = sample.key
    if sample.label is not None:
        contents.append((LABEL_FIELD, b"%d" % sample.label))
    contents += sample.values
    return [(field, member_header(f"{key}.{field}", len(data)), data) for field, data in contents]


def _join(task: JoinTask) -> Finished:
    hidden = os.path.join(os.path.dirname(task.path), f".{os.path.basename(task.path)}.{secrets.token_hex(8)}.partial")
    try:
        table = _joined(task, hidden)
        os.replace(hidden, task.path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(hidden)
        raise
    return Finished(task.path, table)


def _joined(task: JoinTask, hidden: str) -> ShardTable:
    """Write the shard under a hidden name, and verify it by reading it again."""
    expected = []
    with open(hidden, "wb", buffering=0) as target:
        for path, (start, end) in task.pieces:
            table = _table_of(path)
            edges = np.cumsum(table_sample_bytes(table))
            first = int(edges[start - 1]) if start else 0
            _copy(path, first, int(edges[end - 1]) - first, target.fileno())
            members = slice(int(table.sample_start[start]), int(table.sample_start[end]))
            assert table.member_crc32 is not None
            expected.append(table.member_crc32[members])
        _write_all(target.fileno(), END_OF_ARCHIVE)
        if task.sync:
            os.fsync(target.fileno())
    table = scanned_table(hidden, every_byte=True)
    if table.member_crc32 is None or not np.array_equal(table.member_crc32, np.concatenate(expected)):
        raise ShardFormatError("what was packed before is damaged; start over with --overwrite", url=task.path)
    return table


def _table_of(path: str) -> ShardTable:
    done = kept(path, check=False)
    if done is None or done.table is None:
        raise ShardFormatError("what was packed before is missing; start over with --overwrite", url=path)
    return done.table


def _copy(path: str, offset: int, size: int, target: int) -> None:
    with open(path, "rb", buffering=0) as source:
        source.seek(offset)
        while size:
            data = source.read(min(size, _COPY_BYTES))
            if not data:
                raise ShardFormatError("what was packed before is truncated; start over with --overwrite", url=path)
            size -= len(data)
            _write_all(target, data)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of it; a write to a nearly full disk may be partial."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
