"""From what the feeder announces to what the loop gets: a batch of tensors, or the error of a sample."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

from streamload.decode.batch_layout import Layout
from streamload.decode.collate import build_batch, choose_rows, load_values
from streamload.decode.failure import sample_error
from streamload.decode.tasks import OnError, RowFailure
from streamload.errors import SampleError
from streamload.feeder.messages import Part, ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.trainer.skipped_members import SkippedMembers

_log = logging.getLogger("streamload")
_MAX_LOGGED = 5
MOST_KEPT = 10_000
"""Of the errors of samples that were left out; each holds what was raised, with a traceback as text."""


class BatchBuilder:
    """Builds batches, and applies `on_error` to the samples that failed.

    Args:
        on_error: "raise", "skip" or "replace".
        repeats: the batch before comes again for one whose samples all failed; else that one is left out.

    Attributes:
        repeats: the same.
        skipped: the errors of the samples that were left out or replaced, in the order of their batches; the newest
            `MOST_KEPT`, since a run may be long.
        n_skipped: how many there were.
        skipped_members: counts members of shards that are no part of a sample, and warns of some.
    """

    def __init__(self, on_error: OnError, *, repeats: bool) -> None:
        self._on_error = on_error
        self.repeats = repeats
        self._layouts: dict[bytes, Layout] = {}
        self.skipped: deque[SampleError] = deque(maxlen=MOST_KEPT)
        self.n_skipped = 0
        self.skipped_members = SkippedMembers()

    def judge(self, batch: ReadyBatch) -> Sequence[int]:
        """The rows of a batch that the loop gets; none where every one of its samples has failed.

        Those that failed are noted.

        Raises:
            SampleError: a sample failed, and `on_error` says that this is the end.
            ShardChangedError: the shard of a sample became shorter while it was in use.
        """
        rows = range(sum(part.rows for part in batch.parts))
        if not batch.failed:
            return rows if batch.layout is not None else ()
        errors: list[tuple[RowFailure, SampleError]] = []
        for row in batch.failed:
            error = sample_error(row.failure, row.url, row.key)
            if self._on_error == "raise" or row.failure.fatal or not isinstance(error, SampleError):
                raise error
            errors.append((row.failure, error))
        for _, error in errors:
            self._note(error)
        return choose_rows(len(rows), {failure.row for failure, _ in errors}, self._on_error)

    def build(self, batch: ReadyBatch, memory: Bytes, chosen: Sequence[int]) -> Any:
        """A batch for the loop, once or more often.

        Args:
            batch: as announced.
            memory: of its slot.
            chosen: the rows that it has, at least one, as `judge` has said.
        """
        assert batch.layout is not None
        layout = self._layout(batch.layout)
        dropped = batch.failed and not batch.dropped_already
        return build_batch(layout, memory, batch.rows, _merge(batch.parts, layout, memory), chosen if dropped else None)

    def _note(self, error: SampleError) -> None:
        self.skipped.append(error)
        self.n_skipped += 1
        self._log_skipped(error)

    def _log_skipped(self, error: SampleError) -> None:
        if self.n_skipped <= _MAX_LOGGED:
            _log.warning("sample left out (on_error=%r): %s", self._on_error, error)
        if self.n_skipped == _MAX_LOGGED:
            _log.warning("further samples that are left out are not logged; they are in loader.skipped")

    def _layout(self, pickled: bytes) -> Layout:
        layout = self._layouts.get(pickled)
        if layout is None:
            if len(self._layouts) > 1000:  # batches of ever new shapes
                self._layouts.clear()
            layout = self._layouts[pickled] = pickle.loads(pickled)
        return layout


def _merge(parts: tuple[Part, ...], layout: Layout, memory: Bytes) -> list[list[Any]]:
    """The columns of values of unlike sizes, of all parts one after the other; None for rows that have all failed."""
    merged: list[list[Any]] = [[] for _ in range(layout.value_columns)]
    for part in parts:
        nothing = [[None] * part.rows] * layout.value_columns
        columns = nothing if part.values is None else load_values(part.values, memory)
        for column, values in zip(merged, columns, strict=True):
            column.extend(values)
    return merged
