"""Programs that are the ranks of one machine, and what a test says to them; see `node_rank.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from processes import wait_until

_PROGRAM = Path(__file__).with_name("node_rank.py")


class RankError(Exception):
    """What a rank has raised."""


class Rank:
    """A rank's program."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, command: str, *arguments: Any) -> None:
        """Have it do something; `heard` gives what comes of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        """Its answer. Raises RankError: it raised something."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the rank ended with status {self.process.wait()}"
        said = json.loads(line)
        if "error" in said:
            raise RankError(said["error"])
        return said["ok"]

    def ask(self, command: str, *arguments: Any) -> Any:
        """Both."""
        self.tell(command, *arguments)
        return self.heard()

    def end(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Node:
    """The ranks of a machine, which begin a launch with each `loaders`."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self._launch = ""

    @contextmanager
    def loaders(self, url: str, *, each: Sequence[dict[str, Any]] = (), **options: Any) -> Iterator[list[Rank]]:
        """A loader on each rank, until the block ends.

        Args:
            url: of the shards.
            each: more options of each rank.
            options: of all.
        """
        self.open(url, each=each, **options)
        try:
            yield self.ranks
        finally:
            for rank in self.ranks:
                if rank.process.poll() is None:
                    rank.tell("close")
            for rank in self.ranks:
                if rank.process.poll() is None:
                    rank.heard()
        assert wait_until(lambda: not self.processes()), f"left behind: {self.processes()}"

    def open(self, url: str, *, each: Sequence[dict[str, Any]] = (), **options: Any) -> None:
        """Make a loader on each rank. Raises RankError: one of them, or all, cannot be made."""
        self._launch = str(uuid.uuid4())
        launch = {"TORCHELASTIC_RUN_ID": self._launch}
        launch |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(self.ranks)))
        for number, rank in enumerate(self.ranks):
            place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(number))
            rank.tell("open", {**launch, **place}, url, {**options, **(each[number] if each else {})})
        failed = [error for rank in self.ranks if (error := _error(rank)) is not None]
        if failed:
            raise failed[0]

    def ask(self, command: str, *arguments: Any) -> list[Any]:
        """What all say to a command that they get at the same time."""
        for rank in self.ranks:
            rank.tell(command, *arguments)
        return [rank.heard() for rank in self.ranks]

    def processes(self, module: str = "streamload.") -> list[psutil.Process]:
        """Those of this module that serve the ranks of the last launch; a feeder is nobody's child."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                is_ours = is_alive and process.environ().get("TORCHELASTIC_RUN_ID") == self._launch
                if is_ours and any(part.startswith(module) for part in process.cmdline()):
                    found.append(process)
        return found

    def end(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.end()


def _error(rank: Rank) -> RankError | None:
    try:
        rank.heard()
    except RankError as error:
        return error
    return None
