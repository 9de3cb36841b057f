"""The files of a source with their sizes and times, for comparison with an earlier run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.pack.sources.source import Source, SourceSample
from streamload.storage.local_files import replace_file
from streamload.text import counted


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What is known of N files without opening them.

    Attributes:
        paths: of the files.
        sizes: int64[N], size in bytes; -1 if `stat` fails.
        times: int64[N], modification time in nanoseconds since 1970.
        meanings: a text of everything else that the shards depend on: keys, labels, columns, names of classes.
    """

    paths: Sequence[str]
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
            return f"{counted(len(changed), 'file')} changed since, such as {self.paths[int(changed[0])]!r}"
        if arrays["meanings"].tobytes() != self.meanings:
            return "labels, classes or columns are others than before"
        return None

    def _paths(self) -> bytes:
        return b"".join(os.fsencode(path) + b"\0" for path in self.paths)


def list_files(source: Source) -> Listing:
    """Get size and time of every file of a source."""
    paths = list(dict.fromkeys(member.path for sample in source.samples for member in sample.members))
    found = np.full((len(paths), 2), -1, np.int64)
    for number, path in enumerate(paths):
        try:
            status = os.stat(path)
        except OSError:
            continue  # reading it will report why
        found[number] = status.st_size, status.st_mtime_ns
    meanings = repr((source.classes, source.parts, [meaning_of(sample) for sample in source.samples]))
    return Listing(paths, found[:, 0].copy(), found[:, 1].copy(), meanings.encode("utf-8", "backslashreplace"))


def meaning_of(sample: SourceSample) -> tuple[object, ...]:
    """All that is known of a sample, as plain tuples, whose text is shorter."""
    return sample.key, sample.label, sample.values, *map(tuple, sample.members)
