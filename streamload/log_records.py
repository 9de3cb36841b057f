"""Forward log records of worker and feeder processes to the trainer's loggers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple


class Logged(NamedTuple):
    """A log record for the trainer's loggers. It may be sent between any two messages, and does not answer any.

    Attributes:
        fields: the record's attributes that are numbers or text.
    """

    fields: Mapping[str, int | float | str | None]

    @classmethod
    def of(cls, record: logging.LogRecord) -> Logged:
        """Convert a record; its message and traceback are formatted here."""
        fields = {name: value for name, value in vars(record).items() if isinstance(value, int | float | str | None)}
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        return cls({**fields, "msg": record.getMessage(), "args": None, "exc_info": None})

    def handle(self) -> None:
        """Log the record in this process, at any level."""
        record = logging.makeLogRecord(dict(self.fields))
        logging.getLogger(record.name).handle(record)

    def handle_if_enabled(self) -> None:
        """Log the record if its logger is enabled for its level."""
        logger = logging.getLogger(str(self.fields["name"]))
        if logger.isEnabledFor(int(self.fields["levelno"] or 0)):
            self.handle()


def forward_records(send: Callable[[Logged], None]) -> None:
    """Pass all records of this process to `send` instead of handlers, even if the user's modules add some."""
    owner, call_handlers = os.getpid(), logging.Logger.callHandlers

    def forward(logger: logging.Logger, record: logging.LogRecord) -> None:
        logged = None
        if os.getpid() == owner:  # a fork has no channel to the trainer
            with suppress(Exception):  # logging itself reports a record that cannot be formatted
                logged = Logged.of(record)
        if logged is None:
            call_handlers(logger, record)
        else:
            send(logged)

    logging.Logger.callHandlers = forward  # type: ignore[method-assign, assignment]


def log_levels() -> tuple[tuple[str, int], ...]:
    """Return the levels that are set in this process, by logger."""
    named = logging.root.manager.loggerDict.items()
    levels = [(name, logger.level) for name, logger in named if isinstance(logger, logging.Logger) and logger.level]
    return ("root", logging.root.level), *levels


def set_log_levels(levels: tuple[tuple[str, int], ...]) -> None:
    """Set levels that `log_levels` returned in another process."""
    for name, level in levels:
        logging.getLogger(name).setLevel(level)
