"""Records logged in our own processes are handled in the trainer's, which has the user's loggers, levels and handlers.

A process without handlers drops everything below a warning, and writes warnings to stderr, past the user's files.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple


class Logged(NamedTuple):
    """A log record for the trainer's loggers; it may come between any two messages, and answers nothing.

    Attributes:
        fields: the record's, as far as they are numbers and text.
    """

    fields: Mapping[str, int | float | str | None]

    @classmethod
    def of(cls, record: logging.LogRecord) -> Logged:
        """What of a record can travel; its text is formatted here, and so is a traceback."""
        fields = {name: value for name, value in vars(record).items() if isinstance(value, int | float | str | None)}
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        return cls({**fields, "msg": record.getMessage(), "args": None, "exc_info": None})

    def handle(self) -> None:
        """Log it in this process, by the logger of its name, whatever the level."""
        record = logging.makeLogRecord(dict(self.fields))
        logging.getLogger(record.name).handle(record)

    def handle_if_enabled(self) -> None:
        """The same, if the logger's level lets it pass."""
        if logging.getLogger(str(self.fields["name"])).isEnabledFor(int(self.fields["levelno"] or 0)):
            self.handle()


def forward_records(take: Callable[[Logged], None]) -> None:
    """From now on, give what is logged in this process to `take`, and to no handler: the user's modules may add some.

    This lasts as long as the process: what `take` cannot send on any more is dropped.
    """
    owner, call_handlers = os.getpid(), logging.Logger.callHandlers

    def forward(logger: logging.Logger, record: logging.LogRecord) -> None:
        logged = None
        if os.getpid() == owner:  # a fork has no way of its own to the trainer
            with suppress(Exception):  # what cannot be formatted logging itself complains of
                logged = Logged.of(record)
        if logged is None:
            call_handlers(logger, record)
        else:
            take(logged)

    logging.Logger.callHandlers = forward  # type: ignore[method-assign, assignment]


def log_levels() -> tuple[tuple[str, int], ...]:
    """The levels that have been set in this process, by logger; the root's among them."""
    named = logging.root.manager.loggerDict.items()
    levels = [(name, logger.level) for name, logger in named if isinstance(logger, logging.Logger) and logger.level]
    return ("root", logging.root.level), *levels


def set_log_levels(levels: tuple[tuple[str, int], ...]) -> None:
    """Have the same loggers of this process make the same records."""
    for name, level in levels:
        logging.getLogger(name).setLevel(level)
