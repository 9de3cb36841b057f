"""From what the feeder announces to what the loop gets: a batch of tensors, or the error of a sample."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

from streamload.batch.collate import build_batch, choose_rows
from streamload.batch.layout import Layout
from streamload.decode.failure import sample_error
from streamload.decode.tasks import OnError
from streamload.errors import SampleError
from streamload.feeder.pipeline import FailedRow, Part, ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.trainer.passed_over import PassedOver
from streamload.wording import counted

__all__ = ["MOST_KEPT", "Delivery"]

_log = logging.getLogger("streamload")
_MAX_LOGGED = 5
MOST_KEPT = 10_000
"""Of the errors of samples that were left out; each holds what was raised, with a traceback as text."""


class Delivery:
    """Builds batches, and applies `on_error` to the samples that failed.

    Args:
        on_error: "raise", "skip" or "replace".
        max_errors: how many samples may be left out or replaced before that is an error itself.

    Attributes:
        skipped: the errors of the samples that were left out or replaced, in the order of delivery; the newest
            `MOST_KEPT`, since a run may be long.
        n_skipped: how many there were.
        passed_over: knows of members of shards that are no part of a sample, and tells of some.
    """

    def __init__(self, on_error: OnError, max_errors: int | None) -> None:
        self._on_error = on_error
        self._max_errors = max_errors
        self._layouts: dict[bytes, Layout] = {}
        self.skipped: deque[SampleError] = deque(maxlen=MOST_KEPT)
        self.n_skipped = 0
        self.passed_over = PassedOver()

    def build(self, batch: ReadyBatch, lend: Callable[[int], Bytes]) -> tuple[Any, int] | None:
        """A batch for the loop.

        Args:
            batch: as announced.
            lend: gives the memory of its slot.

        Returns:
            The batch and how many samples are in it; None where none of its samples could be made.

        Raises:
            SampleError: a sample failed, and `on_error` or `max_errors` says that this is the end.
        """
        memory = lend(batch.slot)  # also of a batch of which nothing is left: so it is given back
        rows = sum(part.rows for part in batch.parts)
        chosen: list[int] | None = None
        if batch.failed:
            chosen = self._judge(batch.failed, rows)
            if not chosen:
                return None
        if batch.layout is None:
            return None
        layout = self._layout(batch.layout)
        besides = _merge(batch.parts, layout)
        if batch.dropped_already:
            return build_batch(layout, memory, batch.rows, besides), rows if chosen is None else len(chosen)
        built = build_batch(layout, memory, batch.rows, besides, chosen)
        return built, rows if chosen is None else len(chosen)

    def _judge(self, failed: tuple[FailedRow, ...], rows: int) -> list[int]:
        """The rows to deliver in spite of those that failed."""
        errors = [(row.failure, sample_error(row.failure, row.url, row.key)) for row in failed]
        for failure, error in errors:
            if self._on_error == "raise" or failure.fatal:
                raise error
        for _, error in errors:
            self.skipped.append(error)
            self.n_skipped += 1
            if self._max_errors is not None and self.n_skipped > self._max_errors:
                raise SampleError(
                    f"{counted(self.n_skipped, 'failed sample')}, and max_errors={self._max_errors}; the last one: "
                    f"{error.message}",
                    url=error.url,
                    key=error.key,
                    offset=error.offset,
                ) from error
            self._log_skipped(error)
        chosen = choose_rows(rows, {failure.row for failure, _ in errors}, self._on_error)
        if not chosen and self._on_error == "replace":
            raise SampleError("every sample of a batch has failed, so there is none to replace them") from errors[0][1]
        return chosen

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


def _merge(parts: tuple[Part, ...], layout: Layout) -> list[Any]:
    """The values beside the slot, of all parts one after the other."""
    if layout.besides == 0:
        return []
    if len(parts) == 1 and parts[0].besides is not None:
        values: list[Any] = pickle.loads(parts[0].besides)
        return values
    merged: list[Any] = [[] for _ in range(layout.besides)]
    for part in parts:
        lists = [[None] * part.rows] * layout.besides if part.besides is None else pickle.loads(part.besides)
        for column, piece in zip(merged, lists, strict=True):
            column.extend(piece)
    return merged
