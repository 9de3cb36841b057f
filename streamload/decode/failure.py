"""Catch exceptions, send them from a worker to the training loop, and describe missing fields."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Collection, Sequence
from types import TracebackType

import cloudpickle

from streamload.arguments import did_you_mean
from streamload.decode.tasks import Failure, Original, RowFailure
from streamload.errors import CollateError, DecodeError, SampleError, ShardChangedError, StreamloadError, TransformError
from streamload.tar.scan import ShardTable
from streamload.text import listed

_ERRORS_OF_ROWS: dict[str, type[SampleError | ShardChangedError]] = {
    kind.__name__: kind for kind in (SampleError, DecodeError, TransformError, CollateError, ShardChangedError)
}
_PANICS = "pyo3_runtime"


class SystemExitError(Exception):
    """Replaces `raised`, a `sys.exit()` in user code, which in a worker would end only that process."""

    def __init__(self, raised: SystemExit) -> None:
        super().__init__(raised)
        self.raised = raised
        self.__traceback__ = raised.__traceback__

    def __str__(self) -> str:
        return f"sys.exit({self.raised.code!r}) cannot end the program from here; raise an ordinary exception"


class Attempt:
    """Catch an exception in a `with` block and keep it in `error`.

    A Rust library's panic and a coroutine's cancellation are caught; other BaseExceptions, such as exits and
    interrupts, propagate.

    Args:
        exits: catch `sys.exit()` too, as a `SystemExitError`.
    """

    __slots__ = ("_exits", "error")

    def __init__(self, *, exits: bool = False) -> None:
        self.error: Exception | None = None
        self._exits = exits

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.error = error
        elif self._exits and isinstance(error, SystemExit):
            self.error = SystemExitError(error)
        elif error is not None and type(error).__module__ == _PANICS:
            self.error = RuntimeError(f"a library written in Rust panicked ({error}); report this to its authors")
            self.error.__cause__ = error
        elif kind is not None and kind.__name__ == "CancelledError":
            self.error = RuntimeError("a coroutine was cancelled")
        return self.error is not None


def in_words(error: BaseException) -> str:
    """Return an exception's class and message; only the class if the message is empty or `__str__` raises."""
    kind = type(error).__name__
    if kind == "BdbQuit":
        return f"{kind} (the debugger ended; breakpoints need num_workers=0)"
    with Attempt():
        return f"{kind}: {error}".removesuffix(": ")
    return kind


def first_line(error: BaseException) -> str:
    """Describe an exception in one line; for Ray's errors, which add tracebacks, describe their `cause`."""
    cause = getattr(error, "cause", None)
    return in_words(cause if isinstance(cause, BaseException) else error).strip().partition("\n")[0]


def failure_of(error: BaseException, _seen: frozenset[int] = frozenset()) -> Failure:
    """Convert an exception and its causes to a form that another process can load."""
    seen = _seen | {id(error)}
    raised_from = error.__cause__
    frames = error.__traceback__
    # Leave out streamload's frames, which precede the user's function.
    while frames and frames.tb_next and frames.tb_frame.f_globals.get("__name__", "").startswith("streamload."):
        frames = frames.tb_next
    # The cause is sent separately, and would appear twice if it were also in this text.
    text = "".join(traceback.format_exception(type(error), error, frames, chain=raised_from is None))
    summary = "".join(traceback.format_exception_only(error)).strip()
    pickled: bytes | None = None
    with Attempt() as attempt:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # exceptions with an __init__ of their own often pickle but do not load
    # `raise error from error` is legal and makes an endless chain.
    cause = None if raised_from is None or id(raised_from) in seen else failure_of(raised_from, seen)
    return Failure(pickled if attempt.error is None else None, summary, text, cause)


def answer_failure(error: BaseException) -> Failure:
    """Convert an exception of a `Call`: a ValueError means a wrong argument and needs no traceback."""
    failure = failure_of(error)
    return failure._replace(traceback="") if type(error) is ValueError else failure


def failure_here(error: Exception) -> Failure:
    """Wrap an exception that stays in this process, so that a debugger finds its frames."""
    return Failure(None, in_words(error), "", original=Original(error))


def error_from(failure: Failure) -> Exception:
    """Rebuild an exception; a RuntimeError if it does not pickle or load.

    The worker's traceback, if any, becomes a note, except on streamload's own errors, whose messages are complete.
    """
    if failure.original is not None and failure.original.error is not None:
        return failure.original.error
    error: BaseException = RuntimeError(failure.summary)
    if failure.error is not None:
        with Attempt():
            error = pickle.loads(failure.error)
    if not isinstance(error, Exception):
        error = RuntimeError(failure.summary)
    if failure.traceback and not isinstance(error, StreamloadError):
        error.add_note(f"Traceback in the worker:\n{failure.traceback.rstrip()}")
    if failure.cause is not None:
        error.__cause__ = error_from(failure.cause)
    return error


def sample_error(failure: RowFailure, url: str, key: str) -> SampleError | ShardChangedError:
    """Return the typed error for a failed row, with the original exception, if any, as its cause."""
    kind = _ERRORS_OF_ROWS[failure.kind]
    offset = failure.offset if failure.offset >= 0 else None
    error = kind(failure.message, url=url, key=key, offset=offset)
    if failure.cause is not None:
        cause = error_from(failure.cause)
        at = "" if offset is None else f", offset {offset}"
        cause.add_note(f"It was raised for shard {error.url!r}, sample {key!r}{at}.")
        error.__cause__ = cause
    return error


def with_fields(failure: RowFailure, table: ShardTable, in_sidecars: Collection[str] = ()) -> RowFailure:
    """Add the sample's existing fields to the message of a missing field.

    Args:
        failure: any failure; it is returned unchanged unless a field is missing.
        table: the table of the sample's shard.
        in_sidecars: the fields of sidecars.
    """
    if not failure.missing_field or failure.field is None:
        return failure
    existing = table.sample_fields(failure.sample)
    if any(name in in_sidecars for name in failure.field.split(";")):
        advice = f'write the sidecar again, or allow samples without the field by "{failure.field}?" in fields'
        message = f"{failure.message}; it has {listed(existing)}; its sidecar lacks the field for this key: {advice}"
        return failure._replace(message=message)
    description = describe_existing(failure.field, existing)
    if not description.startswith(f"{listed(existing)}."):
        description += (
            f'; write "{failure.field};OTHER" in fields to read another field if it is missing, or '
            f'"{failure.field}?" to include samples without it'
        )
    return failure._replace(message=f"{failure.message}; it has {description}")


def describe_existing(wanted: str, existing: Sequence[str]) -> str:
    """Describe a sample's existing fields, with advice if one ends with or resembles the wanted name.

    Alternatives in `wanted` are separated by semicolons.
    """
    if not existing:
        return "none"
    ends = tuple(f".{name}" for name in wanted.split(";"))
    longer = next((name for name in existing if name.endswith(ends)), None)
    if longer is None:
        return listed(existing) + did_you_mean(wanted, existing)
    return (
        f"{listed(existing)}. Names are split at the first dot, so the file 'x.{longer}' is the field {longer!r} of "
        f"the sample 'x'; request {longer!r}, rename the files, or read all fields with "
        "fields=None and choose in a transform"
    )
