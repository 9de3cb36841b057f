"""The mark of a folder that lacks shards of a set: written before the first of them, removed after the last.

Shards get their names one by one, so without a mark a folder whose writer was killed could be read as a whole dataset.
A set is the shards of one numbered name, since several writers may write into one folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from streamload.errors import DatasetIndexError, ShardNotFoundError, without_secrets
from streamload.index.shard_names import ShardNaming
from streamload.storage.protocol import Storage

SHARDIFY, SHARD_WRITER = "shardify", "ShardWriter"

PACKING_FOLDER = ".streamload-packing"
"""The folder in a destination with the records of an unfinished run of packing."""

SHARDIFY_ADVICE = (
    "a `shardify` or `streamload map` (a call: `pack` or `map_shards`) into this folder was interrupted, or is still "
    "at work; run it again with --resume (resume=True) to go on, or with --overwrite (overwrite=True) to start over"
)

_FILE = ".streamload-unfinished.json"
_MOST_MARK_BYTES = 1 << 20
_ADVICE = {
    SHARDIFY: SHARDIFY_ADVICE,
    SHARD_WRITER: "a ShardWriter was interrupted, or is still at work; write them again with overwrite=True, or remove "
    "the folder",
}


@dataclass(frozen=True, slots=True)
class UnfinishedSet:
    """A set of shards that are not all there.

    Attributes:
        shards: their numbered name.
        writer: `SHARDIFY` or `SHARD_WRITER`.
    """

    shards: ShardNaming
    writer: str


def mark_path(folder: str) -> str:
    """Return where the mark of a folder lies; the folder may be a url."""
    return f"{folder.rstrip('/')}/{_FILE}"


def read_mark(storage: Storage, folder: str) -> Sequence[UnfinishedSet]:
    """Return the unfinished sets in a folder.

    Raises:
        DatasetIndexError: the mark is damaged, so nothing is known of what is complete.
        StorageError: the storage cannot be read.
    """
    try:
        content = storage.read_bytes(mark_path(folder), most_bytes=_MOST_MARK_BYTES)
    except ShardNotFoundError:
        return ()
    if is_page(content):
        return ()
    try:
        return [UnfinishedSet(ShardNaming(**entry["shards"]), str(entry["writer"])) for entry in json.loads(content)]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise DatasetIndexError(
            "this mark of an interrupted writer is damaged; write the shards again, or remove it if they are complete",
            url=without_secrets(mark_path(folder)),
        ) from exc


def is_page(content: bytes) -> bool:
    """Return True for the page that some web servers send, with status 200, in place of a missing file."""
    return content.lstrip()[:1] == b"<"


def unfinished_error(unfinished: UnfinishedSet, folder: str) -> DatasetIndexError:
    """Return the error for reading shards of an unfinished set."""
    advice = _ADVICE.get(unfinished.writer, "its writer was interrupted, or is still at work; write them again")
    return DatasetIndexError(
        f"the shards in this folder are not complete: {advice}. (To read what is there all the same, remove "
        f"{_FILE} from it)",
        url=without_secrets(folder),
    )


def mark_unfinished(storage: Storage, folder: str, added: UnfinishedSet) -> None:
    """Mark a folder before anything of a set is changed in it. Idempotent.

    Raises:
        StorageError: the mark cannot be read or written.
        DatasetIndexError: an existing mark is damaged.
    """
    with locked_folder(folder):
        others = [each for each in read_mark(storage, folder) if each.shards != added.shards]
        _write(storage, folder, [*others, added])


def mark_finished(storage: Storage, folder: str, shards: ShardNaming) -> None:
    """Remove the mark of a set from a folder, since all or nothing of the set exists. Idempotent.

    Raises:
        StorageError: the mark cannot be read or removed.
        DatasetIndexError: it is damaged.
    """
    with locked_folder(folder):
        before = read_mark(storage, folder)
        others = [each for each in before if each.shards != shards]
        if others:
            _write(storage, folder, others)
        elif before:
            storage.delete(mark_path(folder))


@contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Exclude other writers into a folder, if it is local and its file system has locks."""
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _write(storage: Storage, folder: str, sets: Sequence[UnfinishedSet]) -> None:
    storage.write(mark_path(folder), json.dumps([asdict(each) for each in sets]).encode("ascii"))
