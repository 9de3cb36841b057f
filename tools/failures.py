"""How a command ends: one line on standard error and an exit status, never a traceback for what a user can meet.

0 is success, 1 a failure or damage found, 2 a command line that makes no sense, 130 an interruption by Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from streamload_tools.output import say

from streamload.errors import StreamloadError

__all__ = ["UsageError", "reported_errors"]


class UsageError(Exception):
    """The command line asks for something that cannot be; the message says what would be right."""


@contextmanager
def reported_errors(interrupted: str = "") -> Iterator[None]:
    """Turn what a user can cause into a message and an exit status; anything else is a bug and stays as it is.

    Args:
        interrupted: what Ctrl-C leaves, unless the exception tells.
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
        raise  # whoever read standard output has gone, as in `streamload ls ... | head`; typer then ends without a word
    except OSError as exc:
        say(f"error: {exc.filename or 'input or output'}: {exc.strerror or exc}{_advice(exc)}")
        raise typer.Exit(1) from exc


def _advice(exc: BaseException) -> str:
    """What those who saw the error pass had to add, behind the message."""
    return "".join(f"; {note}" for note in getattr(exc, "__notes__", ()))
