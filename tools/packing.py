"""Images to shards in a hidden folder of the destination, which are published together at the end or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from streamload_tools.check import fault_of_image
from streamload_tools.failures import UsageError
from streamload_tools.imagefolder import ImageFile
from streamload_tools.progress import Progress

from streamload.dataset.atomic import replace_file
from streamload.dataset.index import INDEX_FOLDER, write_index
from streamload.dataset.numbered import NumberedName, remove_shards
from streamload.dataset.shard_file import sync_folder
from streamload.dataset.writer import ShardWriter

__all__ = ["NAMES", "Fault", "PackedPart", "find_faults", "pack", "publish", "staging_folder"]

PREFIX = "shard"
NAMES = NumberedName(f"{PREFIX}-", 6, ".tar")
_STAGING = ".shardify-unfinished"
_READERS = 4
_FILES_AHEAD = 32


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that cannot be packed, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """One split, packed and not yet published.

    Attributes:
        name: the split's name, empty where the dataset is not split.
        writer: closed; holds the shards' paths and tables.
    """

    name: str
    writer: ShardWriter


@contextmanager
def staging_folder(destination: str) -> Iterator[str]:
    """A hidden folder in the destination, which is made if needed; removed at the end whatever happens.

    What a killed run left there is removed first. A lock, which dies with its process, tells that from a run that is
    still at work, which is a UsageError.
    """
    made = not os.path.isdir(destination)
    folder = os.path.join(destination, _STAGING)
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another shardify is writing to {destination!r}; wait until it ends") from None
        try:
            _clear(folder)
            yield folder
        finally:
            shutil.rmtree(folder)
            if made and not os.listdir(destination):
                os.rmdir(destination)
    finally:
        os.close(descriptor)


def _clear(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def find_faults(files: Sequence[ImageFile], progress: Progress) -> list[Fault]:
    """Read every file and name those that are no whole images."""
    faults = []
    for file, data, reason in _loaded(files):
        if reason is not None:
            faults.append(Fault(file.path, reason))
        progress.advance(1, len(data))
    return faults


def pack(
    parts: Mapping[str, Sequence[ImageFile]],
    staging: str,
    progress: Progress,
    *,
    max_bytes: int,
    max_count: int | None,
    skip_faults: bool,
) -> tuple[list[PackedPart], list[Fault]]:
    """Write each part's images to shards in the staging folder, in the order given, and name what is no image.

    Where faults are not skipped, the first one ends the writing and the remaining files are only checked: nothing of
    this will be published, and one run should name all the faults.
    """
    faults: list[Fault] = []
    packed = []
    for name, files in parts.items():
        with ShardWriter(
            os.path.join(staging, name) if name else staging,
            prefix=PREFIX,
            max_bytes=max_bytes,
            max_count=max_count,
            index=False,
        ) as writer:
            for file, data, reason in _loaded(files):
                if reason is not None:
                    faults.append(Fault(file.path, reason))
                elif skip_faults or not faults:
                    writer.write({"__key__": file.key, str(file.field): data, "cls": file.label})
                progress.advance(1, len(data))
        packed.append(PackedPart(name, writer))
    return packed, faults


def publish(packed: Sequence[PackedPart], destination: str, classes: Sequence[str]) -> None:
    """Move the shards to their places, replacing those of this name that are there, and write index and classes."""
    text = json.dumps(
        {"classes": list(classes), "class_to_idx": {name: number for number, name in enumerate(classes)}},
        ensure_ascii=True,
        indent=1,
    )
    content = f"{text}\n".encode("ascii")
    for part in packed:
        folder = os.path.join(destination, part.name) if part.name else destination
        os.makedirs(folder, exist_ok=True)
        remove_shards(folder, NAMES)
        for path in part.writer.shards:
            os.replace(path, os.path.join(folder, os.path.basename(path)))
        replace_file(os.path.join(folder, "classes.json"), lambda file: file.write(content))
        sync_folder(folder)
        if part.writer.tables:
            write_index(os.path.join(folder, INDEX_FOLDER), part.writer.tables)


def _loaded(files: Sequence[ImageFile]) -> Iterator[tuple[ImageFile, bytes, str | None]]:
    """Each file with its bytes and what is wrong with it, in order, read a few files ahead by threads."""
    waiting: deque[tuple[ImageFile, Future[tuple[bytes, str | None]]]] = deque()
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="read-image")
    try:
        for file in files:
            waiting.append((file, pool.submit(_load, file)))
            if len(waiting) > _FILES_AHEAD:
                ready, future = waiting.popleft()
                yield ready, *future.result()
        for ready, future in waiting:
            yield ready, *future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _load(file: ImageFile) -> tuple[bytes, str | None]:
    if file.field is None:
        return b"", "its extension is not that of an image"
    try:
        # Without O_NONBLOCK, a named pipe among the images would stop everything for ever.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb", buffering=0) as opened:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b"", "it is not a regular file"
            data = opened.readall()
    except OSError as exc:
        return b"", f"it cannot be read: {exc.strerror or exc}"
    return data, fault_of_image(data)
