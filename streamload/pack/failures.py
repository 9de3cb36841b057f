"""How a command ends: one line on standard error and an exit status; a traceback is always a bug.

0 is success, 1 a failure or damage found, 2 a usage error, 130 an interruption by Ctrl-C: `EXIT_STATUS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from streamload.errors import StreamloadError
from streamload.pack.output import say

EXIT_STATUS = "Exit status: 0 success; 1 failed, or damage found; 2 wrong usage; 130 ended by Ctrl-C."


class UsageError(Exception):
    """The arguments are wrong; the message says what to do."""


@contextmanager
def reported_errors(interrupted: str = "") -> Iterator[None]:
    """Report errors that a user can cause as a message and an exit status; anything else is a bug and propagates.

    Args:
        interrupted: what the message of Ctrl-C says, unless the exception has one.
    """
    try:
        yield
    except UsageError as exc:
        say(f"error: {exc}")
        raise typer.Exit(2) from exc
    except (StreamloadError, ValueError) as exc:
        say(f"error: {exc}{_advice(exc)}")
        raise typer.Exit(1) from exc
    except KeyboardInterrupt as exc:
        left = str(exc) or interrupted
        say(f"interrupted{': ' if left else ''}{left}{_advice(exc)}")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise  # the reader of standard output has exited, as in `streamload ls ... | head`; typer exits silently
    except OSError as exc:
        say(f"error: {exc.filename or 'input or output'}: {exc.strerror or exc}{_advice(exc)}")
        raise typer.Exit(1) from exc


def _advice(exc: BaseException) -> str:
    """The notes of an error, to follow its message."""
    return "".join(f"; {note}" for note in getattr(exc, "__notes__", ()))
