"""The mark of a folder in which not all shards of a set are there: written before the first of them, removed last.

Shards get their names one by one, so without it a folder whose writer was killed could be read as a whole dataset. A
set is the shards of one numbered name, since several writers may write into one folder.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from streamload.errors import DatasetIndexError, ShardNotFoundError, without_secrets
from streamload.index.dataset_index import INDEX_FOLDER
from streamload.index.shard_names import ShardNaming
from streamload.storage.local_files import replace_file
from streamload.storage.protocol import Storage

SHARDIFY, SHARD_WRITER = "shardify", "ShardWriter"
MOST_MARK_BYTES = 1 << 20

STAGING = ".shardify-unfinished"
"""The folder in a local destination in which `shardify` packs before publishing."""

PACKING = f"{INDEX_FOLDER}/packing/run.json"
"""The file in a remote destination that exists while `shardify` runs."""

SHARDIFY_ADVICE = (
    "a `shardify` or `streamload map` (a call: `pack` or `map_shards`) into this folder was interrupted, or is still "
    "at work; run it again with --resume (resume=True) to go on, or with --overwrite (overwrite=True) to start over"
)

_FILE = ".streamload-unfinished.json"
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
        writer: who writes them: `SHARDIFY` or `SHARD_WRITER`.
    """

    shards: ShardNaming
    writer: str


def mark_path(folder: str) -> str:
    """Where the mark of a folder lies, which may be a url."""
    return f"{folder.rstrip('/')}/{_FILE}"


def unfinished_sets(content: bytes, folder: str) -> Sequence[UnfinishedSet]:
    """What a mark says.

    Raises:
        DatasetIndexError: it is damaged, so nothing is known of what is complete.
    """
    try:
        return [UnfinishedSet(ShardNaming(**entry["shards"]), str(entry["writer"])) for entry in json.loads(content)]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise DatasetIndexError(
            "this mark of an interrupted writer is damaged; write the shards again, or remove it if they are complete",
            url=without_secrets(mark_path(folder)),
        ) from exc


def unfinished_error(found: UnfinishedSet, folder: str) -> DatasetIndexError:
    """The error for reading shards of an unfinished set."""
    advice = _ADVICE.get(found.writer, "its writer was interrupted, or is still at work; write them again")
    return DatasetIndexError(
        f"the shards in this folder are not complete: {advice}. (To read what is there all the same, remove "
        f"{_FILE} from it)",
        url=without_secrets(folder),
    )


def with_set(content: bytes | None, folder: str, added: UnfinishedSet) -> bytes:
    """A mark's content with one more set, or with another writer of it. Raises DatasetIndexError if it is damaged."""
    return _content([*_others(content, folder, added.shards), added])


def without_set(content: bytes | None, folder: str, shards: ShardNaming) -> bytes | None:
    """A mark's content without a set; None if no other is left. Raises DatasetIndexError if it is damaged."""
    others = _others(content, folder, shards)
    return _content(others) if others else None


def mark_unfinished(folder: str, added: UnfinishedSet, *, durable: bool = True) -> None:
    """Mark a local folder, which exists, before anything of a set is changed in it. Idempotent.

    Raises:
        OSError: the mark cannot be written.
        DatasetIndexError: there is one that is damaged.
    """
    with locked_folder(folder):
        _write(folder, with_set(_read(folder), folder, added), durable=durable)


def mark_finished(folder: str, shards: ShardNaming, *, durable: bool = True) -> None:
    """Remove the mark of a set from a local folder, since all or nothing of the set exists. Idempotent.

    Raises:
        OSError: the mark cannot be removed.
        DatasetIndexError: it is damaged.
    """
    with locked_folder(folder):
        content = without_set(_read(folder), folder, shards)
        if content is not None:
            _write(folder, content, durable=durable)
            return
        with suppress(FileNotFoundError):
            os.unlink(mark_path(folder))


def _others(content: bytes | None, folder: str, shards: ShardNaming) -> list[UnfinishedSet]:
    return [] if content is None else [each for each in unfinished_sets(content, folder) if each.shards != shards]


def _content(sets: Sequence[UnfinishedSet]) -> bytes:
    return json.dumps([asdict(each) for each in sets]).encode("ascii")


def _read(folder: str) -> bytes | None:
    try:
        with open(mark_path(folder), "rb") as file:
            return file.read(MOST_MARK_BYTES)
    except FileNotFoundError:
        return None


def _write(folder: str, content: bytes, *, durable: bool) -> None:
    replace_file(mark_path(folder), lambda file: file.write(content), durable=durable)


@contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Exclude other writers into a folder, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_mark(storage: Storage, folder: str) -> bytes | None:
    """The mark of a folder, local or remote, or None. Raises StorageError."""
    try:
        return storage.read_bytes(mark_path(folder), most_bytes=MOST_MARK_BYTES)
    except ShardNotFoundError:
        return None


def mark_remote_unfinished(storage: Storage, folder: str, added: UnfinishedSet) -> None:
    """Mark a folder before anything of a set is changed in it. Idempotent.

    Raises:
        StorageError: the mark cannot be read or written.
        DatasetIndexError: there is one that is damaged.
    """
    storage.write(mark_path(folder), with_set(read_mark(storage, folder), folder, added))


def mark_remote_finished(storage: Storage, folder: str, shards: ShardNaming) -> None:
    """Remove the mark of a set from a folder, since all or nothing of the set exists. Idempotent.

    Raises:
        StorageError: the mark cannot be read or removed.
        DatasetIndexError: it is damaged.
    """
    before = read_mark(storage, folder)
    if before is None:
        return
    content = without_set(before, folder, shards)
    if content is None:
        storage.delete(mark_path(folder))
    else:
        storage.write(mark_path(folder), content)
