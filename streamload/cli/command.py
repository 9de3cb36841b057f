"""How every command ends and prints: the one table of exit statuses, and the one place where errors become messages."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand

from streamload.errors import StreamloadError
from streamload.pack.failures import UsageError
from streamload.pack.output import say
from streamload.text import printable

FAILED = 1
INTERRUPTED = 130
_STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (UsageError, 2),
    (StreamloadError, FAILED),
    (ValueError, FAILED),
    (OSError, FAILED),
    (KeyboardInterrupt, INTERRUPTED),
)
EXIT_STATUS = "Exit status: 0 success; 1 failed, or damage found; 2 wrong usage; 130 ended by Ctrl-C."


class Command(TyperCommand):
    """A command whose errors end it with one message and an exit status; its help names the statuses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(p.split()) if p[:8] != "Examples" else p for p in paragraphs)
        self.epilog = EXIT_STATUS

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `commands` has left it
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with reported_errors():
            return super().invoke(ctx)


@contextmanager
def reported_errors(interrupted: str = "") -> Iterator[None]:
    """Turn errors that a user can cause into a message and an exit status; anything else is a bug and propagates.

    Args:
        interrupted: advice to print after Ctrl-C, unless the exception has its own.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # `streamload ls ... | head`: typer exits silently
    except tuple(kind for kind, _ in _STATUSES) as exc:
        status = next(status for kind, status in _STATUSES if isinstance(exc, kind))
        if isinstance(exc, OSError):
            message = f"error: {exc.filename or 'input or output'}: {exc.strerror or exc}"
        elif isinstance(exc, KeyboardInterrupt):
            message = ": ".join(filter(None, ("interrupted", str(exc) or interrupted)))
        else:
            message = f"error: {exc}"
        say("; ".join([message, *getattr(exc, "__notes__", ())]))
        raise typer.Exit(status) from exc


def print_line(line: str) -> None:
    """Print a line on standard output; characters that act on a terminal are escaped."""
    _print(printable(line))


def print_document(document: Any) -> None:
    """Print the JSON document of a command."""
    _print(json.dumps(document, indent=2))


def print_array(items: Iterable[Any]) -> None:
    """Print a JSON array, an item a line, without holding the items."""
    before = "["
    for item in items:
        _print(f"{before}\n{json.dumps(item)}", end="")
        before = ","
    _print("[]" if before == "[" else "\n]")


def print_table(rows: Sequence[Sequence[str]], numbers: int) -> None:
    """Print rows in aligned columns: names to the left, and the columns of numbers after the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if 0 < column <= numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print_line("  ".join(cells).rstrip())


def _print(text: str, end: str = "\n") -> None:
    try:
        typer.echo(text + end, nl=False)
    except OSError as exc:  # a full disk
        exc.filename = "standard output"
        raise
