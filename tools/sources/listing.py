"""The files of a source with their sizes and times, for comparison with an earlier run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streamload_tools.sources.source import Source, SourceFile

from streamload.storage.atomic import replace_file
from streamload.text import counted

__all__ = ["Listing", "list_files"]


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What is known of N files without opening them.

    Attributes:
        files: the files.
        sizes: int64[N], size in bytes; -1 if `stat` fails.
        times: int64[N], modification time in nanoseconds since 1970.
        meanings: a text of everything else that the shards depend on: keys, labels, columns, names of classes.
    """

    files: Sequence[SourceFile]
    sizes: NDArray[np.int64]
    times: NDArray[np.int64]
    meanings: bytes

    def save(self, path: str) -> None:
        """Save it to a file. Raises OSError."""
        arrays: dict[str, NDArray[Any]] = {
            "paths": np.frombuffer(self._paths(), np.uint8),
            "sizes": self.sizes,
            "times": self.times,
            "meanings": np.frombuffer(self.meanings, np.uint8),
        }
        replace_file(path, lambda file: np.savez(file, allow_pickle=False, **arrays), durable=False)

    def difference(self, path: str) -> str | None:
        """How this differs from the listing saved in a file, or None.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as saved:
                arrays = {name: saved[name] for name in ("paths", "sizes", "times", "meanings")}
        except (ValueError, KeyError, EOFError) as exc:
            return f"its list of files is damaged ({exc})"
        before = arrays["paths"].tobytes().split(b"\0")[:-1]
        now = self._paths().split(b"\0")[:-1]
        if before != now:
            gone, new = set(before) - set(now), set(now) - set(before)
            some = [
                f"{os.fsdecode(min(names))!r} {word}" for names, word in ((gone, "is gone"), (new, "is new")) if names
            ]
            return f"it had {counted(len(before), 'file')} and now there are {len(now):,}" + "".join(
                f"; {text}" for text in some
            )
        changed = np.flatnonzero((arrays["sizes"] != self.sizes) | (arrays["times"] != self.times))
        if len(changed):
            return f"{counted(len(changed), 'file')} changed since, such as {self.files[int(changed[0])].path!r}"
        if arrays["meanings"].tobytes() != self.meanings:
            return "labels, classes or columns are others than before"
        return None

    def _paths(self) -> bytes:
        return b"".join(os.fsencode(file.path) + b"\0" for file in self.files)


def list_files(source: Source) -> Listing:
    """Get size and time of every file of a source."""
    found = np.full((len(source.files), 2), -1, np.int64)
    for number, file in enumerate(source.files):
        try:
            status = os.stat(file.path)
        except OSError:
            continue  # reading it will report why
        found[number] = status.st_size, status.st_mtime_ns
    meanings = repr((source.classes, source.parts, [file[1:] for file in source.files]))
    return Listing(source.files, found[:, 0].copy(), found[:, 1].copy(), meanings.encode("utf-8", "backslashreplace"))
