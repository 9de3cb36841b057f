"""A program for one of the ranks of a machine, which does what its stdin says, a line each; see `node_ranks.py`.

It answers each line with one of JSON: `{"ok": ...}`, or `{"error": ...}` with what was raised.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transforms

from streamload import StreamLoader


def digest(batch: Any) -> str:
    """Of all values of a batch, their types and shapes."""
    sums = hashlib.sha256()
    for value in batch if isinstance(batch, tuple | list) else [batch]:
        data = value.numpy() if hasattr(value, "numpy") else value
        sums.update(f"{type(value).__name__} {getattr(data, 'dtype', '')} {getattr(data, 'shape', '')}".encode())
        sums.update(data.tobytes() if hasattr(data, "tobytes") else repr(data).encode())
    return sums.hexdigest()[:16]


class Program:
    """What a rank has open: one loader and a pass of it."""

    loader: StreamLoader
    passed: Iterator[Any] | None = None

    def __init__(self) -> None:
        self.batches_kept: list[Any] = []

    def open(self, environment: dict[str, str], url: str, options: dict[str, Any]) -> None:
        """Make a loader, as the rank that these variables say."""
        os.environ.update(environment)
        state = options.pop("state", None)
        if "transform" in options:
            options["transform"] = {"cls": getattr(transforms, options["transform"])}
        if "noted" in options:
            options["transform"] = {"cls": transforms.Noting(options.pop("noted"), options.pop("pause_s", 0.0))}
        for name in options.keys() & {"collate_fn", "worker_init_fn"}:
            options[name] = getattr(transforms, options[name])
        self.passed = None
        self.loader = StreamLoader(url, **options)
        if state is not None:
            self.loader.load_state_dict(state)

    def batches(self, count: int | None) -> list[Any]:
        """So many batches, or all that are left: the position behind each, and its digest."""
        self.passed = self.passed or iter(self.loader)
        given = []
        for batch in itertools.islice(self.passed, count):
            given.append([self.loader.state_dict()["position"], digest(batch)])
            del batch
        if count is None or len(given) < count:
            self.passed = None
        return given

    def changed(self, count: int) -> list[Any]:
        """As `batches`, and then all values of each of them are overwritten."""
        self.passed = self.passed or iter(self.loader)
        given = []
        for batch in itertools.islice(self.passed, count):
            given.append([self.loader.state_dict()["position"], digest(batch)])
            for value in batch:
                value.fill_(77)
            del batch
        return given

    def keep(self, count: int | None) -> list[Any]:
        """As `batches`, and the batches are kept; for `kept`."""
        self.passed = self.passed or iter(self.loader)
        given = []
        for batch in itertools.islice(self.passed, count):
            self.batches_kept.append(batch)
            given.append([self.loader.state_dict()["position"], digest(batch)])
        return given

    def kept(self) -> list[str]:
        """The digests of those batches now."""
        digests = [digest(batch) for batch in self.batches_kept]
        self.batches_kept.clear()
        return digests

    def leave(self) -> None:
        """Leave the pass."""
        self.passed = None

    def state(self) -> dict[str, Any]:
        """Of the loader."""
        return self.loader.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.passed = None
        self.loader.load_state_dict(state)

    def change(self, transform: str) -> None:
        """Have another transform from the next pass on."""
        self.loader.transform = {"cls": getattr(transforms, transform)}

    def totals(self) -> dict[str, float]:
        """Of the statistics."""
        return dict(self.loader.statistics().totals)

    def slots(self) -> list[int]:
        """The inodes of all slots that are mapped here."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sorted({int(line.split()[4]) for line in maps if "memfd:streamload" in line})

    def skipped(self) -> int:
        """How many samples were."""
        return len(self.loader.skipped)

    def length(self) -> int:
        """Of the loader."""
        return len(self.loader)

    def close(self) -> None:
        """Close the loader."""
        self.passed = None
        self.loader.close()


def main() -> None:
    program = Program()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(program, name)(*arguments)}
        except Exception as error:
            program.passed = None
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
