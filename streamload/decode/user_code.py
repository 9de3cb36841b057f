"""Calling the user's functions, and distinguishing their exceptions from ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from streamload.decode.failure import SystemExitError
from streamload.images.operations import Compose, ToTensor, is_ours, steps_of
from streamload.images.placing import takes_out, takes_rng

PROGRAM_ERRORS = (
    *(NameError, AttributeError, TypeError, ImportError, SyntaxError, NotImplementedError, MemoryError),
    SystemExitError,
)
"""Exceptions of user code that count as mistakes in the program, not in the data; `on_error` does not apply."""

# Built-in functions of a single value. Others, such as `sum`, `list` and `bytes`, may call or iterate over their
# argument, which may draw.
_DRAW_NOTHING: tuple[object, ...] = (
    *(abs, bool, complex, float, int, len, memoryview, str, type),
    *(ascii, bin, chr, format, hash, hex, id, oct, ord, repr),
)

_TAKE_ARRAYS = {"ToImage", "ToPILImage", "ToTensor", "Lambda", "Identity"}
_CHAINS = {"Compose", "Sequential", "RandomApply", "RandomChoice", "RandomOrder"}


def why_not_skipped(error: Exception, on_error: str) -> str:
    """Explain why an error of the program is raised although failed samples are skipped or replaced."""
    return (
        f"on_error={on_error!r} is for samples whose data is bad, and {type(error).__name__} counts as a mistake in "
        "the program: raise ValueError for samples that are to be left out"
    )


class TransformRaisedError(Exception):
    """Carries what a transform raised through the code that decodes."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class UserFunction:
    """A transform, and how it is called.

    Attributes:
        name: for people.
        takes_rng: it has a parameter named `rng`, for a `numpy.random.Generator`.
        uses_global_generators: it may draw from `random`, `numpy.random` or torch: every function without `rng`, except
            built-in functions of a single value and those whose attribute of this name is false.
        takes_out: it can write its result to an array `out`, by the rules of `streamload.images.placing`.
        starts_from_encoded: it decodes by itself.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self.name = _name_of(function)
        # Only the first operation of a chain decodes, and other operations may be the user's.
        first, *rest = steps_of(function) or (function,)
        self._from_encoded: Callable[..., Any] | None = getattr(first, "from_encoded", None)
        self._rest = UserFunction(Compose(rest)) if rest and self._from_encoded is not None else None
        self.takes_rng = takes_rng(function)
        may_draw = not self.takes_rng and not any(function is each for each in _DRAW_NOTHING)
        self.uses_global_generators = bool(getattr(function, "uses_global_generators", may_draw))
        self.takes_out = takes_out(function)
        self.starts_from_encoded = self._from_encoded is not None
        self._advice = _torchvision_advice(function)

    def __call__(self, value: Any, rng: Any, out: Any = None) -> Any:
        """Return the function's result for a field or sample, which may be `out` itself.

        Raises:
            TransformRaisedError: it raised `cause`, or is a transform of torchvision that cannot take the arrays.
        """
        options = {"rng": rng} if self.takes_rng else {}
        if out is not None and self.takes_out:
            options["out"] = out
        try:
            if self._advice is not None and _has_only_arrays(value):
                raise TypeError(self._advice)
            return self._function(value, **options)
        except SystemExit as error:
            raise TransformRaisedError(SystemExitError(error)) from error
        except Exception as error:
            raise TransformRaisedError(error) from error

    def from_encoded(self, data: memoryview, rng: Any, out: Any = None) -> Any:
        """Return the function's result, from a field's encoded bytes."""
        assert self._from_encoded is not None
        if self._rest is not None:
            return self._rest(self._from_encoded(data, rng), rng, out)
        return self._from_encoded(data, rng, out) if self.takes_out else self._from_encoded(data, rng)


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _torchvision_advice(function: object) -> str | None:
    """Return advice if the first transform to get a field or sample is one of torchvision's `v2` that wants tensors.

    They silently ignore everything but tensors and PIL images, so a model would be trained without them.
    """
    module, name = type(function).__module__, type(function).__name__
    if is_ours(function):  # ours return arrays for arrays, except ToTensor
        steps = getattr(function, "operations", ())
        first = next((step for step in steps if not is_ours(step) or type(step) is ToTensor), None)
        return None if first is None else _torchvision_advice(first)
    if name in _CHAINS and module.startswith(("torchvision.transforms.", "torch.nn.modules.container")):
        steps = getattr(function, "transforms", function)
        return _torchvision_advice(next(iter(steps), None) if isinstance(steps, Iterable) else steps)
    if name in _TAKE_ARRAYS or not module.startswith("torchvision.transforms.v2"):
        return None
    return (
        f"torchvision's v2.{name} ignores NumPy arrays, which images are decoded to, and would do nothing; begin with "
        "v2.ToImage(), as in v2.Compose([v2.ToImage(), ...])"
    )


def _has_only_arrays(value: Any) -> bool:
    """Return True if a field or a sample holds arrays, and neither a tensor nor a PIL image; imports no package."""
    items = value.values() if isinstance(value, Mapping) else value
    parts = list(items) if isinstance(value, Mapping | tuple | list) else [value]
    packages = {type(part).__module__.partition(".")[0] for part in parts}
    return any(isinstance(part, np.ndarray) for part in parts) and packages.isdisjoint(("torch", "torchvision", "PIL"))
