"""Run a feeder in an actor of Ray, and return its batches."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence

from streamload.cluster.ray_cluster import own_version
from streamload.errors import WorkerError
from streamload.feeder.messages import Configure, Failed, Ready
from streamload.fetch.budget import default_budget
from streamload.log_records import set_log_levels
from streamload.memory.mapped import Bytes
from streamload.order.share import EpochStart
from streamload.trainer.feeder_link import Connection, start_feeder_process
from streamload.workers.launchers import available_processors

Program = tuple[Sequence[str], Sequence[str], str]
"""Of the training program: its `sys.argv`, its `sys.path`, and the folder where its relative paths begin."""


class FeederActor:
    """Runs a feeder for a share of a trainer's batches. Ray calls one method at a time."""

    def __init__(self) -> None:
        # Ray lets the numerical libraries have as many threads as the actor has processors; each worker has one.
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        self._feeder: Connection | None = None
        self._pass = (-1, -1, -1)
        self._ended = True

    def version(self) -> str:
        """Return the version, which must be the trainer's: both exchange pickles."""
        return own_version()

    def start(self, program: Program, configure: bytes, num_cpus: int, budget_is_automatic: bool) -> None:
        """Start the feeder; limit an automatic budget by the memory of this node."""
        sys.argv[:], import_path, folder = program
        sys.path += [entry for entry in import_path if entry not in sys.path]
        if os.path.isdir(folder):
            os.chdir(folder)
        message: Configure = pickle.loads(configure)
        set_log_levels(message.log_levels)
        if budget_is_automatic:
            actors_of_node = max(1, available_processors() // num_cpus)
            budget_bytes = min(message.fetching.budget_bytes, default_budget(actors_of_node))
            message = message._replace(fetching=message.fetching._replace(budget_bytes=budget_bytes))
        self._feeder = start_feeder_process(message.workers, None)
        self._feeder.send(message)

    def begin(self, start: EpochStart) -> None:
        """Begin a pass, and abandon the one before."""
        assert self._feeder is not None, "start comes first"
        self._pass, self._ended = start.identity, False
        self._feeder.send(start)

    def next(self) -> tuple[Ready | Failed, list[Bytes]] | None:
        """Return the next batches with their memory, or a failure; None after the end.

        Raises:
            WorkerError: the feeder is dead, or has failed in an abandoned pass.
        """
        assert self._feeder is not None, "start comes first"
        while not self._ended:
            message = self._feeder.receive(None)
            if isinstance(message, Failed):
                if message.start not in (None, self._pass):
                    raise WorkerError("the feeder has failed in a pass that was abandoned")
                self._ended = True
                return message, []
            if not isinstance(message, Ready):
                continue
            memory = [self._feeder.lease(batch.slot)[: batch.done.size_bytes] for batch in message.batches]
            if message.start == self._pass:
                self._ended = message.last
                return message, memory
        return None
