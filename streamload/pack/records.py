"""The record of a finished tar file, beside it in the staging folder, from which a later run resumes."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from streamload.errors import StreamloadError
from streamload.index.table_file import pack_table, unpack_table
from streamload.pack.reading import differences, scanned_table
from streamload.pack.sources.loading import Fault
from streamload.storage.local_files import replace_file
from streamload.tar.table import ShardTable

DONE = ".done"
"""The suffix of a record. It is written last, so a file that has one is complete."""

TABLE = ".table"
"""The suffix of its table."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One tar file of the staging folder.

    Attributes:
        path: its path.
        table: its table, or None if it would have no sample and does not exist.
        faults: the files that could not be packed into it.
    """

    path: str
    table: ShardTable | None
    faults: tuple[Fault, ...] = ()


def keep(finished: Finished, task: str) -> None:
    """Write the record of a file that is in its place.

    Args:
        finished: the file.
        task: the fingerprint of its task.

    Raises:
        OSError: it cannot be written.
    """
    if finished.table is not None:
        packed = pack_table(finished.table)
        replace_file(finished.path + TABLE, lambda file: file.write(packed), durable=False)
    record = {"samples": finished.table is not None, "faults": finished.faults, "task": task}
    content = json.dumps(record).encode("ascii")
    replace_file(finished.path + DONE, lambda file: file.write(content), durable=False)


def kept(path: str, task: str | None = None, *, check: bool = True) -> Finished | None:
    """The record of a file, or None if there is none, it is of another task, or the file is damaged.

    Args:
        path: the tar file.
        task: the fingerprint of its task, or None for any.
        check: read and compare all of the file; otherwise the file need not exist any more.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, StreamloadError):
        with open(path + DONE, "rb") as file:
            record = json.load(file)
        if task is not None and record["task"] != task:
            return None
        faults = tuple(Fault(*fault) for fault in record["faults"])
        if not record["samples"]:
            return Finished(path, None, faults)
        with open(path + TABLE, "rb") as file:
            table = unpack_table(file.read(), path + TABLE)
        if not check or not any(differences(path, scanned_table(path, every_byte=True), table)):
            return Finished(path, table, faults)
    return None
