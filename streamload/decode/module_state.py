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
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from enum import EnumMeta
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from random import Random
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from streamload.decode.failure import Attempt
from streamload.decode.seeding import names_of_generators

__all__ = ["ModuleState", "StatePickler", "is_users", "set_state", "state_of"]

MAX_VALUE_BYTES = 16 << 20
"""Of a pickle. Larger values are not sent, since each worker would get a copy, needed or not."""

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_OURS = {"streamload", "streamload_tools"}
_MISSING = object()
_FUNCTIONS = (FunctionType, staticmethod, classmethod)
_MOST_PARTS = 1000
_PLAIN_KEYS = frozenset({str, bytes, int, float, bool, type(None)})
_VALUE = "value"
"""The name of a ContextVar's value, which has none."""


Key = Any
"""Of a dict: text, a number, None, or a tuple of these; of a list: an index; else a name."""


class Left(NamedTuple):
    """A value that cannot be sent.

    Attributes:
        kind: its type, so that a worker can see whether its own value is of the same type.
        why: the reason.
        keys: of the parts that are sent one by one; what a worker has beside them was removed. None where that does
            not follow: there are too many parts, or they are those of one thread.
        others: a digest of the parts that are not, by which a worker can tell whether they are as its own.
    """

    kind: str
    why: str
    keys: tuple[Key, ...] | None = None
    others: bytes = b""


class Attribute(NamedTuple):
    """A named value in a module, in a class defined there, or inside a value there that does not pickle.

    Attributes:
        module: the module's name.
        owner: the path in the module to the class or value; empty for the module itself.
        name: of the attribute, or a dict's key, or a list's index.
        value: its number among the values; the same object has the same number.
    """

    module: str
    owner: tuple[Key, ...]
    name: Key
    value: int

    def __str__(self) -> str:
        return self.module + "".join(map(_shown, (*self.owner, self.name)))


class ModuleState(NamedTuple):
    """The state of some modules.

    Attributes:
        attributes: sorted by module.
        values: their pickles, or why there are none.
    """

    attributes: tuple[Attribute, ...]
    values: tuple[bytes | Left, ...]


class StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that notes which of the user's modules it refers to.

    A global generator stands for that of the process in which it is loaded, also where something refers to it, as
    `random.random` does, which is bound to one.

    Args:
        file: takes the bytes.

    Attributes:
        needed: the modules that are imported when the bytes are loaded, by name.
        reached: the modules that may be used later, by name.
        generators: the names of the global generators, by `id`.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.needed: set[str] = set()
        self.reached: set[str] = set()
        self.generators = names_of_generators()

    def reducer_override(self, value: Any) -> Any:
        """Note the module of a value, then pickle it as cloudpickle does, but global generators by name."""
        if (generator := self.generators.get(id(value))) is not None:
            return resolve_name, (generator,)
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
        if id(value) in self.generators:
            return super().reducer_override(value)
        if isinstance(value, Random | np.random.Generator | np.random.RandomState):
            raise TypeError("a generator's state would be the same in all workers")
        if isinstance(value, type) and is_users(value.__module__) and not _is_importable(value):
            raise TypeError("its class is defined within a function")
        if (torch := sys.modules.get("torch")) is not None:
            if isinstance(value, torch.Generator):
                raise TypeError("a generator's state would be the same in all workers")
            if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.nbytes > MAX_VALUE_BYTES):
                raise TypeError("it is on a device, or large")
        return super().reducer_override(value)


class _LenientPickler(StatePickler):
    """Puts its type's name in the place of what does not pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type | ModuleType):
            return super().reducer_override(value)
        with Attempt() as attempt:
            return value.__reduce_ex__(self.proto)
        assert attempt.error is not None
        return str, (_kind(value),)


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
                code.update(f"{owner}.{attribute}={hash(function.__code__)};".encode("utf-8", "backslashreplace"))
            else:
                if id(value) not in numbers:
                    numbers[id(value)] = len(values)
                    values.append(_described(value, further))
                    if isinstance(values[-1], Left):
                        held += (((*owner, attribute), inner, each) for inner, each in _parts(value))
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
        for name in attribute.owner:
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
            elif isinstance(mine, Left) and not is_nothing:
                self._remove_parts(attribute, here, mine, there)
        elif here is _MISSING or mine != there:
            if attribute.value not in self._loaded:
                self._loaded[attribute.value] = cloudpickle.loads(there)
            _set_part(holder, attribute.name, self._loaded[attribute.value])

    def _remove_parts(self, attribute: Attribute, here: Any, mine: Left, there: Left) -> None:
        """Remove what the other process has removed; a part that might be this process's own, like a lock, stays."""
        if mine.others != there.others:
            self.lost.append(
                f"{attribute} ({there.kind}: {there.why}; a part of it is sent by itself only under a key of text or "
                f"numbers, and where there are at most {_MOST_PARTS:,} parts)"
            )
        if there.keys is None or mine.keys is None:
            return
        kept = set(there.keys)
        for key in [key for key in reversed(mine.keys) if key not in kept]:
            if isinstance(here, list) or isinstance(_described(_part(here, key), set()), bytes):
                _remove_part(here, key)
            else:
                place = attribute._replace(owner=(*attribute.owner, attribute.name), name=key)
                self.lost.append(f"{place} (removed in the program; {_kind(_part(here, key))} of the worker's own)")


class _LateModules:
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


def _attributes(module: ModuleType) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """The attributes of a module (after `()`) and of the classes defined in it (after the class's path)."""
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
                yield tuple(filter(None, owner.split("."))), name, value


def _all_parts(value: Any) -> list[tuple[Key, Any]]:
    """The parts of a value that cannot be sent as a whole, such as a dict that holds a lock."""
    if isinstance(value, ContextVar):
        return [] if (held := value.get(_MISSING)) is _MISSING else [(_VALUE, held)]
    if isinstance(value, dict | list):
        return list(value.items() if isinstance(value, dict) else enumerate(value))
    if isinstance(value, threading.local) or is_users(type(value).__module__):
        return list(getattr(value, "__dict__", {}).items())
    return []


def _parts(value: Any) -> list[tuple[Key, Any]]:
    """Those parts that are sent one by one."""
    parts = _all_parts(value)
    return [] if len(parts) > _MOST_PARTS else [(key, each) for key, each in parts if _is_plain(key)]


def _is_plain(key: Any) -> bool:
    """Whether a key is the same in every process, and loads without importing anything."""
    return type(key) in _PLAIN_KEYS or (type(key) is tuple and all(map(_is_plain, key)))


def _shown(name: Key) -> str:
    return f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"


def _part(holder: Any, name: Key) -> Any:
    """The part of this name, or `_MISSING`."""
    if isinstance(holder, ContextVar):
        return holder.get(_MISSING)
    if isinstance(holder, list):
        return holder[name] if name < len(holder) else _MISSING
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, _MISSING)


def _remove_part(holder: Any, name: Key) -> None:
    if isinstance(holder, dict | list):
        del holder[name]
    else:
        delattr(holder, name)


def _set_part(holder: Any, name: Key, value: Any) -> None:
    if isinstance(holder, ContextVar):
        holder.set(value)
    elif isinstance(holder, list):
        holder[name : name + 1] = [value]
    elif isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _own_function(value: Any, owner: tuple[Key, ...], name: Key, module: str) -> FunctionType | None:
    """The function, if importing the module defines it, so that it is the same in every process."""
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if not isinstance(function, FunctionType) or function.__globals__.get("__name__") != module:
        return None
    return function if function.__qualname__ in (".".join(map(str, (*owner, name))), "<lambda>") else None


def _described(value: Any, modules: set[str]) -> bytes | Left:
    """A value's pickle, or why there is none; modules that it refers to are added to `modules`."""
    file = _Bounded()
    pickler = _ValuePickler(file)
    with Attempt() as attempt:
        pickler.dump(value)
    modules |= pickler.needed | pickler.reached
    if attempt.error is None:
        return file.getvalue()
    keys = tuple(key for key, _ in _parts(value))
    of_thread = isinstance(value, ContextVar | threading.local)
    known = None if of_thread or len(_all_parts(value)) > _MOST_PARTS else keys
    return Left(_kind(value), str(attempt.error), known, b"" if of_thread else _digest_of_others(value, set(keys)))


def _digest_of_others(value: Any, sent: set[Key]) -> bytes:
    """A digest of the parts that are not sent one by one, empty if there are none.

    What does not pickle counts by its type, so that a lock which the module makes itself is the same everywhere.
    """
    others = [(key, each) for key, each in _all_parts(value) if not _is_plain(key) or key not in sent]
    if not others:
        return b""
    file = _Bounded()
    with Attempt():  # of what is larger than that, only the beginning counts, and how many there are
        _LenientPickler(file).dump((len(others), others))
    return hashlib.blake2b(file.getvalue() + str(len(others)).encode(), digest_size=16).digest()


def _kind(value: Any) -> str:
    return type(value).__name__


def _note(name: str | None, modules: set[str]) -> None:
    if name is not None and name not in modules and is_users(name):
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


def is_users(name: str) -> bool:
    """Whether a module is the user's: not ours, installed, or Python's. `__main__` is pickled by value."""
    if name == "__main__" or name.partition(".")[0] in _OURS:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _is_users_file(file)


@functools.cache
def _is_users_file(file: str) -> bool:
    path = os.path.abspath(file)
    return not path.startswith(_LIBRARY) and _INSTALLED.isdisjoint(path.split(os.sep))
