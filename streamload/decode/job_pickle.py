"""Pickle a job, so that a worker's functions see the program's values.

The user's own functions and classes are pickled by value: their code, and the values that they refer to. A worker
imports their modules, as for a pickle by reference, and sets these values there. So `cfg.SIZE = 48` in the program
also holds in the workers, no class exists twice there, and instances that come back are of the program's class. Values
that do not pickle, or are large, come from the worker's own import.

Pickling itself finds the values to send. `_JobPickler.reducer_override` records the names that a function uses, and
sends a module's attributes whose names are recorded. Such an attribute may be a function that uses further names, so
`pickle_job` pickles again until a round records nothing new. The first rule that applies to a value decides:

1. A global random generator, lock, `threading.local`, or object that stays in the program: send a substitute.
2. A module of the user's: import it, then set the recorded attributes.
3. Anything but a function or class importable by name from a module of the user's: cloudpickle's rule.
4. A function or class that does not pickle, or a class whose metaclass is neither `type` nor ABCMeta: by reference.
5. A function made by another module's decorator: cloudpickle's rule.
6. Any other: import its module, then set the values that it refers to.

Rules 2 and 6 leave out values that do not pickle; another pickler tests each value once (`_pickles`).
"""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import threading
from abc import ABCMeta
from collections.abc import Mapping
from importlib import import_module
from itertools import accumulate
from pkgutil import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn, TypeGuard

import cloudpickle

from streamload.decode.failure import Attempt
from streamload.decode.rows import names_of_generators
from streamload.decode.tasks import Job
from streamload.memory.channel import refused_exit

_log = logging.getLogger("streamload")
# A module's value whose pickle is larger is not sent, since each worker would get a copy.
_MAX_VALUE_BYTES = 16 << 20

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_OURS = {"streamload"}
# Loaded modules that are not the user's; the start of an epoch does not inspect them again.
_OTHERS: set[str] = set()
_NEW_IN_WORKERS: dict[type, Any] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
    threading.local: threading.local,
}
_PLAIN = (str, bytes, int, float, bool, type(None))
_REGISTERING = threading.RLock()


def pickle_job(job: Any) -> bytes:
    """Pickle a job for `load_job`, or a function to test that it pickles. Raises what pickling a function raises."""
    with _REGISTERING:
        registered = cloudpickle.list_registry_pickle_by_value()  # modules that the user pickles by value as a whole
        loaded = users_modules()
        own = {name for name in loaded if not any(f"{name}.".startswith(f"{each}.") for each in registered)}
        for name in own:
            cloudpickle.register_pickle_by_value(loaded[name])
        try:
            uses = _Uses(own)
            while True:
                known = len(uses.names), len(uses.modules)
                _JobPickler(file := io.BytesIO(), uses).dump((job, [loaded[name] for name in sorted(uses.modules)]))
                # A module's attributes are sent if a function uses their names, and each may add further functions.
                if not uses.modules or (len(uses.names), len(uses.modules)) == known:
                    return file.getvalue()
        finally:
            for name in own:
                cloudpickle.unregister_pickle_by_value(loaded[name])


def load_job(data: bytes) -> Job:
    """Load a job, and set in this process's modules the values that its functions refer to.

    Raises:
        WorkerError: loading the job, or importing its modules, calls `sys.exit`.
    """
    try:
        job, _ = cloudpickle.loads(data)
    except SystemExit as error:
        raise refused_exit(error) from error
    assert isinstance(job, Job)
    return job


def users_modules() -> dict[str, ModuleType]:
    """Return the user's loaded modules by name: all but streamload's, installed ones, Python's and `__main__`."""
    names = sys.modules.keys() - _OTHERS
    loaded = [(name, sys.modules.get(name)) for name in names]
    users = {name: module for name, module in loaded if _is_users(module, name)}
    _OTHERS.update(names - users.keys())
    return users


def _is_users(module: object, name: str) -> TypeGuard[ModuleType]:
    if not isinstance(module, ModuleType) or name.partition(".")[0] in _OURS or name == "__main__":
        return False
    file = vars(module).get("__file__")  # `getattr` would load lazy modules
    if module.__name__ != name or not isinstance(file, str):
        return False
    path = os.path.abspath(file)
    return not path.startswith(_LIBRARY) and _INSTALLED.isdisjoint(path.split(os.sep))


class LeftInTrainer:
    """A worker's substitute for an object that stays in the program, such as a loader; any use raises an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"a {self._name} cannot be used in a worker: it stays in the program. An object whose method runs in a "
            "worker may hold one, but must not use it there"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __iter__ = __next__ = __len__ = __call__ = __getitem__ = _refuse


class _Uses:
    """The names and modules that a job's functions use, shared by all picklers of the job.

    Attributes:
        own: the names of the user's modules.
        names: the globals and attributes that the user's functions use, and the strings in their code.
        modules: the names of the user's modules that functions refer to or import.
        tried: the values tested, by their `id`, each with True if it pickles.
    """

    def __init__(self, own: set[str]) -> None:
        self.own = own
        self.names: set[str] = set()
        self.modules: set[str] = set()
        self.tried: dict[int, tuple[Any, bool]] = {}
        self.global_generators = names_of_generators()


class _JobPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickle the user's functions and classes by value, for a process that imports their modules.

    `tries`: the value that this pickler only tests; nested values that passed a test are left out.
    """

    def __init__(self, file: Any, uses: _Uses, tries: Any = None) -> None:
        super().__init__(file)
        self._uses = uses
        self._tries = tries

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value, as cloudpickle requires."""
        uses = self._uses
        if (substitute := self._substitute(value)) is not None:
            return substitute
        if isinstance(value, ModuleType) and value.__name__ in uses.own:
            uses.modules.add(value.__name__)
            used = {name: each for name, each in vars(value).items() if name in uses.names and name[:2] != "__"}
            return import_module, (value.__name__,), self._picklable(used), None, None, _set_values
        reduced = super().reducer_override(value)
        is_by_value = isinstance(reduced, tuple) and isinstance(value, FunctionType | type)
        if not is_by_value:
            return reduced
        if isinstance(value, FunctionType):
            names = _names_in(value.__code__)
            uses.names |= names
            packages = accumulate((value.__globals__.get("__package__") or "").split("."), "{}.{}".format)
            for prefix in ("", *(f"{package}." for package in packages)):
                uses.modules |= {f"{prefix}{name}".removesuffix(".") for name in names} & uses.own
        if value.__module__ not in uses.own or not _is_importable(value):
            return reduced
        has_own_rules = isinstance(value, type) and type(value) not in (type, ABCMeta)  # enums, ctypes structures
        if has_own_rules or not self._pickles(value):
            return NotImplemented  # pickle by reference
        _, arguments, (attributes, slots), *rest = reduced
        if isinstance(value, type):
            state = (self._picklable(attributes), slots)
            return _class_named, (f"{value.__module__}:{value.__qualname__}", value.__bases__), state, *rest
        if value.__globals__ is not vars(sys.modules[value.__module__]):  # created by a decorator in another module
            return reduced
        slots["__globals__"] = self._picklable(slots["__globals__"])
        return _function_in, (value.__code__, value.__module__, arguments[-1]), (attributes, slots), *rest

    def _substitute(self, value: Any) -> tuple[Any, ...] | None:
        uses = self._uses
        if self._tries is not None and value is not self._tries and uses.tried.get(id(value), (None, False))[1]:
            return str, ()
        if (generator := uses.global_generators.get(id(value))) is not None:
            return resolve_name, (generator,)
        if (new := _NEW_IN_WORKERS.get(type(value))) is not None:
            return new, ()
        return (LeftInTrainer, (type(value).__name__,)) if getattr(type(value), "_stays_in_trainer", False) else None

    def _picklable(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: each for name, each in values.items() if type(each) in _PLAIN or self._pickles(each)}

    def _pickles(self, value: Any) -> bool:
        tried = self._uses.tried
        if id(value) not in tried:
            tried[id(value)] = value, True  # in case it refers to itself
            with Attempt() as attempt:
                _JobPickler(_Bounded(), self._uses, tries=value).dump(value)
            if attempt.error is not None:
                tried[id(value)] = value, False
                _log.debug("%r is not sent to the workers, which import their own: %s", value, attempt.error)
        return tried[id(value)][1]


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MAX_VALUE_BYTES:
            raise ValueError(f"its pickle takes more than {_MAX_VALUE_BYTES >> 20} MiB")
        return super().write(data)


def _is_importable(value: FunctionType | type) -> bool:
    imported: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        imported = getattr(imported, name, None)
    return imported is value


@functools.lru_cache(4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return names of globals, attributes and imported modules in code, and its strings, which `getattr` may take."""
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(names.union(*inner))


def _set_values(module: ModuleType, values: Mapping[str, Any]) -> None:
    vars(module).update(values)


def _class_named(name: str, _bases: tuple[type, ...]) -> type:
    resolved = resolve_name(name)
    assert isinstance(resolved, type)
    return resolved


def _function_in(code: CodeType, module: str, closure: Any) -> FunctionType:
    return FunctionType(code, vars(import_module(module)), None, None, closure)
