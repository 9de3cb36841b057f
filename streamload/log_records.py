"""Forward log records of worker and feeder processes to the trainer's loggers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple


class Logged(NamedTuple):
    """A log record to send to the trainer's process. It can arrive between any two messages.

    Attributes:
        fields: the record's attributes that are numbers or text.
    """

    fields: Mapping[str, int | float | str | None]

    @classmethod
    def of(cls, record: logging.LogRecord) -> Logged:
        """Convert a record; the sending process formats its message and traceback."""
        fields = {name: value for name, value in vars(record).items() if isinstance(value, int | float | str | None)}
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        return cls({**fields, "msg": record.getMessage(), "args": None, "exc_info": None})

    def handle(self) -> None:
        """Log the record in this process, whatever its logger's level."""
        record = logging.makeLogRecord(dict(self.fields))
        logging.getLogger(record.name).handle(record)

    def handle_if_enabled(self) -> None:
        """Log the record if its logger is enabled for its level."""
        logger = logging.getLogger(str(self.fields["name"]))
        if logger.isEnabledFor(int(self.fields["levelno"] or 0)):
            self.handle()


def forward_records(send: Callable[[Logged], None]) -> None:
    """Pass this process's log records to `send` instead of handlers, even handlers that the user's modules add."""
    owner, call_handlers = os.getpid(), logging.Logger.callHandlers

    def forward(logger: logging.Logger, record: logging.LogRecord) -> None:
        logged = None
        if os.getpid() == owner:  # a fork has no channel to the trainer
            with suppress(Exception):  # `logging` reports a record that cannot be formatted
                logged = Logged.of(record)
        if logged is None:
            call_handlers(logger, record)
        else:
            send(logged)

    logging.Logger.callHandlers = forward  # type: ignore[method-assign, assignment]


def log_levels() -> tuple[tuple[str, int], ...]:
    """Return the loggers whose level is set in this process, with their levels."""
    named = logging.root.manager.loggerDict.items()
    levels = [(name, logger.level) for name, logger in named if isinstance(logger, logging.Logger) and logger.level]
    return ("root", logging.root.level), *levels


def set_log_levels(levels: tuple[tuple[str, int], ...]) -> None:
    """Set levels that `log_levels` returned in another process."""
    for name, level in levels:
        logging.getLogger(name).setLevel(level)
