"""Module state: values that the program has set in the user's modules, sent along to the workers.

Functions and classes of importable modules are pickled by reference, so a worker imports their modules afresh and would
not see what the program has set since (`cfg.SIZE = 48`). So the values of all modules that a job can reach are sent
with it. A worker compares them with those of its own import and sets only what differs: objects with an identity
(sentinels, registries, locks) stay the worker's own unless the program has changed them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import EnumMeta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from random import Random
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from streamload.decode.failure import Attempt

__all__ = ["ModuleState", "StatePickler", "set_state", "state_of"]

MAX_VALUE_BYTES = 16 << 20
"""Of a pickle. Larger values are not sent, since each worker would get a copy, needed or not."""

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_OURS = {"streamload", "streamload_tools"}
_MISSING = object()
_FUNCTIONS = (FunctionType, staticmethod, classmethod)
_MOST_PARTS = 1000
_VALUE = "value"
"""The name of a ContextVar's value, which has none."""


@dataclass(frozen=True)
class Left:
    """A value that cannot be sent.

    Attributes:
        kind: its type, so that a worker can see whether its own value is of the same type.
        why: the reason.
    """

    kind: str
    why: str


@dataclass(frozen=True)
class Attribute:
    """A named value in a module, in a class defined there, or inside a value there that does not pickle.

    Attributes:
        module: the module's name.
        owner: the dotted path in the module to the class or value; "" for the module itself.
        name: of the attribute, or a dict's key, or a list's index.
        value: its number among the values; the same object has the same number.
    """

    module: str
    owner: str
    name: str
    value: int

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.name)))


@dataclass(frozen=True)
class ModuleState:
    """The state of some modules.

    Attributes:
        attributes: sorted by module.
        values: their pickles, or why there are none.
    """

    attributes: tuple[Attribute, ...]
    values: tuple[bytes | Left, ...]


class StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that notes which of the user's modules it refers to.

    Args:
        file: takes the bytes.

    Attributes:
        needed: the modules that are imported when the bytes are loaded, by name.
        reached: the modules that may be used later, by name.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.needed: set[str] = set()
        self.reached: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        """Note the module of a value, then pickle it as cloudpickle does."""
        if isinstance(value, ModuleType):
            _note(value.__name__, self.needed)
        elif isinstance(value, FunctionType | type):
            _note(value.__module__, self.needed if _is_importable(value) else self.reached)
            if isinstance(value, FunctionType):
                _note_imports(value, value.__code__, self.reached)
        return super().reducer_override(value)


class _ValuePickler(StatePickler):
    """Refuses values that would mean something else where they are loaded."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, io.IOBase):
            raise TypeError("it is an open file")
        if isinstance(value, Random | np.random.Generator | np.random.RandomState):
            raise TypeError("a generator's state would be the same in all workers")
        if isinstance(value, type) and _is_users(value.__module__) and not _is_importable(value):
            raise TypeError("its class is defined within a function")
        if (torch := sys.modules.get("torch")) is not None:
            if isinstance(value, torch.Generator):
                raise TypeError("a generator's state would be the same in all workers")
            if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.nbytes > MAX_VALUE_BYTES):
                raise TypeError("it is on a device, or large")
        return super().reducer_override(value)


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_VALUE_BYTES:
            raise ValueError(f"it takes more than {MAX_VALUE_BYTES >> 20} MiB")
        return super().write(data)


def state_of(modules: set[str]) -> tuple[ModuleState, bytes]:
    """The state of the user's modules, and of those that they can reach.

    Args:
        modules: their names.

    Returns:
        The state; and a digest of the code of their functions, which changes when a module is reloaded.
    """
    reached, waiting = set(modules), sorted(modules)
    attributes: list[Attribute] = []
    values: list[bytes | Left] = []
    numbers: dict[int, int] = {}
    code = hashlib.blake2b()
    while waiting:
        name, further = waiting.pop(), set[str]()
        module = sys.modules.get(name)
        held = deque(() if module is None else _attributes(module))
        while held:
            owner, attribute, value = held.popleft()
            if isinstance(value, ModuleType):
                _note(value.__name__, further)
            elif (function := _own_function(value, owner, attribute, name)) is not None:
                _note_imports(function, function.__code__, further)
                code.update(f"{owner}.{attribute}={hash(function.__code__)};".encode())
            else:
                if id(value) not in numbers:
                    numbers[id(value)] = len(values)
                    values.append(_described(value, further))
                    if isinstance(values[-1], Left):
                        place = f"{owner}.{attribute}" if owner else attribute
                        held += ((place, inner, each) for inner, each in _parts(value))
                attributes.append(Attribute(name, owner, attribute, numbers[id(value)]))
        waiting += sorted(further - reached)
        reached |= further
    return ModuleState(tuple(attributes), tuple(values)), code.digest()


def set_state(state: ModuleState, roots: Sequence[str]) -> list[str]:
    """Set the values of the user's modules in this process to those of another process, where they differ.

    Modules that are imported later are set after their import.

    Args:
        state: from `state_of` in the other process.
        roots: modules to import now, since the user's functions need them.

    Returns:
        As text, what differs and could not be set.
    """
    for name in roots:
        with Attempt():  # loading the functions raises it again
            importlib.import_module(name)
    setter = _Setter(state)
    names = dict.fromkeys(attribute.module for attribute in state.attributes)
    late = {name for name in names if name not in sys.modules}
    if late:
        sys.meta_path.insert(0, _LateModules(late, setter.set_module))
    for name in names:
        if name not in late:
            setter.set_module(name)
    return setter.lost


class _Setter:
    """Sets what differs; one object in the other process is one object here."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._loaded: dict[int, Any] = {}
        self.lost: list[str] = []

    def set_module(self, name: str) -> None:
        """Set the attributes of a module that has been imported."""
        for attribute in self._state.attributes:
            if attribute.module == name:
                with Attempt():  # a class that is missing here, or an attribute that cannot be set, stays as imported
                    self._set(attribute)

    def _set(self, attribute: Attribute) -> None:
        holder: Any = sys.modules[attribute.module]
        for name in filter(None, attribute.owner.split(".")):
            holder = _part(holder, name)
        here = _part(holder, attribute.name)
        there = self._state.values[attribute.value]
        mine = _described(here, set())
        if isinstance(there, Left):
            # Not reported where it is missing or None here: code that uses it fails or creates it, like a connection.
            is_unlike = isinstance(mine, bytes) or mine.kind != there.kind
            is_nothing = here is None or (here is _MISSING and not isinstance(holder, dict | list | ContextVar))
            if is_unlike and not is_nothing:
                self.lost.append(f"{attribute} ({there.kind}: {there.why})")
        elif here is _MISSING or mine != there:
            if attribute.value not in self._loaded:
                self._loaded[attribute.value] = cloudpickle.loads(there)
            _set_part(holder, attribute.name, self._loaded[attribute.value])


class _LateModules(MetaPathFinder):
    """Calls back after the import of some modules.

    Args:
        names: of the modules.
        on_import: called with the name.
    """

    def __init__(self, names: set[str], on_import: Callable[[str], None]) -> None:
        self._names = names
        self._on_import = on_import

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that calls back; None for all other modules."""
        if fullname not in self._names:
            return None
        self._names.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_call_back(module: ModuleType) -> None:
                execute(module)
                self._on_import(fullname)

            spec.loader.exec_module = then_call_back  # type: ignore[method-assign]
        return spec


def _attributes(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """The attributes of a module (after "") and of the classes defined in it (after the class's name)."""
    holders: list[tuple[str, Any]] = [("", module)]
    while holders:
        owner, holder = holders.pop()
        for name, value in list(vars(holder).items()):
            if name.startswith("__") and name.endswith("__"):
                continue
            if isinstance(value, type) and value.__module__ == module.__name__:
                if value.__qualname__ == (f"{owner}.{name}" if owner else name) and not isinstance(value, EnumMeta):
                    holders.append((value.__qualname__, value))
            elif not owner or isinstance(value, _FUNCTIONS) or not hasattr(type(value), "__get__"):
                yield owner, name, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a value that cannot be sent as a whole, such as a dict that holds a lock."""
    if isinstance(value, ContextVar):
        if (held := value.get(_MISSING)) is not _MISSING:
            yield _VALUE, held
        return
    parts: Any = ()
    if isinstance(value, dict | list):
        parts = () if len(value) > _MOST_PARTS else value.items() if isinstance(value, dict) else enumerate(value)
    elif isinstance(value, threading.local) or _is_users(type(value).__module__):
        parts = getattr(value, "__dict__", {}).items()
    for name, each in list(parts):
        if isinstance(value, list) or (isinstance(name, str) and "." not in name):
            yield str(name), each


def _part(holder: Any, name: str) -> Any:
    """The part of this name, or `_MISSING`."""
    if isinstance(holder, ContextVar):
        return holder.get(_MISSING)
    if isinstance(holder, list):
        return holder[int(name)] if int(name) < len(holder) else _MISSING
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, _MISSING)


def _set_part(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, ContextVar):
        holder.set(value)
    elif isinstance(holder, list):
        holder[int(name) : int(name) + 1] = [value]
    elif isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _own_function(value: Any, owner: str, name: str, module: str) -> FunctionType | None:
    """The function, if importing the module defines it, so that it is the same in every process."""
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if not isinstance(function, FunctionType) or function.__globals__.get("__name__") != module:
        return None
    return function if function.__qualname__ in (f"{owner}.{name}" if owner else name, "<lambda>") else None


def _described(value: Any, modules: set[str]) -> bytes | Left:
    """A value's pickle, or why there is none; modules that it refers to are added to `modules`."""
    file = _Bounded()
    pickler = _ValuePickler(file)
    with Attempt() as attempt:
        pickler.dump(value)
    modules |= pickler.needed | pickler.reached
    return file.getvalue() if attempt.error is None else Left(_kind(value), str(attempt.error))


def _kind(value: Any) -> str:
    return type(value).__name__


def _note(name: str | None, modules: set[str]) -> None:
    if name is not None and name not in modules and _is_users(name):
        modules.add(name)


def _note_imports(function: FunctionType, code: CodeType, modules: set[str]) -> None:
    """Note the modules that a function imports when it is called."""
    package = function.__globals__.get("__package__")
    for name in code.co_names:
        for full in (name, f"{package}.{name}") if package else (name,):
            if full in sys.modules:
                _note(full, modules)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _note_imports(function, constant, modules)


def _is_importable(value: FunctionType | type) -> bool:
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_users(name: str) -> bool:
    """Whether a module is the user's: not ours, installed, or Python's. `__main__` is pickled by value."""
    if name == "__main__" or name.partition(".")[0] in _OURS:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _is_users_file(file)


@functools.cache
def _is_users_file(file: str) -> bool:
    path = os.path.abspath(file)
    return not path.startswith(_LIBRARY) and _INSTALLED.isdisjoint(path.split(os.sep))
