"""A way out for tests of batches that never come."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

import pytest

from streamload import StreamLoader


class ClosedWhenLate(logging.Handler):
    """Closes a loader as soon as it logs what a batch waits for, which is the first time that it looks."""

    def __init__(self, loader: StreamLoader, monkeypatch: pytest.MonkeyPatch, after_s: float) -> None:
        super().__init__()
        monkeypatch.setattr("streamload.trainer.epoch_iterator.WAIT_LOGGED_AFTER_S", after_s)
        self._loader = loader
        self.message = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("no batch has come"):
            self.message = record.getMessage()
            self._loader.close()

    def __enter__(self) -> Self:
        logging.getLogger("streamload").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        logging.getLogger("streamload").removeHandler(self)
