"""The user's functions and modules in the workers: what travels there, and when a change takes effect."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from make_shards import write_numbers
from matrix import exhaustive
from transforms import NeverTwiceTheSame, Scaled

from streamload import StreamLoader
from streamload.errors import StreamloadError, TransformError, WorkerError

MakeModule = Callable[[str, str], ModuleType]

SETTINGS = """
import threading
class Frozen:
    size = 16
class Settings:
    def __init__(self): self.size = 16
class Guarded(Settings):
    def __init__(self, inner=None): self.size, self.lock, self.inner = 16, threading.Lock(), inner
SIZE = 16
SHARED = Settings()
GUARDED = Guarded(Guarded())
UNSET = object()
LOCK = threading.Lock()
def step(value): return value
"""
FUNCTIONS = """
import user_settings
from user_settings import Frozen, SHARED, UNSET
def numbers(value, unset=UNSET):
    import user_late
    from user_package.inner import DEEP
    assert unset is user_settings.UNSET and user_settings.SHARED is SHARED and user_settings.LOCK
    guarded = user_settings.GUARDED
    with guarded.lock, guarded.inner.lock:
        sizes = [guarded.size, guarded.inner.size, user_settings.SIZE, Frozen.size, SHARED.size, user_late.LATE, DEEP]
    return [value, *sizes, user_settings.step(value)]
def size(value):
    return user_settings.SIZE
"""


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeModule]:
    """Makes and imports modules of a user's, which are gone afterwards."""
    monkeypatch.syspath_prepend(tmp_path / "project")
    before = set(sys.modules)

    def make(name: str, text: str) -> ModuleType:
        path = tmp_path / "project" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


@pytest.fixture
def source(shard_folder: Path) -> str:
    return write_numbers(shard_folder, [6])


def loader_of(source: Any, function: Any, **others: Any) -> StreamLoader:
    given = {"batch_size": 3, "fields": ("cls",), "transform": {"cls": function}, "num_workers": 1, **others}
    return StreamLoader(source, **given)


def values(loader: StreamLoader) -> list[Any]:
    return [value for (batch,) in loader for value in batch.tolist()]


# -- what travels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_modules_of_the_user_hold_in_workers_what_the_program_has_set(
    source: str, make_module: MakeModule, workers: int
) -> None:
    settings = make_module("user_settings", SETTINGS)
    late, inner = make_module("user_late", "LATE = 16"), make_module("user_package.inner", "DEEP = 16")
    functions = make_module("user_functions", FUNCTIONS)
    settings.SIZE = settings.Frozen.size = settings.SHARED.size = late.LATE = inner.DEEP = 48
    settings.GUARDED.size = settings.GUARDED.inner.size = 48  # beside locks, which stay behind
    settings.step = lambda value: -value
    with loader_of(source, functions.numbers, num_workers=workers) as loader:
        (batch,) = next(iter(loader))
    assert [column.tolist() for column in batch] == [[0, 1, 2], *[[48] * 3] * 7, [0, -1, -2]]


OWN = """
import os, socket, threading
SIZE = 16
FILE = open(__file__, "a")
CLIENT = {"socket": socket.socket(), "made in": os.getpid()}
CLIENT["socket"].close()
TABLE = bytearray(17 << 20)
def of_import(value):
    return [SIZE, CLIENT["made in"] == os.getpid(), TABLE[0], os.get_inheritable(FILE.fileno())]
def without(value):
    return SIZE
"""


def test_what_does_not_pickle_or_is_large_is_that_of_the_workers_import(
    source: str, make_module: MakeModule, recwarn: pytest.WarningsRecorder
) -> None:
    own = make_module("user_own", OWN)
    own.SIZE, own.TABLE[0] = 48, 1
    try:
        with loader_of(source, own.of_import) as loader:
            (batch,) = next(iter(loader))
        assert [column.tolist() for column in batch] == [[48] * 3, [True] * 3, [0] * 3, [False] * 3]
        with loader_of(source, lambda value: own.without(value)) as loader:
            assert values(loader) == [48] * 6
    finally:
        own.FILE.close()
    assert not recwarn.list


KINDS = """
import functools, threading
from dataclasses import dataclass
from enum import Enum
class Kind(Enum):
    A = "a"
    B = "b"
class Base:
    kind = Kind.A
    lock = threading.Lock()
    names = threading.local()
    @staticmethod
    def static(): return 16
    @classmethod
    def of_class(cls): return cls.kind
    @functools.cached_property
    def once(self): return self.of_class()
@dataclass
class Wrapped(Base):
    value: int
    def __post_init__(self): super().__init__()
def wrapped(value):
    import user_kinds
    from user_kinds import Kind as Imported, Wrapped as Class
    made = Wrapped(value)
    assert Class is Wrapped is user_kinds.Wrapped and isinstance(made, Base) and made.once is Imported.B is Kind.B
    with Base.lock:
        made.size = made.static()
    return made
def is_wrapped(sample):
    import user_kinds
    return isinstance(sample[0], user_kinds.Wrapped) and sample[0].once is user_kinds.Kind.B
def batch(samples):
    assert all(map(is_wrapped, samples))
    return [made for (made,) in samples]
"""


def test_classes_and_enums_are_one_however_workers_and_the_loop_reach_them(
    source: str, make_module: MakeModule
) -> None:
    kinds = make_module("user_kinds", KINDS)
    kinds.Base.kind, kinds.Base.static = kinds.Kind.B, staticmethod(lambda: 48)
    attributes = dict(vars(kinds.Wrapped))
    with loader_of(source, kinds.wrapped, collate_fn=kinds.batch) as loader:
        made = [each for batch in loader for each in batch]
    assert [(type(each), each.once, each.value, each.size) for each in made] == [
        (kinds.Wrapped, kinds.Kind.B, number, 48) for number in range(6)
    ]
    assert dict(vars(kinds.Wrapped)) == attributes


def test_what_the_user_has_registered_with_cloudpickle_stays_registered(source: str, make_module: MakeModule) -> None:
    settings = make_module("user_settings", SETTINGS)
    functions = make_module("user_functions", FUNCTIONS)
    cloudpickle.register_pickle_by_value(settings)
    try:
        with loader_of(source, functions.size) as loader:
            assert values(loader) == [16] * 6
        assert cloudpickle.list_registry_pickle_by_value() == {"user_settings"}
    finally:
        cloudpickle.unregister_pickle_by_value(settings)


@pytest.mark.exhaustive
def test_a_loader_that_is_used_in_a_worker_says_that_it_cannot_be(source: str) -> None:
    says = "a StreamLoader cannot be used in a worker"
    with loader_of(source, lambda _: len(loader)) as loader, pytest.raises(TransformError, match=says):
        next(iter(loader))


# -- when a change takes effect ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_another_transform_is_used_from_the_next_pass_on(source: str, workers: int) -> None:
    given = {"cls": Scaled(1)}
    with loader_of(source, None, transform=given, num_workers=workers) as loader:
        batches = iter(loader)
        next(batches)
        loader.transform = {"cls": Scaled(2)}
        assert next(batches)[0].tolist() == [3, 4, 5], "a pass that is in flight is not changed"
        assert list(batches) == []
        assert values(loader) == [0, 2, 4, 6, 8, 10]
        loader.transform = given
        given["cls"].factor = 3
        assert values(loader) == [0, 3, 6, 9, 12, 15]
        given["cls"] = Scaled(4)
        assert values(loader) == [0, 4, 8, 12, 16, 20]


def test_a_folder_may_join_the_path_after_the_loader_was_made(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"  # so that workers import it themselves
    folder.mkdir()
    (folder / "user_late.py").write_text("def double(value):\n    return 2 * value\n")
    with loader_of(source, None, transform=None) as loader:
        monkeypatch.syspath_prepend(folder)
        loader.transform = {"cls": importlib.import_module("user_late").double}
        assert values(loader) == [0, 2, 4, 6, 8, 10]


def test_a_wrong_transform_is_refused_and_changes_nothing(source: str) -> None:
    with loader_of(source, Scaled(2), num_workers=0) as loader:
        for wrong in (5, {"jpg": Scaled(3)}, {"cls": lambda: 3}):
            with pytest.raises((TypeError, ValueError), match="transform"):
                loader.transform = wrong  # type: ignore[assignment]
        assert values(loader) == [0, 2, 4, 6, 8, 10]


NOTEBOOK = """
import os
words = {str(number) for number in range(20)}
class Table:
    def __init__(self): self.words = words
table = Table()
def closure(scale): return lambda value: os.getpid() * scale if table.words and words else 0
"""


def test_workers_are_kept_where_nothing_has_changed(source: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "streamload")
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(NOTEBOOK, cell)
    for transform in (NeverTwiceTheSame(), cell["closure"](1)):
        with loader_of(source, transform) as loader:
            assert len({pid for _ in range(3) for pid in values(loader)}) == 1
    assert caplog.text == ""


def test_what_changes_at_each_pass_is_warned_of(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    training = make_module("user_training", "losses = []\ndef same(value): return value if losses is not None else 0")
    with loader_of(source, training.same) as loader:
        for _ in range(3):
            training.losses += values(loader)[:1]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "the workers are restarted" in said[0]


# -- arguments without effect --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decode": {"np": int}, "fields": None, "transform": None}, "'np'.*did you mean 'npy'"),
        ({"decode": {"cls;clss": int}}, r"decode has a function for 'clss'.*did you mean 'cls'\?"),
    ],
)
def test_decoders_without_effect_are_refused(source: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(source, Scaled(1), **{"num_workers": 0, **given})


def test_arguments_that_serve_other_runs_too_are_not(source: str) -> None:
    for given in (
        {"decode": {"jpg; .CLS;png": int}},
        {"decode": {"cls;klass": int}, "fields": ("cls;klass",)},
        {"storage_options": {}, "memory_budget": "1GB"},
    ):
        loader_of(source, Scaled(1), num_workers=0, **given).close()


FROM_GENERATORS = """
import random
import numpy as np
from random import random as draw, randint
from numpy.random import rand, normal
import torch
from torch import default_generator
numbers = np.random.Generator(np.random.mtrand._rand._bit_generator)
def draws(value):
    drawn = [draw(), randint(0, 1 << 40), rand(), normal(), random.gauss(0, 1), np.random.uniform()]
    return [*drawn, numbers.random(), torch.rand((), generator=default_generator).item()]
"""


def test_functions_imported_from_generators_draw_the_samples_own_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A function of a script travels with what it names; a copy of a generator would be seeded by nobody."""
    source = write_numbers(tmp_path / "few", [12])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(FROM_GENERATORS, names)
    caplog.set_level("INFO", "streamload")

    def drawn(num_workers: int) -> list[Any]:
        transform = {"cls": names["draws"]}
        with StreamLoader(source, 2, fields=("cls",), num_workers=num_workers, transform=transform) as loader:
            rows = []
            for _ in range(2):
                rows += [np.stack([values.numpy() for values in batch[0]]).T.tolist() for batch in loader]
                random.random(), np.random.rand(), torch.rand(())
            return rows

    here = drawn(0)
    assert drawn(1) == here
    assert len({tuple(row) for batch in here for row in batch}) == 24
    assert "restarted" not in caplog.text


def test_modules_of_the_current_folder_are_not_run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with loader_of(source, Scaled(1)) as loader:
        assert len(list(loader)) == 2


def test_programs_that_a_transform_starts_have_the_environment_of_the_user(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another Python would die of the modules of this one."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere/modules")

    def python_path(_: int) -> str:
        return subprocess.run(["printenv", "PYTHONPATH"], capture_output=True, text=True, check=False).stdout.strip()

    with loader_of(source, python_path) as loader:
        assert {value for (batch,) in loader for value in batch} == {"/nowhere/modules"}


EXITS = f"""
import os, sys
from fsspec.implementations.local import LocalFileSystem
if os.getpid() != {os.getpid()}:
    sys.exit("start train.py")
class Mounted(LocalFileSystem):
    cachable = False
def double(value):
    return 2 * value
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("transform", "^the transform raised SystemExitError: "),
        exhaustive(("collate_fn", "^collate_fn raised SystemExitError: ")),
        ("worker_init_fn", "^a worker could not be set up: .*SystemExitError: "),
    ],
)
def test_an_exit_is_an_error_of_the_function_and_no_worker_dies_of_it(
    source: str, caplog: pytest.LogCaptureFixture, given: str, message: str
) -> None:
    def leave(_: object) -> None:
        sys.exit("bad label")

    options = {"transform": None, given: leave, "on_error": "skip"}
    with loader_of(source, abs, **options) as loader, pytest.raises(StreamloadError, match=message) as caught:
        next(iter(loader))
    assert r"sys.exit('bad label') cannot end the program from here" in str(caught.value)
    assert 'sys.exit("bad label")' in "".join(caught.value.__cause__.__notes__)
    assert not caplog.records


def test_an_exit_ends_the_program_where_the_function_runs_in_it(source: str) -> None:
    for given in ({"transform": {"cls": sys.exit}}, {"decode": {"cls": sys.exit}}, {"collate_fn": sys.exit}):
        options = {"transform": None, "num_workers": 0, "on_error": "skip", **given}
        with loader_of(source, abs, **options) as loader, pytest.raises(SystemExit):
            next(iter(loader))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (lambda f: {"transform": f}, "transform="),
        (lambda f: {"transform": {"cls": abs, "npy": f}, "fields": ("npy", "cls")}, "transform['npy']"),
        (lambda f: {"decode": {"npy": f}, "fields": ("npy", "cls")}, "decode['npy']"),
        (lambda f: {"collate_fn": f}, "collate_fn="),
    ],
)
def test_what_cannot_be_sent_to_workers_is_named(source: str, given: Callable[[Any], Any], name: str) -> None:
    numbers = (number for number in range(6))

    def following(_: Any) -> Any:
        return next(numbers)

    with loader_of(source, abs, **given(following)) as loader:
        said = rf"^{re.escape(name)} cannot be sent to the workers, .* \(cannot pickle 'generator' object\); create"
        with pytest.raises(TypeError, match=said):
            iter(loader)


@pytest.mark.parametrize("given", ["filesystem", exhaustive(("transform",))])
def test_a_module_that_exits_when_it_is_imported_is_named(source: str, make_module: MakeModule, given: str) -> None:
    """By the feeder, which imports it for the file system, and by a worker."""
    module = make_module("user_exits", EXITS)
    function, others = (abs, {"filesystem": module.Mounted()}) if given == "filesystem" else (module.double, {})
    with pytest.raises(WorkerError, match=r"user_exits\.py exits in line 5 \(SystemExit: start train\.py\)"):
        with loader_of(source, function, **others) as loader:
            next(iter(loader))
