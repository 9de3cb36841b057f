"""What a task of packing is: it makes one finished shard (further ones if it does not fit), and a record of them.

Tasks run in this process, in other processes or on other machines, and may run more than once. A task depends on its
inputs and the options alone, so the shards do not depend on how many workers there are.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle

from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import pack_table, unpack_table
from streamload.index.shard_names import PACKING_FOLDER, ShardNaming
from streamload.pack.processes import Report
from streamload.pack.resizing import Resizing
from streamload.pack.sources.arrays import ArrayReader
from streamload.pack.sources.loading import Fault, load
from streamload.pack.sources.source import ArrayRow, SourceSample, is_image
from streamload.storage.protocol import ShardInfo, Storage
from streamload.storage.storages import Storages
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, member_header
from streamload.tar.scan import LABEL_FIELD
from streamload.tar.table import ShardTable
from streamload.write.destination import Destination, destination_in
from streamload.write.shard_file import GrowingShard, Member
from streamload.write.shard_writer import checked_key, label_of, sample_members

NUMBERED = ShardNaming("shard-", None, ".tar")
"""Shards that are numbered in their order, as `shard_name` calls them."""

ANY_NAMES = ShardNaming("", None, ".tar")
"""Shards that are called as others are: all of a folder belong to the set."""

_SHOWN = reprlib.Repr()
_SHOWN.maxother = 200


def shard_name(number: int) -> str:
    """Return the name of a numbered shard."""
    return f"shard-{number:06d}.tar"


def further_name(name: str, number: int) -> str:
    """Return the name of a further shard of a task, which sorts between that of its first one and the next task's."""
    return f"{name.removesuffix('.tar')}_{number:06d}.tar" if number else name


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how shards are written. Picklable.

    Attributes:
        dest: a folder or a url without a slash at the end.
        storages: find its storage.
        naming: what the shards are called.
        max_bytes: maximum size of a shard, or None.
        max_count: maximum number of samples in a shard, or None.
        skip_bad: leave out samples that are faulty.
    """

    dest: str
    storages: Storages
    naming: ShardNaming = NUMBERED
    max_bytes: int | None = None
    max_count: int | None = None
    skip_bad: bool = False

    def folder(self, split: str) -> Destination:
        """Return the folder of a split; "" is the destination itself."""
        return destination_in(f"{self.dest}/{split}" if split else self.dest, self.storages, durable=False)


Append = Callable[[str, Sequence[Member], int | None], None]
"""Takes a sample: its key, its members, and its label."""

Work = Callable[[Append, Report], Sequence[Fault]]
"""Gives all samples of a task, counts the items it has done, and returns the files that cannot be packed. Picklable."""


@dataclass(frozen=True, slots=True)
class Task:
    """One shard to make.

    Attributes:
        split: the folder of its shard in the destination, or "".
        name: the name of its shard.
        digest: of everything that decides its bytes.
        items: how many items it has, for the progress.
        work: makes its samples.
        may_be_empty: make a shard also if there is no sample.
    """

    split: str
    name: str
    digest: str
    items: int
    work: Work
    may_be_empty: bool = False


class PackedShard(NamedTuple):
    """A finished shard: its name in the folder, what the storage says of it, and its table."""

    name: str
    info: ShardInfo
    table: ShardTable


@dataclass(frozen=True, slots=True)
class Record:
    """What a task has made.

    Attributes:
        digest: the task's.
        split: the task's.
        shards: its shards in order; none if it has no sample.
        faults: the files that are left out of them.
    """

    digest: str
    split: str
    shards: tuple[PackedShard, ...]
    faults: tuple[Fault, ...]

    def save(self, storage: Storage, dest: str) -> None:
        """Write the record into a destination, from where `read_record` reads it."""
        tables = [pack_table(shard.table) for shard in self.shards]
        shards = [(shard.name, shard.info, len(table)) for shard, table in zip(self.shards, tables, strict=True)]
        head = json.dumps({"shards": shards, "faults": self.faults}).encode("ascii")
        storage.write(record_url(dest, self.digest), b"\n".join((head, b"".join(tables))))


def record_url(dest: str, digest: str) -> str:
    """Return where the record of a task lies."""
    return f"{dest}/{PACKING_FOLDER}/{digest}.record"


def read_record(content: bytes, task: Task) -> Record:
    """Return the record of a task as it was saved.

    Raises:
        ValueError, LookupError, TypeError, StreamloadError: it is damaged.
    """
    head, _, tables = content.partition(b"\n")
    saved, shards, start = json.loads(head), [], 0
    for name, info, size in saved["shards"]:
        shards.append(PackedShard(name, ShardInfo(*info), unpack_table(tables[start : start + size], name)))
        start += size
    faults = tuple(Fault(*fault) for fault in saved["faults"])
    return Record(task.digest, task.split, tuple(shards), faults)


def digest_of(*parts: object) -> str:
    """Return a digest of values whose `repr` says all of them."""
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def do(target: Target, task: Task, only_check: bool, report: Report) -> Record:
    """Do a task: write its shards, then its record.

    Args:
        target: where to.
        task: the task.
        only_check: write nothing, only find faults.
        report: called with what is done.

    Returns:
        The record, without shards if there are faults that may not be skipped; that is not saved.

    Raises:
        StreamloadError, ValueError, OSError: something cannot be written, or a sample is wrong.
    """
    if only_check:
        return Record(task.digest, task.split, (), find_faults(task.work, report))
    with closing(_Shards(target, task)) as shards:
        faults = tuple(task.work(shards.append, report))
        if faults and not target.skip_bad:
            return Record(task.digest, task.split, (), faults)
        record = Record(task.digest, task.split, shards.finish(task.may_be_empty), faults)
        record.save(target.folder("").storage, target.dest)
    return record


def find_faults(work: Work, report: Report) -> tuple[Fault, ...]:
    """Return the files that cannot be packed; write nothing."""
    return tuple(work(lambda *_: None, report))


def measure(work: Work, most_bytes: int, _: Report) -> tuple[int, int]:
    """Return the bytes and the number of samples that the work would write; it is stopped beyond `most_bytes`."""
    measured = [0, 0]

    def add(_: str, members: Sequence[Member], __: int | None) -> None:
        measured[0] += _size(members)
        measured[1] += 1
        if measured[0] > most_bytes:
            raise _EnoughError

    with suppress(_EnoughError):
        work(add, lambda *_: None)
    return measured[0], measured[1]


class _EnoughError(BaseException):
    """Enough was measured. No user's function catches it by `except Exception`."""


def _size(members: Sequence[Member]) -> int:
    return sum(member_bytes(header, len(payload)) for _, header, payload in members)


class _Shards:
    """The shards of a task, one after another."""

    def __init__(self, target: Target, task: Task) -> None:
        self._target, self._task = target, task
        self._folder = target.folder(task.split)
        self._shard: GrowingShard | None = None
        self._published: list[ShardTable] = []

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Append a sample, in a further shard if this one is full. Raises ValueError if it fits in none."""
        size, limit = _size(members), self._target.max_bytes
        if limit is not None and size + len(END_OF_ARCHIVE) > limit:
            raise too_large(key, size, limit)
        with self._writing():
            shard = self._shard
            if shard is not None and (
                (limit is not None and shard.bytes + size > limit) or len(shard) == self._target.max_count
            ):
                self._publish(shard)
            shard = self._shard if self._shard is not None else self._start()
            if key in shard:
                raise ValueError(f"two samples have the key {key!r}; give each one of its own")
            shard.append(key, members, label)

    def finish(self, may_be_empty: bool) -> tuple[PackedShard, ...]:
        """Publish the last shard; return all of them."""
        with self._writing():
            if self._shard is None and may_be_empty:
                self._start()
            if self._shard is not None:
                self._publish(self._shard)
        shards = []
        for number, table in enumerate(self._published):
            name = further_name(self._task.name, number)
            shards.append(PackedShard(name, self._folder.storage.info(f"{self._folder.folder}/{name}"), table))
        return tuple(shards)

    def close(self) -> None:
        """Discard what is not published."""
        if self._shard is not None:
            self._shard.discard()
        self._folder.close()

    def _start(self) -> GrowingShard:
        self._shard = self._folder.create(further_name(self._task.name, len(self._published)))
        return self._shard

    def _publish(self, shard: GrowingShard) -> None:
        self._published.append(shard.publish(replace=True))
        self._shard = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            folder = without_secrets(self._folder.folder)
            raise StorageError(
                f"cannot write shards to {folder!r}: {exc.strerror}; make room, or check its rights"
            ) from exc


def too_large(key: str, size: int, max_bytes: int) -> ValueError:
    """Return the error for a sample that is larger than a shard may be."""
    shard_bytes = size + len(END_OF_ARCHIVE)
    return ValueError(
        f"sample {key!r} makes a shard of {shard_bytes:,} bytes on its own, and a shard may have {max_bytes:,}; raise "
        f"--max-bytes (max_bytes) to {shard_bytes} at least"
    )


@dataclass(frozen=True, slots=True)
class PackFiles:
    """The work of packing files, or rows of arrays.

    Attributes:
        samples: in order.
        sizes: the expected sizes of each one's members; `ANY_SIZE` takes any.
        resizing: how to resize images, or None.
        skip_bad: go on after a sample that cannot be packed; otherwise the rest is only checked.
    """

    samples: tuple[SourceSample, ...]
    sizes: tuple[tuple[int, ...], ...]
    resizing: Resizing | None
    skip_bad: bool

    def __call__(self, append: Append, count: Report) -> Sequence[Fault]:
        """See `Work`."""
        faults: list[Fault] = []
        with ArrayReader() as arrays:
            for sample, sizes in zip(self.samples, self.sizes, strict=True):
                packs = self.skip_bad or not faults
                contents, wrong = _read(sample, sizes, self.resizing if packs else None, arrays)
                faults += wrong
                if packs and not wrong:
                    append(sample.key, _members(sample, contents), sample.label)
                count(1, sum(len(data) for _, data in contents))
        return faults


def _read(
    sample: SourceSample, sizes: Sequence[int], resizing: Resizing | None, arrays: ArrayReader
) -> tuple[list[tuple[str, bytes]], list[Fault]]:
    """Return the fields of a sample's members with their content, and what is wrong with them."""
    contents: list[tuple[str, bytes]] = []
    faults: list[Fault] = []
    for member, size in zip(sample.members, sizes, strict=True):
        if isinstance(member, ArrayRow):
            contents.append((member.field, arrays.content(member)))
            continue
        data, reason = load(member, size)
        field = member.field or ""
        if reason is None and resizing is not None and is_image(field):
            name, dot, extension = field.rpartition(".")
            try:
                extension, data = resizing(extension, data)
                field = f"{name}{dot}{extension}"
            except ValueError as exc:
                reason = str(exc)
        if reason is not None:
            faults.append(Fault(member.path, reason))
        contents.append((field, data))
    return contents, faults


def _members(sample: SourceSample, contents: Sequence[tuple[str, bytes]]) -> list[Member]:
    label = [] if sample.label is None else [(LABEL_FIELD, b"%d" % sample.label)]
    fields = [*contents, *label, *sample.values]
    return [(field, member_header(f"{sample.key}.{field}", len(data)), data) for field, data in fields]


@dataclass(frozen=True, slots=True)
class PackCalls:
    """The work of packing the samples that a user's function makes of inputs.

    Attributes:
        function: pickled.
        inputs: each pickled.
        first: the number of the first input.
    """

    function: bytes
    inputs: tuple[bytes, ...]
    first: int

    def __call__(self, append: Append, count: Report) -> Sequence[Fault]:
        """See `Work`.

        Raises:
            StreamloadError: the function fails, or gives something that is no sample; it names the input.
        """
        function = _loaded(self.function)
        for number, pickled in enumerate(self.inputs, start=self.first):
            value, size = pickle.loads(pickled), 0
            try:
                for sample in samples_in(function(value)):
                    key = checked_key(sample)
                    members = sample_members(key, sample)
                    append(key, members, label_of(members))
                    size += _size(members)
            except StorageError:
                raise
            except Exception as exc:  # whatever the user's function raises
                raise _failed_input(number, value, exc) from exc
            count(1, size)
        return ()


def _loaded(function: bytes) -> Callable[[object], object]:
    try:
        loaded: Callable[[object], object] = cloudpickle.loads(function)
    except ImportError as exc:  # on another machine
        raise StreamloadError(f"the function needs what cannot be imported here ({exc}); install it") from exc
    return loaded


def samples_in(result: Any) -> Iterable[Mapping[str, object]]:
    """Return the samples in what a user's function gives: None, one sample, or samples. Raises TypeError."""
    if result is None:
        return ()
    if isinstance(result, Mapping):
        return (result,)
    if not isinstance(result, Iterable) or isinstance(result, str | bytes):
        raise TypeError(f"it gave a value of type {type(result).__name__}; give a dict, yield dicts, or give None")
    return result


def _failed_input(number: int, value: object, exc: Exception) -> StreamloadError:
    notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if frame.filename != __file__]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return StreamloadError(
        f"input {number} ({_SHOWN.repr(value)}) cannot be packed: {type(exc).__name__}: {exc}{notes}{where}; correct "
        "the function or the input, or give None for inputs to leave out"
    )
