"""Exceptions in flight to the loop: they arrive as what they were, or as what is left of them, but they arrive."""

from __future__ import annotations

import bdb
import pickle
import threading
import traceback
from typing import Any

import pytest

from streamload import errors
from streamload.decode.failure import Attempt, error_from, failure_of, in_words
from streamload.decode.tasks import Failure


class NeedsTwo(Exception):
    """Pickles, and then does not load: its `__init__` wants more than `args` holds."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


class HoldsLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class LoadsAsSomethingElse(Exception):
    def __reduce__(self) -> Any:
        return (dict, ())


def raised(error: BaseException) -> BaseException:
    """The error with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def travelled(error: BaseException) -> Exception:
    sent: Failure = pickle.loads(pickle.dumps(failure_of(raised(error))))
    return error_from(sent)


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("k"), OSError(2, "gone", "file"), UnicodeError("u")])
def test_an_ordinary_exception_arrives_as_it_was(error: Exception) -> None:
    came = travelled(error)
    assert type(came) is type(error)
    assert came.args == error.args
    assert str(came) == str(error)


@pytest.mark.parametrize(
    "error",
    [NeedsTwo("one", "two"), HoldsLock("locked"), LoadsAsSomethingElse("other")],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_that_does_not_pickle_leaves_name_and_traceback(error: Exception) -> None:
    came = travelled(error)
    assert type(came) is RuntimeError
    assert type(error).__name__ in str(came)
    assert str(error) in str(came)
    assert "in raised" in came.__notes__[0]


def test_an_exception_that_cannot_say_what_it_is_arrives() -> None:
    assert in_words(Mute()) == "Mute"
    assert in_words(ValueError("words")) == "ValueError: words"
    assert in_words(AssertionError()) == "AssertionError"
    assert "num_workers=0" in in_words(bdb.BdbQuit())
    assert type(travelled(Mute())) is Mute


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_is_no_exception_but_an_exit_arrives_as_an_error(error: BaseException) -> None:
    """Otherwise a worker's SystemExit would end the training program."""
    came = travelled(error)
    assert type(came) is RuntimeError
    assert type(error).__name__ in str(came)


def test_causes_come_along() -> None:
    deepest, middle = KeyError("deepest"), HoldsLock("middle")
    middle.__cause__ = deepest
    error = ValueError("outer")
    error.__cause__ = middle
    came = travelled(error)
    assert type(came) is ValueError
    assert type(came.__cause__) is RuntimeError
    assert type(came.__cause__.__cause__) is KeyError
    shown = "".join(traceback.format_exception(came))
    assert shown.count("KeyError: 'deepest'") == 2, f"once itself, once in its own traceback of the worker: {shown}"


def test_a_chain_of_causes_that_bites_its_tail_ends() -> None:
    """`raise error from error` is legal."""
    error = ValueError("itself")
    error.__cause__ = error
    assert str(travelled(error)) == "itself"
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    came = travelled(first)
    assert isinstance(came.__cause__, KeyError)
    assert came.__cause__.__cause__ is None


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_our_own_errors_arrive_whole_and_without_a_traceback(name: str) -> None:
    kind = getattr(errors, name)
    came = travelled(kind("what is wrong", url="/a.tar", key="k", offset=512))
    assert type(came) is kind
    assert (came.message, came.url, came.key, came.offset) == ("what is wrong", "/a.tar", "k", 512)
    assert str(came) == "what is wrong (at '/a.tar', sample 'k', offset 512)"
    assert not hasattr(came, "__notes__")


def test_a_panic_of_a_library_in_rust_is_an_error_like_others() -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with Attempt() as attempt:
        raise panic("called unwrap on None")
    assert isinstance(attempt.error, RuntimeError)
    assert "written in Rust panicked (called unwrap on None)" in str(attempt.error)
    assert type(attempt.error.__cause__) is panic
