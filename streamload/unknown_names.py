"""What to say of keywords and attributes that there are not: the nearest of those that there are."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from streamload.numpy_scalars import as_python

__all__ = ["advises", "no_attribute"]

P = ParamSpec("P")
R = TypeVar("R")

_PAGE = "docs/coming-from.md says what takes the place of other loaders' arguments and methods"


def advises(constructor: Callable[P, R]) -> Callable[P, R]:
    """Make a constructor answer a keyword that it does not have by the nearest one; its signature stays what it is.

    NumPy scalars reach the constructor as Python numbers.

    Returns:
        The constructor; for keywords that it does not have it raises TypeError.
    """
    known = inspect.signature(constructor).parameters.keys()
    owner = constructor.__qualname__.partition(".")[0]
    construct: Callable[..., R] = constructor

    @functools.wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            named = ", ".join(f"{name!r}{_nearest(name, known)}" for name in unknown)
            raise TypeError(f"{owner} got an unexpected keyword argument {named}; {_PAGE}")
        return construct(*map(as_python, args), **{name: as_python(value) for name, value in kwargs.items()})

    return checked


def no_attribute(owner: type, name: str) -> AttributeError:
    """The error for an attribute that an object does not have, such as a method of another loader.

    Args:
        owner: the object's class, whose constructor has keywords.
        name: the attribute's.
    """
    message = f"{owner.__name__!r} object has no attribute {name!r}"
    if name in inspect.signature(owner).parameters:
        return AttributeError(f"{message}; it is a keyword: {owner.__name__}(urls, {name}=...)")
    return AttributeError(message if name.startswith("_") else f"{message}; {_PAGE}")


def _nearest(name: str, known: Iterable[str]) -> str:
    alike = difflib.get_close_matches(name.lower(), [other for other in known if other != "self"], 1)
    return f" (did you mean {alike[0]!r}?)" if alike else ""
