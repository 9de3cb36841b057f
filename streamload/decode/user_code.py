"""Calling the user's functions, and distinguishing their exceptions from ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from streamload.decode.failure import SystemExitError
from streamload.images.floats import ToTensor
from streamload.images.placing import takes_out, takes_rng

PROGRAM_ERRORS = (
    *(NameError, AttributeError, TypeError, ImportError, SyntaxError, NotImplementedError, MemoryError),
    SystemExitError,
)
"""Exceptions of user code that count as mistakes in the program, not in the data; `on_error` does not apply."""

# Built-in functions of a single value. Others, such as `sum`, `list` and `bytes`, take the next item from what they
# are given, which may be drawn only then, or call it.
_DRAW_NOTHING: tuple[object, ...] = (
    *(abs, bool, complex, float, int, len, memoryview, str, type),
    *(ascii, bin, chr, format, hash, hex, id, oct, ord, repr),
)

_TAKE_ARRAYS = {"ToImage", "ToPILImage", "ToTensor", "Lambda", "Identity"}
_CHAINS = {"Compose", "Sequential", "RandomApply"}
_CHOICES = {"RandomChoice", "RandomOrder"}


def why_not_skipped(error: Exception, on_error: str) -> str:
    """For a message: why an error of the program is raised although failed samples are skipped or replaced."""
    return (
        f"on_error={on_error!r} is for samples whose data is bad, and {type(error).__name__} counts as a mistake in "
        "the program: raise ValueError for samples that are to be left out"
    )


def check_takes_one(name: str, function: Callable[..., Any], what: str) -> None:
    """Refuse a function that cannot be called with one argument (and `rng`, where it has such a parameter).

    Args:
        name: of the user's argument.
        function: to check; one without a readable signature passes.
        what: the argument that it is called with.

    Raises:
        TypeError: it takes more arguments, or none; or it is a class where an instance is meant.
    """
    if _makes_functions(function):
        raise TypeError(
            f"{name}={function!r} is a class, but its instances are what can be called with one argument, {what}; give "
            f"one, as in {function.__name__}(...)"
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
    """Whether it is a class with callable instances; `type` and other metaclasses count as functions."""
    if not isinstance(function, type) or issubclass(function, type):
        return False
    return any("__call__" in vars(each) for each in function.__mro__)


class TransformRaisedError(Exception):
    """Carries what a transform raised through the code that decodes."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class _InUserCode:
    """Marks exceptions raised inside as the transform's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            error = SystemExitError(error)
        if isinstance(error, Exception):
            raise TransformRaisedError(error) from error


_IN_USER_CODE = _InUserCode()


class UserFunction:
    """A transform, and how it is called.

    Attributes:
        name: for people.
        takes_rng: it has a parameter named `rng`, for a `numpy.random.Generator`.
        uses_global_generators: it may draw from `random`, `numpy.random` or torch. Assumed of every function without
            `rng` but built-in ones of a value, unless its own attribute of this name is false.
        takes_out: it can write its result to an array `out`, by the rules of `streamload.images.placing`.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self.name = _name_of(function)
        self._from_encoded: Callable[..., Any] | None = getattr(function, "from_encoded", None)
        # The rest of a chain: only its first operation decodes, and other operations may be the user's.
        rest = getattr(function, "after_first", None)
        self._rest = None if rest is None or self._from_encoded is None else UserFunction(rest)
        self._first_from_encoded: Any = None if self._rest is None else function.operations[0].from_encoded
        self.takes_rng = takes_rng(function)
        may_draw = not self.takes_rng and not any(function is each for each in _DRAW_NOTHING)
        self.uses_global_generators = bool(getattr(function, "uses_global_generators", may_draw))
        self.takes_out = takes_out(function)
        self._torchvision = _torchvision_start(function)

    @property
    def starts_from_encoded(self) -> bool:
        """Whether the function decodes by itself, which is faster where it needs only a part of the image."""
        return self._from_encoded is not None

    def __call__(self, value: Any, rng: Any, out: Any = None) -> Any:
        """The function's result.

        Args:
            value: a decoded field, or a sample.
            rng: for a function that takes one.
            out: for a function that takes one; the result may be this very array.

        Raises:
            TransformRaisedError: it raised `cause`, or would do nothing (see `_TorchvisionStart`).
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


class _TorchvisionStart:
    """A transform of torchvision that gets a field or sample first, and does nothing useful with NumPy arrays.

    Those of `v2` silently ignore everything but tensors and PIL images, so a model would be trained without them.
    """

    def __init__(self, transform: object) -> None:
        kind = type(transform)
        self._is_v2 = ".v2" in kind.__module__
        self._name = kind.__name__

    def check(self, value: Any) -> None:
        """Raise a TypeError if a decoded field or a whole sample holds arrays and nothing that it works on."""
        parts = _parts_of(value)
        if any(isinstance(part, np.ndarray) for part in parts) and not any(map(_is_image, parts)):
            raise TypeError(self._advice())

    def _advice(self) -> str:
        if self._is_v2:
            return (
                f"torchvision's v2.{self._name} ignores NumPy arrays, which images are decoded to, and would do "
                "nothing; begin with v2.ToImage(), as in v2.Compose([v2.ToImage(), ...])"
            )
        return (
            f"torchvision's {self._name} does not take NumPy arrays, which images are decoded to; begin with "
            "ToPILImage(), as in Compose([ToPILImage(), ...])"
        )


def _name_of(function: Any) -> str:
    """What people call a function or a callable object."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _torchvision_start(function: object) -> _TorchvisionStart | None:
    """The first transform to get arrays, if it is torchvision's and cannot take them; else None."""
    module, name = type(function).__module__, type(function).__name__
    if module.startswith("streamload.images."):  # ours return arrays for arrays, except ToTensor
        first = next((step for step in _own_steps(function) if not _is_ours(step) or type(step) is ToTensor), None)
        return None if first is None else _torchvision_start(first)
    if not module.startswith(("torchvision.transforms.", "torch.nn.modules.container")):
        return None
    if name in _CHAINS | _CHOICES:
        steps = list(_steps_of(function))
        found = map(_torchvision_start, steps if name in _CHOICES else steps[:1])
        return next((each for each in found if each is not None), None)
    if name in _TAKE_ARRAYS or not module.startswith("torchvision."):
        return None
    return _TorchvisionStart(function)


def _own_steps(chain: Any) -> Iterator[object]:
    """The operations of one of our chains, and of chains in it."""
    for step in getattr(chain, "operations", ()):
        if hasattr(step, "operations") and _is_ours(step):
            yield from _own_steps(step)
        else:
            yield step


def _is_ours(operation: object) -> bool:
    return type(operation).__module__.startswith("streamload.images.")


def _steps_of(chain: Any) -> Iterable[object]:
    steps = getattr(chain, "transforms", chain)
    return steps if isinstance(steps, Iterable) else (steps,)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else [value]


def _is_image(part: object) -> bool:
    """Whether it is a tensor or a PIL image; imports neither package."""
    return type(part).__module__.partition(".")[0] in ("torch", "torchvision", "PIL")
