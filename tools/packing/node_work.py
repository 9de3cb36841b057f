"""What a task on a node of a cluster does: `work.do`, such that it may run again where its process or node was lost.

Then two processes may do the same task for a while, since a node that is cut off goes on without knowing. On a shared
file system each attempt writes in a folder of its own, whose file is renamed when it is finished; a later run removes
these folders first. Into a bucket, a task uploads nothing once another run has begun.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

from streamload_tools.packing.records import ATTEMPT, DONE, TABLE, Finished, keep, kept
from streamload_tools.packing.run_records import PackingRecords, UploadedShard
from streamload_tools.packing.work import CheckTask, JoinTask, PackTask, Report, Result, Task, do, fingerprint

from streamload.errors import ShardFormatError, StorageError
from streamload.storage.storages import Storages
from streamload.write.destination import upload_shard

__all__ = ["BucketTask", "do_in_bucket", "do_in_shared_folder"]

_PREFIX = f"streamload-ray-{os.geteuid()}-"
_LOCKED_AFTER_S = 60.0
_MOST_BYTES = 1 << 40


def do_in_shared_folder(task: Task, report: Report) -> Result:
    """Do a task whose paths this node sees as all others do. Raises OSError, StreamloadError."""
    if isinstance(task, CheckTask):
        return do(task, report)
    if kept(task.path, fingerprint(task)) is not None:
        return do(task, report)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(task.path), prefix=ATTEMPT) as folder:
        done = do(task._replace(path=os.path.join(folder, os.path.basename(task.path))), report)
        assert isinstance(done, Finished)
        for suffix in (TABLE, "", DONE):  # what says that it is complete comes last
            with suppress(FileNotFoundError):
                os.replace(done.path + suffix, task.path + suffix)
    return replace(done, path=task.path)


class BucketTask(NamedTuple):
    """A task whose tar file goes to a bucket.

    Attributes:
        task: what to do; its paths are those of the staging folder, which the node need not have.
        storages: of the bucket.
        destination: url of the destination.
        run: identity of the run in the records there.
        key: of the task's record.
        url: of the object.
        name: the last part of it.
        pieces: for a JoinTask, the keys of its pieces.
    """

    task: Task
    storages: Storages
    destination: str
    run: str
    key: str
    url: str
    name: str
    pieces: tuple[str, ...]


def do_in_bucket(given: BucketTask, report: Report) -> tuple[UploadedShard | None, Result]:
    """Do a task in a folder of this node, upload its file and record it in the bucket.

    Returns:
        The record; None where there is nothing to record. And the result, of which the table alone travels.

    Raises:
        OSError, StreamloadError: something cannot be read or written; nothing of it is left on this node.
    """
    if isinstance(given.task, CheckTask):
        return None, do(given.task, report)
    storage = given.storages.for_url(given.destination)
    records = PackingRecords(storage, given.destination)
    with _own_folder() as folder:
        task = given.task._replace(path=os.path.join(folder, given.name))
        if isinstance(task, JoinTask):
            task = _with_pieces(task, given, records, folder)
        known_as = fingerprint(task)
        done = do(task, report)
        assert isinstance(done, Finished)
        shown = replace(done, path=given.task.path)
        if isinstance(task, PackTask) and done.faults and not task.skip_faults:
            return None, shown  # the run will publish nothing
        if (records.run() or {}).get("id") != given.run:
            raise StorageError("another run into this destination has begun; this one ends", url=given.destination)
        etag = None
        if done.table is not None:
            etag = upload_shard(storage, given.url, done.path, done.table.shard_bytes)
        shard = UploadedShard(known_as, None if done.table is None else given.name, etag, done.faults)
        records.keep(given.key, shard, done.table)
    return shard, shown


def _with_pieces(task: JoinTask, given: BucketTask, records: PackingRecords, folder: str) -> JoinTask:
    """Fetch the pieces of a task with their tables; the same task on these files."""
    pieces = []
    for number, ((path, span), key) in enumerate(zip(task.pieces, given.pieces, strict=True)):
        there = os.path.join(folder, str(number), os.path.basename(path))
        os.mkdir(os.path.dirname(there))
        table, content = records.piece(key)
        if len(content) != table.shard_bytes:
            raise ShardFormatError("what was packed before is damaged; start over with --overwrite", url=given.url)
        with open(there, "wb") as file:
            file.write(content)
        keep(Finished(there, table), "")
        pieces.append((there, span))
    return task._replace(pieces=tuple(pieces))


@contextmanager
def _own_folder() -> Iterator[str]:
    """A folder for one task among this node's temporary files; first, those that killed tasks have left are removed."""
    parent = tempfile.gettempdir()
    for name in os.listdir(parent):
        if name.startswith(_PREFIX):
            _remove_abandoned(os.path.join(parent, name))
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(folder: str) -> None:
    """Remove a folder whose task has ended: nobody locks it, although there was time for it."""
    with suppress(OSError):  # another task removes it too, or it is another user's
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(lock)
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _LOCKED_AFTER_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        finally:
            os.close(lock)
