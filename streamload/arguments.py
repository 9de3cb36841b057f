"""Parse and check users' arguments: sizes such as "256MB", NumPy scalars, fields, and unknown keywords."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_PREFIXES = " kmgt"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)

# Minimum similarity of a typo to a known name; most arguments of other loaders, such as `batch_sampler`, fall below it.
_ALIKE = 0.77

# Keywords and methods of other loaders, and retired ones of this loader, with their replacements.
_INSTEAD = {
    "batch_sampler": "pass sampler=, or use TarDataset with torch's DataLoader",
    "batched": "pass batch_size=",
    "dataset": "pass the shards as urls",
    "feeders": "leave it out; each rank has its own feeder. For feeders on Ray pass num_workers=RayFeeders(...)",
    "generator": "pass seed=",
    "handler": "pass on_error='skip'",
    "in_order": "leave it out; batches come in order",
    "input_dir": "pass it as urls",
    "keys": "pass them as where=; or a file with one key per line as where=Path(...)",
    "local": "pass cache_dir=",
    "map": "pass transform=",
    "max_cache_size": "pass cache_size=",
    "max_errors": "check len(loader.skipped) in the loop",
    "pin_memory": "leave it out; batches are in page-locked memory if there is CUDA, see device=",
    "predownload": "pass prefetch_batches=",
    "prefetch": "pass prefetch_batches=",
    "prefetch_factor": "pass prefetch_batches=, which counts the batches of all workers together",
    "progress": "leave it out; the log shows the progress of scans",
    "remote": "pass it as urls",
    "resampled": "leave it out; all ranks get the same number of batches. To draw with replacement pass weights=",
    "samples": "use where=, such as 'fraction < 0.1', or pass keys as where=",
    "select": "pass where=",
    "shardshuffle": "pass shuffle=",
    "shared_by": "pass equal rank= and world_size= in processes that need the same batches",
    "shuffle_seed": "pass seed=",
    "shuffle_window": "pass the window as shuffle=, such as shuffle=50_000",
    "show": "run `streamload show`",
    "strict": "leave it out; a missing end-of-archive marker is a warning, and any other damage is an error",
    "subsample": "pass where=, such as 'fraction < 0.1'",
    "timeout": "leave it out; the log says what a batch waits for, and storage requests have their own time limits",
    "to_tuple": "pass fields=",
    "with_epoch": "pass epoch_size= for epochs shorter or longer than the dataset",
}


def as_python(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, which JSON can hold; return other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def parse_bytes(name: str, value: int | str) -> int:
    """Parse a number of bytes, or a string with a unit: "512MiB", "20 GB", "1.5TB".

    K and KB, M and MB, ... are powers of 1000; KiB, MiB, ... of 1024.

    Raises:
        TypeError, ValueError: the value is not a size of at least one byte; the message has `name`.
    """
    advice = f'{name}={value!r} must be a positive number of bytes, or a string such as "512MiB" or "20GB"'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(advice)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        number = inf if match is None else float(match[1])
        if match is not None:
            number *= (1024 if match[3] else 1000) ** _PREFIXES.index((match[2] or " ").lower())
        if number == inf:
            raise ValueError(advice)
        value = int(number)
    if value < 1:
        raise ValueError(advice)
    return value


def check_int(name: str, value: object, least: int, alternative: str = "", *, most: int | None = None) -> None:
    """Raise TypeError or ValueError unless an argument is an integer from `least` to `most`.

    `alternative` ends the message.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer of at least {least} {alternative}".rstrip())
    if value < least:
        raise ValueError(f"{name}={value!r} must be at least {least} {alternative}".rstrip())
    if most is not None and value > most:
        raise ValueError(f"{name}={value!r} must be at most {most:,} {alternative}".rstrip())


def normal_name(name: str) -> str:
    """Return a field or extension in the spelling of shards: `.JPG` is `jpg`."""
    return name.strip().lower().lstrip(".")


def alternatives(entry: str) -> list[str]:
    """Split an entry of `fields=`, or a key of `decode=` or `transform=`: `"JPG; .png"` names `jpg` and `png`."""
    return list(map(normal_name, entry.split(";")))


def by_field(argument: str, functions: Mapping[str, T]) -> dict[str, T]:
    """Return each field's function; a key such as `"jpg;png"` names several fields.

    Raises:
        ValueError: two keys name the same field, or a key has an empty name; the message has the argument's name.
    """
    keys: dict[str, str] = {}
    for key in functions:
        for name in alternatives(key):
            if not name:
                raise ValueError(f"{argument} has a function for {key!r}, which contains an empty field name")
            if keys.setdefault(name, key) != key:
                raise ValueError(
                    f"{argument} has functions for {keys[name]!r} and {key!r}, both for the field {name!r}; keep one"
                )
    return {name: functions[key] for name, key in keys.items()}


def check_takes_one(name: str, function: Callable[..., Any], what: str) -> None:
    """Raise TypeError unless a function can be called with one argument (and `rng`, if it has such a parameter).

    A function without a readable signature passes. A class of callable objects is refused, since an instance is meant.
    `what` describes the function's argument.
    """
    # Metaclasses such as `type` are treated as functions.
    kinds = function.__mro__ if isinstance(function, type) and not issubclass(function, type) else ()
    if any("__call__" in vars(kind) for kind in kinds):
        raise TypeError(
            f"{name}={function!r} is a class; give an instance, as in {function.__name__}(...), which is called with "
            f"one argument, {what}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **({"rng": None} if "rng" in signature.parameters else {}))
    except TypeError as error:
        raise TypeError(
            f"{name}={function!r} is called with one argument, {what} (and with a random generator if it has a "
            f"parameter named rng): {error}"
        ) from None


def handlers_in(decoder: object) -> tuple[Callable[[str, Any], Any], ...]:
    """Return one or several WebDataset decoders (functions of extension and bytes) as a tuple; otherwise ()."""
    functions: tuple[Any, ...] = tuple(decoder) if isinstance(decoder, list | tuple) else (decoder,)
    for function in functions:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return ()
        needed = [each.name for each in parameters if each.default is each.empty and each.kind < each.VAR_POSITIONAL]
        if len(needed) != 2 or inspect.iscoroutinefunction(function):
            return ()
    return functions


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean 'jpg'?)" if a known name resembles an unknown one, else an empty string."""
    import difflib  # imported here, since each worker imports this module and few call this function

    alike = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f" (did you mean {alike[0]!r}?)" if alike else ""


def advises(constructor: Callable[P, R], *, neutral: Mapping[str, tuple[object, ...]] | None = None) -> Callable[P, R]:
    """Make a constructor reject unknown keywords with a TypeError that names the replacement, if known.

    NumPy scalars are converted to Python numbers. A keyword is dropped if `neutral` lists its value as one without
    effect.
    """
    known = inspect.signature(constructor).parameters.keys()
    owner = constructor.__qualname__.partition(".")[0]
    construct: Callable[..., R] = constructor
    without_effect = neutral or {}

    @functools.wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        keywords = dict(kwargs)
        for name in kwargs.keys() & without_effect.keys():
            if any(type(keywords[name]) is type(each) and keywords[name] == each for each in without_effect[name]):
                del keywords[name]
        unknown = [name for name in keywords if name not in known]
        if unknown:
            shown = ", ".join(f"{name!r}{_hint(name, known)}" for name in unknown)
            raise TypeError(f"{owner} got an unexpected keyword argument {shown}; help({owner}) lists the arguments")
        return construct(*map(as_python, args), **{name: as_python(value) for name, value in keywords.items()})

    return checked


def _hint(name: str, known: Iterable[str]) -> str:
    if name in _INSTEAD:
        return f" ({_INSTEAD[name]})"
    return did_you_mean(name.lower(), [other for other in known if other != "self"], _ALIKE)


def no_attribute(owner: type, name: str) -> AttributeError:
    """Return the error for a missing attribute; it names the keyword, or the replacement of another loader's method."""
    message = f"{owner.__name__!r} object has no attribute {name!r}"
    if name in inspect.signature(owner).parameters:
        return AttributeError(f"{message}; it is a keyword: {owner.__name__}(urls, {name}=...)")
    return AttributeError(f"{message}; {_INSTEAD[name]}" if name in _INSTEAD else message)
