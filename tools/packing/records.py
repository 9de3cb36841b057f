"""What is known of a finished tar file, kept beside it in the staging folder so that a later run can use it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from streamload_tools.reading import scanned_table
from streamload_tools.sources.loading import Fault
from streamload_tools.verify import differences

from streamload.errors import StreamloadError
from streamload.index.table_file import table_from_npz, table_to_npz
from streamload.storage.local_files import replace_file
from streamload.tar.table import ShardTable

__all__ = ["DONE", "TABLE", "Finished", "keep", "kept"]

DONE = ".done"
"""What the name of a record ends in. It is written last: what has one is whole."""

TABLE = ".npz"
"""What the name of its table ends in."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One tar file of the staging folder.

    Attributes:
        path: where it lies.
        table: its samples, or None where none was left and there is no file.
        faults: what was to be in it and could not be packed.
    """

    path: str
    table: ShardTable | None
    faults: tuple[Fault, ...] = ()


def keep(finished: Finished, task: str) -> None:
    """Write the record of a file that has its name already.

    Args:
        finished: the file.
        task: what stands for all that its content comes from.

    Raises:
        OSError: it cannot be written.
    """
    if finished.table is not None:
        table = finished.table
        replace_file(finished.path + TABLE, lambda file: table_to_npz(table, file), durable=False)
    record = {"samples": finished.table is not None, "faults": finished.faults, "task": task}
    content = json.dumps(record).encode("ascii")
    replace_file(finished.path + DONE, lambda file: file.write(content), durable=False)


def kept(path: str, task: str | None = None, *, check: bool = True) -> Finished | None:
    """The record of a file, or None if there is none, if it is of another task, or if the file is not what it says.

    Args:
        path: the tar file.
        task: what was given to `keep`, if it is known.
        check: read all of the file and compare it; otherwise the file need not even be there any more.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, StreamloadError):
        with open(path + DONE, "rb") as file:
            record = json.load(file)
        if task is not None and record["task"] != task:
            return None
        faults = tuple(Fault(*fault) for fault in record["faults"])
        if not record["samples"]:
            return Finished(path, None, faults)
        table = table_from_npz(path + TABLE, path + TABLE)
        if not check or not any(differences(path, scanned_table(path, every_byte=True), table)):
            return Finished(path, table, faults)
    return None
