"""Define packing tasks: each makes one shard (more if it does not fit) and a record of them.

Tasks may run on other machines, and repeatedly; they depend only on their inputs and options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from streamload.index.dataset_index import pack_table, unpack_table
from streamload.index.shard_names import PACKING_FOLDER, ShardNaming
from streamload.storage.protocol import ShardInfo
from streamload.storage.storages import Storages
from streamload.write.destination import ConsecutiveShards, Destination, PublishedShard
from streamload.write.shard_file import Member, size_of

NUMBERED = ShardNaming("shard-", None, ".tar")  # the names of `planning.numbered`
ANY_NAMES = ShardNaming("", None, ".tar")  # names of other shards: all in a folder belong to the set


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to write shards. Picklable.

    Attributes:
        dest: a folder or a url, without a trailing slash.
        max_bytes: maximum size of a shard, or None.
        max_count: maximum number of samples in a shard, or None.
        skip_bad: skip faulty samples.
        workers: processes, or Ray tasks in flight; None for the default.
        ray: the address of a Ray cluster, or None.
    """

    dest: str
    storages: Storages
    naming: ShardNaming = NUMBERED
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


class Fault(NamedTuple):
    """A file that cannot be packed, and why."""

    path: str
    reason: str


# Appends a sample: its key, its members and its label.
Append = Callable[[str, Sequence[Member], int | None], None]
# Appends all samples of a task, and returns the files that cannot be packed. Picklable.
Work = Callable[[Append], Sequence[Fault]]


@dataclass(frozen=True, slots=True)
class Task:
    """One shard to make.

    Attributes:
        split: the shard's folder in the destination, or "".
        digest: of everything that determines its bytes.
        items: number of items, for the progress.
        may_be_empty: make a shard even without samples.
    """

    split: str
    name: str
    digest: str
    items: int
    work: Work
    may_be_empty: bool = False


class Record(NamedTuple):
    """The shards of a task in order, and the files that were skipped."""

    digest: str
    split: str
    shards: tuple[PublishedShard, ...]
    faults: tuple[Fault, ...]


def digest_of(*parts: object) -> str:
    """Return a digest of values by their `repr`, which must be complete."""
    return hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def run_task(target: Target, task: Task) -> Record:
    """Write the shards of a task, then its record; store nothing if faults may not be skipped.

    Names of additional shards sort before the next task's. Raises StreamloadError, ValueError, OSError.
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
    return Record(task.digest, task.split, tuple(shards), tuple(Fault(*fault) for fault in saved["faults"]))


def measure(work: Work) -> tuple[int, int]:
    """Return the bytes and the number of samples that the work would write."""
    sizes: list[int] = []
    work(lambda _, members, __: sizes.append(size_of(members)))
    return sum(sizes), len(sizes)
