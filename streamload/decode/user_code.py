"""The user's functions as the worker calls them, and telling their exceptions from ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from streamload.decode.torchvision_start import torchvision_start
from streamload.images.placing import takes_out, takes_rng

__all__ = ["PROGRAM_ERRORS", "TransformRaisedError", "UserFunction", "check_takes_one", "why_not_skipped"]

PROGRAM_ERRORS = (NameError, AttributeError, TypeError, ImportError, SyntaxError, NotImplementedError, MemoryError)
"""What user code raises by a mistake in the program, not in the data; `on_error` does not apply to it."""


def why_not_skipped(error: Exception, on_error: str) -> str:
    """What to say of an error of the program where samples that fail are to be left out or replaced."""
    return (
        f"on_error={on_error!r} is for samples that fail for their data, and {type(error).__name__} is taken for a "
        "mistake in the program: raise ValueError for samples that are to be left out"
    )


def check_takes_one(name: str, function: Callable[..., Any], what: str) -> None:
    """Refuse a function that cannot be called with one argument (and `rng`, where it has such a parameter).

    Args:
        name: of the user's argument.
        function: callables that do not tell their parameters pass.
        what: the argument that it is called with.

    Raises:
        TypeError: it takes more arguments, or none; or it is a class where one of its instances is meant.
    """
    if _makes_functions(function):
        raise TypeError(
            f"{name}={function!r} is a class, and its instances are what is called with one argument, {what}; give one "
            f"of them, as in {function.__name__}(...)"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **({"rng": None} if takes_rng(function) else {}))
    except TypeError as error:
        raise TypeError(
            f"{name}={function!r} is called with one argument, {what} (and with a random generator if it has a "
            f"parameter named rng); but: {error}"
        ) from None


def _makes_functions(function: object) -> bool:
    """Whether it is a class whose instances can be called; `type` itself is a function to most people."""
    if not isinstance(function, type) or issubclass(function, type):
        return False
    return any("__call__" in vars(each) for each in function.__mro__)


class TransformRaisedError(Exception):
    """Carries what a transform raised past the code that decodes."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class _InUserCode:
    """Marks what is raised inside as the transform's own."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception):
            raise TransformRaisedError(error) from error


_IN_USER_CODE = _InUserCode()


class UserFunction:
    """A transform, and how it wants to be called.

    Attributes:
        takes_rng: it has a parameter named `rng` and gets a `numpy.random.Generator` there.
        from_encoded: its way to start from encoded bytes, where it has one.
        uses_global_generators: it may draw from `random`, `numpy.random` or torch. Assumed of every function that takes
            no `rng`, unless it says otherwise by an attribute of this name.
        takes_out: it writes its result into an array `out` that fits, by the rules of `streamload.images.placing`.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._from_encoded: Callable[..., Any] | None = getattr(function, "from_encoded", None)
        rest = getattr(
            function, "after_first", None
        )  # a chain: only its first operation decodes, others may be others'
        self._rest = None if rest is None or self._from_encoded is None else UserFunction(rest)
        self._first_from_encoded: Any = None if self._rest is None else function.operations[0].from_encoded
        self.takes_rng = takes_rng(function)
        self.uses_global_generators = bool(getattr(function, "uses_global_generators", not self.takes_rng))
        self.takes_out = takes_out(function)
        self._torchvision = torchvision_start(function)

    @property
    def starts_from_encoded(self) -> bool:
        """Whether the function decodes by itself, which saves work where it needs less than the whole image."""
        return self._from_encoded is not None

    def __call__(self, value: Any, rng: Any, out: Any = None) -> Any:
        """The function's result.

        Args:
            value: a decoded field, or a sample.
            rng: given to a function that takes one.
            out: offered to a function that takes one; the result may be this very array.

        Raises:
            TransformRaisedError: it raised, or would do nothing (see `torchvision_start`); the `cause` is what.
        """
        options = {"rng": rng} if self.takes_rng else {}
        if out is not None and self.takes_out:
            options["out"] = out
        with _IN_USER_CODE:
            if self._torchvision is not None:
                self._torchvision.check(value)
            return self._function(value, **options)

    def from_encoded(self, data: memoryview, rng: Any, out: Any = None) -> Any:
        """The function's result, from a field's encoded bytes."""
        assert self._from_encoded is not None
        if self._rest is not None:
            return self._rest(self._first_from_encoded(data, rng), rng, out)
        return self._from_encoded(data, rng, out) if self.takes_out else self._from_encoded(data, rng)
