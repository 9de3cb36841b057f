"""Makes of what the feeder announces what the loop gets: a batch of tensors, or the error of a sample."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from typing import Any

from streamload.decode.batch_layout import Layout
from streamload.decode.collate import build_batch, load_values
from streamload.decode.failure import sample_error
from streamload.decode.tasks import OnError
from streamload.errors import SampleError
from streamload.feeder.messages import ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.trainer.skipped_members import SkippedMembers

_log = logging.getLogger("streamload")
_MAX_LOGGED = 5
MOST_KEPT = 10_000
"""Of the errors of samples that were left out; each holds what was raised, with a traceback as text."""


class BatchBuilder:
    """Builds batches, and applies `on_error` to the samples that failed.

    Attributes:
        repeats: the same.
        skipped: the errors of the samples that were left out or replaced, in the order of their batches; the newest
            `MOST_KEPT`.
        n_skipped: how many there were.
        skipped_members: warns of members that belong to no sample.
    """

    def __init__(self, on_error: OnError, *, repeats: bool) -> None:
        self._on_error = on_error
        self.repeats = repeats
        self._layouts: dict[bytes, Layout] = {}
        self.skipped: deque[SampleError] = deque(maxlen=MOST_KEPT)
        self.n_skipped = 0
        self.skipped_members = SkippedMembers()

    def check(self, batch: ReadyBatch) -> None:
        """Record the samples of a batch that failed.

        Raises:
            SampleError: a sample failed, and `on_error` says that this is the end.
            ShardChangedError: the shard of a sample became shorter while it was in use.
        """
        errors: list[SampleError] = []
        for row in batch.failed:
            error = sample_error(row.failure, row.url, row.key)
            if self._on_error == "raise" or row.failure.fatal or not isinstance(error, SampleError):
                raise error
            errors.append(error)
        for error in errors:
            self.skipped.append(error)
            self.n_skipped += 1
            if self.n_skipped <= _MAX_LOGGED:
                _log.warning("sample left out (on_error=%r): %s", self._on_error, error)
            if self.n_skipped == _MAX_LOGGED:
                _log.warning("further samples that are left out are not logged; they are in loader.skipped")

    def build(self, batch: ReadyBatch, memory: Bytes) -> Any:
        """Build the batch that lies in a slot's memory; it has rows, and may be built more than once."""
        assert batch.layout is not None
        layout = self._layouts.get(batch.layout)
        if layout is None:
            if len(self._layouts) > 1000:  # batches of ever new shapes
                self._layouts.clear()
            layout = self._layouts[batch.layout] = pickle.loads(batch.layout)
        return build_batch(layout, memory, batch.rows, load_values(batch.values, memory))
