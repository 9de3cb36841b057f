"""Programs that are the ranks of one machine, and what a test says to them; see `node_rank.py`.

For the tests of feeders that ranks share: `test_loader_node.py`, `test_node_groups.py` and `test_node_launched.py`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from preloaded import Preloaded
from processes import wait_until

FEEDER, WORKER = "streamload.feeder.start", "streamload.workers.worker"
OPTIONS: dict[str, Any] = {"shuffle": True, "shuffle_window": 40, "fields": ["npy", "cls"], "num_workers": 1}
_PROGRAM = "import node_rank; node_rank.main()"


class RankError(Exception):
    """What a rank has raised."""


class Rank:
    """A rank's program."""

    def __init__(self, preloaded: Preloaded) -> None:
        self.process = preloaded.start(_PROGRAM)

    def tell(self, command: str, *arguments: Any) -> None:
        """Have it do something; `heard` gives what comes of it."""
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def heard(self) -> Any:
        """Its answer. Raises RankError: it raised something."""
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

    def let_end(self) -> None:
        """Have it end."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> None:
        """End it."""
        self.let_end()
        try:
            self.process.wait(30)
        except TimeoutError:
            self.process.kill()
        self.process.communicate()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


class Node:
    """The ranks of a machine, which begin a launch with each `loaders`."""

    def __init__(self, preloaded: Preloaded, ranks: int) -> None:
        self.ranks = [Rank(preloaded) for _ in range(ranks)]
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

    def kill_helper(self, module: str) -> None:
        """End one of the processes of this module that serve the ranks."""
        self.processes(module)[0].kill()

    def end(self) -> None:
        """End the ranks, beside each other."""
        for rank in self.ranks:
            rank.let_end()
        for rank in self.ranks:
            rank.end()


@contextmanager
def node_of(preloaded: Preloaded, ranks: int) -> Iterator[Node]:
    """A machine with so many ranks, which end with the block."""
    node = Node(preloaded, ranks)
    try:
        yield node
    finally:
        node.end()


def _error(rank: Rank) -> RankError | None:
    try:
        rank.heard()
    except RankError as error:
        return error
    return None
