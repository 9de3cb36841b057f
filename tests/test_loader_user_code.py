"""The user's functions and modules in the workers: what travels there, and when a change takes effect."""

from __future__ import annotations

import importlib
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from launched import run_python
from make_shards import write_numbers
from transforms import NeverTwiceTheSame, Scaled

from streamload import Mixture, Portion, StreamLoader, TarDataset
from streamload.errors import CollateError, DecodeError, StreamloadError, TransformError, WorkerError

MakeModule = Callable[[str, str], ModuleType]

PLACES = [{"num_workers": 1}, {"num_workers": 0}]
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
CHOSEN = "a"
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


@pytest.mark.parametrize("place", PLACES)
def test_modules_of_the_user_hold_in_workers_what_the_program_has_set(
    source: str, make_module: MakeModule, place: dict[str, Any]
) -> None:
    settings = make_module("user_settings", SETTINGS)
    late, inner = make_module("user_late", "LATE = 16"), make_module("user_package.inner", "DEEP = 16")
    functions = make_module("user_functions", FUNCTIONS)
    settings.SIZE = settings.Frozen.size = settings.SHARED.size = late.LATE = inner.DEEP = 48
    settings.GUARDED.size = settings.GUARDED.inner.size = 48  # beside locks, which stay behind
    settings.step = lambda value: -value
    with loader_of(source, functions.numbers, **place) as loader:
        (batch,) = next(iter(loader))
    assert [column.tolist() for column in batch] == [[0, 1, 2], *[[48] * 3] * 7, [0, -1, -2]]


def test_what_cannot_be_carried_over_is_said(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_module("user_settings", SETTINGS)
    functions = make_module("user_functions", FUNCTIONS)
    with loader_of(source, functions.size) as loader:
        assert values(loader) == [16] * 6
    assert caplog.text == "", "a lock that the module makes itself is no loss"
    settings.CHOSEN = threading.Lock()
    with loader_of(source, functions.size) as loader:
        values(loader)
    assert "user_settings.CHOSEN (lock: cannot pickle" in caplog.text
    assert "worker_init_fn" in caplog.text


def test_classes_of_the_user_stay_what_they_are(source: str, make_module: MakeModule) -> None:
    functions = make_module(
        "user_functions",
        "class Wrapped:\n    kind = 1\n    def __init__(self, value): self.value = value\n"
        "def batch(samples): return [Wrapped(value) for (value,) in samples]\n",
    )
    functions.Wrapped.kind = 2
    with StreamLoader(source, 3, fields=("cls",), collate_fn=functions.batch, num_workers=1) as loader:
        assert all(type(each) is functions.Wrapped for batch in loader for each in batch)


PARTS = """
import threading
from contextvars import ContextVar
TABLE = {"size": 16, "lock": threading.Lock(), "inner": {"size": 16, "lock": threading.Lock()}}
STEPS = [threading.Lock(), 16]
CONTEXT = ContextVar("CONTEXT", default=16)
LOCAL = threading.local()
class Methods:
    @staticmethod
    def static(): return 16
    @classmethod
    def of_class(cls): return 16
def sizes(value):
    methods = [Methods.static(), Methods.of_class(), getattr(LOCAL, "size", 16), CONTEXT.get()]
    with TABLE["lock"], TABLE["inner"]["lock"], STEPS[0]:
        return [TABLE["size"], TABLE["inner"]["size"], *STEPS[1:], *methods]
"""


def test_parts_of_what_does_not_pickle_travel_and_what_cannot_is_said(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    """In dicts and lists with locks, context variables, what is local to a thread; and replaced static methods."""
    parts = make_module("user_parts", PARTS)
    with loader_of(source, parts.sizes) as loader:
        assert {size.item() for (columns,) in loader for column in columns for size in column} == {16}
    assert caplog.text == "", "nothing was set"
    parts.TABLE["size"] = parts.TABLE["inner"]["size"] = parts.STEPS[1] = parts.LOCAL.size = 48
    parts.STEPS.append(48)
    context = parts.CONTEXT.set(48)
    parts.Methods.static, parts.Methods.of_class = staticmethod(lambda: 48), classmethod(lambda cls: 48)
    with loader_of(source, parts.sizes) as loader:
        assert {size.item() for (columns,) in loader for column in columns for size in column} == {48}
    assert caplog.text == ""
    parts.TABLE["further"] = threading.Lock()
    parts.CONTEXT.reset(context)
    parts.CONTEXT.set(threading.Lock())
    with loader_of(source, int) as loader:
        loader.transform = {"cls": lambda value: 16 if parts.TABLE else value}
        assert values(loader) == [16] * 6
    for name in ("TABLE.further", "CONTEXT.value"):
        assert f"user_parts.{name} (lock: cannot pickle" in caplog.text


CONTAINERS = """
import threading
class Kind:
    pass
TABLE = {"a.b": 16, 7: 16, ("x", 1): 16, None: {"a.b": 16, "lock": threading.Lock()}, "lock": threading.Lock()}
MANY = {number: 16 for number in range(1500)} | {-1: threading.Lock()}
LONG = [16] * 1500 + [threading.Lock()]
ODD = {Kind: 16, "lock": threading.Lock()}
FEW = {"gone": 16, "lock": threading.Lock(), "other": threading.Lock()}
SHORT = [threading.Lock(), 16, 16]
class Holder:
    def __init__(self):
        self.lock, self.size = threading.Lock(), 16
HOLDER = Holder()
def sizes(value):
    return [TABLE["a.b"], TABLE[7], TABLE["x", 1], TABLE[None]["a.b"]]
def left(value):
    return [len(FEW), len(SHORT), len(vars(HOLDER))]
"""


def test_parts_under_any_plain_key_travel(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    """Text with dots, numbers, None and tuples of these."""
    containers = make_module("user_containers", CONTAINERS)
    table = containers.TABLE
    table["a.b"] = table[7] = table["x", 1] = table[None]["a.b"] = 48
    with loader_of(source, containers.sizes) as loader:
        assert {size.item() for (columns,) in loader for column in columns for size in column} == {48}
    assert caplog.text == ""
    table["c.d"] = threading.Lock()
    with loader_of(source, containers.sizes) as loader:
        next(iter(loader))
    assert "user_containers.TABLE['c.d'] (lock: cannot pickle" in caplog.text


def test_parts_that_the_program_has_removed_are_removed(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    containers = make_module("user_containers", CONTAINERS)
    del containers.FEW["gone"], containers.SHORT[1:], containers.HOLDER.size
    with loader_of(source, containers.left) as loader:
        assert {tuple(size.tolist()) for (columns,) in loader for size in np.stack(columns, 1)} == {(2, 1, 1)}
    assert caplog.text == ""
    del containers.FEW["other"]
    with loader_of(source, containers.left) as loader:
        next(iter(loader))
    assert "user_containers.FEW.other (removed in the program" in caplog.text, "it may be the worker's own"


def test_parts_that_do_not_travel_are_said(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    """Of containers that hold a lock and too many parts to send each by itself, or keys that are objects."""
    containers = make_module("user_containers", CONTAINERS)
    with loader_of(source, containers.left) as loader:
        next(iter(loader))
    assert caplog.text == "", "nothing was set"
    for changes, names in (
        ("MANY[1400] = LONG[0] = ODD[Kind] = 48", ["MANY", "LONG", "ODD"]),
        ("ODD[Kind] = LONG[0] = 16; del MANY[1400], LONG[0]", ["MANY", "LONG"]),
    ):
        exec(changes, vars(containers))
        caplog.clear()
        with loader_of(source, containers.left) as loader:
            next(iter(loader))
        for name in names:
            assert re.search(rf"user_containers\.{name} \((dict|list): .*at most 1,000 parts", caplog.text)
        assert ("user_containers.ODD" in caplog.text) == ("ODD" in names)


# -- when a change takes effect ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES[::2])
def test_another_transform_is_used_from_the_next_pass_on(source: str, place: dict[str, Any]) -> None:
    with loader_of(source, Scaled(1), **place) as loader:
        batches = iter(loader)
        next(batches)
        loader.transform = {"cls": Scaled(2)}
        assert next(batches)[0].tolist() == [3, 4, 5], "a pass that is in flight is not changed"
        assert list(batches) == []
        assert values(loader) == [0, 2, 4, 6, 8, 10]
        assert isinstance(loader.transform, dict)
        loader.transform["cls"].factor = 3
        assert values(loader) == [0, 3, 6, 9, 12, 15]
        assert loader.state_dict()["epoch"] == 3


def test_a_mapping_that_is_changed_in_place_is_noticed_without_workers(source: str) -> None:
    given = {"cls": Scaled(1)}
    with StreamLoader(source, 3, fields=("cls",), transform=given, num_workers=0) as loader:
        assert values(loader) == [0, 1, 2, 3, 4, 5]
        given["cls"] = Scaled(4)
        assert values(loader) == [0, 4, 8, 12, 16, 20]


def test_a_wrong_transform_is_refused_and_changes_nothing(source: str) -> None:
    with loader_of(source, Scaled(2), num_workers=0) as loader:
        for wrong in (5, {"jpg": Scaled(3)}, {"cls": lambda: 3}):
            with pytest.raises((TypeError, ValueError), match="transform"):
                loader.transform = wrong  # type: ignore[assignment]
        assert values(loader) == [0, 2, 4, 6, 8, 10]


def test_progressive_resizing(shard_folder: Path) -> None:
    source = write_numbers(shard_folder, [8], width=64)
    shapes = []
    with StreamLoader(source, 4, shuffle=True, fields=("npy",), num_workers=1) as loader:
        for size in (16, 32):
            loader.transform = {"npy": lambda array, size=size: array[:size]}
            shapes += [tuple(arrays.shape) for (arrays,) in loader]
    assert shapes == [(4, 16)] * 2 + [(4, 32)] * 2


def test_module_state_and_a_mixtures_transforms_that_change_are_noticed(
    source: str, tmp_path: Path, make_module: MakeModule
) -> None:
    settings, own = make_module("user_settings", SETTINGS), Scaled(10)
    functions = make_module("user_functions", FUNCTIONS)
    make_module("user_late", "LATE = 16")
    other = write_numbers(tmp_path / "other", [6])
    mixture = Mixture({"a": (source, 0.5), "b": Portion(other, 0.5, transform={"cls": own})})
    with loader_of(mixture, functions.size, batch_size=2, shuffle=True, epoch_size=4) as loader:
        assert values(loader).count(16) == 2
        settings.SIZE, own.factor = 7, 0
        assert sorted(values(loader)) == [0, 0, 7, 7]


class Steady:
    """Holds what transforms hold, and tells which process calls it."""

    names = frozenset(f"name {number}" for number in range(20))

    def __init__(self) -> None:
        self.array, self.tensor, self.words = np.ones(9), torch.ones(9), {f"word {number}" for number in range(20)}
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())

    def __call__(self, value: int) -> int:
        return os.getpid()


def in_main(text: str) -> Any:
    """What a notebook's cell makes of it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    return names["made"]


NOTEBOOK = """
import os
words = {str(number) for number in range(20)}
class Table:
    def __init__(self): self.words = words
table = Table()
def closure(scale): return lambda value: os.getpid() * scale if table.words and words else 0
made = closure(1)
"""


@pytest.mark.parametrize("transform", [Steady(), NeverTwiceTheSame(), in_main(NOTEBOOK)])
def test_workers_are_kept_where_nothing_has_changed(
    source: str, transform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "streamload")
    with loader_of(source, transform) as loader:
        assert len({pid for _ in range(3) for pid in values(loader)}) == 1
    assert caplog.text == ""


def test_what_changes_at_each_pass_is_warned_of(
    source: str, make_module: MakeModule, caplog: pytest.LogCaptureFixture
) -> None:
    training = make_module("user_training", "losses = []\ndef same(value): return value")
    with loader_of(source, training.same) as loader:
        for _ in range(4):
            training.losses += values(loader)[:1]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "restarted at each pass" in said[0]
    assert "user_training.losses" in said[0]


# -- attributes ----------------------------------------------------------------------------------------------------


def test_attributes_without_effect_are_refused(source: str) -> None:
    with loader_of(source, Scaled(1), num_workers=0) as loader:
        for name in ("shuffle", "batch_size", "fields", "rank", "seed", "transforms", "shufle", "batchsize"):
            with pytest.raises(AttributeError, match=rf"{name!r} cannot be set.*`transform`"):
                setattr(loader, name, 3)
        with pytest.raises(AttributeError, match=r"'epoch' cannot be set.*call set_epoch\(\)"):
            loader.epoch = 3  # type: ignore[attr-defined]
        loader.note = "of the user's"  # type: ignore[attr-defined]
        assert values(loader) == list(range(6))


# -- arguments without effect --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_errors": 5}, "max_errors=5 has no effect with on_error='raise'"),
        ({"shuffle_window": 100}, "shuffle_window=100 has no effect without shuffle"),
        ({"storage_options": {"key": "secret"}}, "storage_options= has no effect"),
        ({"cache_dir": "cache"}, "cache_dir='cache' has no effect"),
        ({"decode": {"clss": int}}, r"decode has a function for 'clss'.*they are cls; did you mean 'cls'\?"),
        ({"decode": {"jpeg": int}}, "decode has a function for 'jpeg'"),
        ({"decode": {"np": int}, "fields": None, "transform": None}, "'np'.*did you mean 'npy'"),
        ({"decode": {"cls;clss": int}}, r"decode has a function for 'clss'.*did you mean 'cls'\?"),
    ],
)
def test_arguments_without_effect_are_warned_of(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=message) as warned:
        loader_of(source, Scaled(1), **{"num_workers": 0, **given}).close()
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_a_misspelt_decoder_of_a_tar_dataset_is_warned_of(source: str) -> None:
    with pytest.warns(UserWarning, match="did you mean 'cls'"):
        TarDataset(source, decode={"clss": int}).close()


def test_arguments_that_serve_other_runs_too_are_not(source: str) -> None:
    for given in (
        {"decode": {"cls": int, "jpg": int}},
        {"decode": {".CLS": int}},
        {"decode": {"jpg; cls;.PNG": int}},
        {"decode": {"cls;klass": int}, "fields": ("cls;klass",)},
        {"storage_options": {}, "memory_budget": "1GB"},
        {"max_errors": 5, "on_error": "skip"},
        {"shuffle": True, "shuffle_window": 100},
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


def test_functions_that_are_imported_from_generators_draw_the_samples_own_numbers(tmp_path: Path) -> None:
    """A function of a script travels with what it names; a copy of a generator would be seeded by nobody."""
    source = write_numbers(tmp_path / "few", [12])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(FROM_GENERATORS, names)

    def drawn(num_workers: int) -> list[Any]:
        transform = {"cls": names["draws"]}
        with StreamLoader(source, 2, fields=("cls",), num_workers=num_workers, transform=transform) as loader:
            return [np.stack([values.numpy() for values in batch[0]]).T.tolist() for batch in loader]

    here = drawn(0)
    assert drawn(1) == here
    assert len({tuple(row) for batch in here for row in batch}) == 12


def test_functions_that_are_imported_from_generators_do_not_change_between_passes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_numbers(tmp_path / "few", [4])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(FROM_GENERATORS, names)
    caplog.set_level("INFO", "streamload")
    with StreamLoader(source, 2, fields=("cls",), num_workers=1, transform={"cls": names["draws"]}) as loader:
        list(loader)
        random.random(), np.random.rand(), torch.rand(())
        list(loader)
    assert "restarted" not in caplog.text


def test_a_program_may_have_replaced_the_functions_of_generators(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "few", [4])
    program = f"""
import random
import numpy
random.random = numpy.random.rand = lambda: 0.5
from streamload import StreamLoader
transform = {{"cls": lambda value: value + 1}}
with StreamLoader({source!r}, 4, fields=("cls",), num_workers=1, transform=transform) as loader:
    print(next(iter(loader))[0].tolist())
"""
    assert run_python("-c", program).output.splitlines() == ["[1, 2, 3, 4]"]


def test_modules_find_the_arguments_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the feeder imports, as here for the file system, and those that the workers do."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--size", "48"])
    parses = importlib.import_module("parses_at_import")
    source = write_numbers(tmp_path / "few", [4])
    options = {"fields": ("cls",), "num_workers": 1, "filesystem": parses.Mounted()}
    with StreamLoader(source, 4, **options, transform={"cls": parses.size}) as loader:
        assert next(iter(loader))[0].tolist() == [48] * 4


@pytest.mark.parametrize("path", [None, "/nowhere/modules"])
def test_programs_that_a_transform_starts_have_the_environment_of_the_user(
    source: str, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    """Another Python would die of the modules of this one."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)

    def python_path(_: int) -> str:
        return subprocess.run(["printenv", "PYTHONPATH"], capture_output=True, text=True, check=False).stdout.strip()

    with loader_of(source, python_path) as loader:
        assert {value for (batch,) in loader for value in batch} == {path or ""}


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

EXITS_AS_IT_IS_LOADED = """
import sys
class Double:
    def __reduce__(self):
        return Double, (), {"any": "state"}
    def __setstate__(self, state):
        sys.exit("start train.py")
    def __call__(self, value):
        return 2 * value
"""


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("transform", TransformError, "^the transform of field 'cls' raised SystemExitError: "),
        ("decode", DecodeError, "^cannot decode the bytes of field 'cls': SystemExitError: "),
        ("collate_fn", CollateError, "^collate_fn raised SystemExitError: "),
        ("worker_init_fn", WorkerError, "^a worker could not be set up: .*SystemExitError: "),
    ],
)
def test_an_exit_is_an_error_of_the_function_and_no_worker_dies_of_it(
    source: str, caplog: pytest.LogCaptureFixture, given: str, kind: type[StreamloadError], message: str
) -> None:
    def leave(_: object) -> None:
        sys.exit("bad label")

    by_field = given in ("transform", "decode")
    options = {"transform": None, given: {"cls": leave} if by_field else leave, "on_error": "skip"}
    with loader_of(source, abs, **options) as loader, pytest.raises(kind, match=message) as caught:
        next(iter(loader))
    assert r"sys.exit('bad label') would end only a worker" in str(caught.value)
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
    lock = threading.Lock()

    def locked(value: Any) -> Any:
        with lock:
            return value

    with loader_of(source, abs, **given(locked)) as loader:
        said = (
            rf"^{re.escape(name)} cannot be sent to the workers, .* \(cannot pickle '_thread.lock' object\); make that"
        )
        with pytest.raises(TypeError, match=said):
            iter(loader)


def test_an_object_that_exits_when_it_is_loaded_is_named(source: str, make_module: MakeModule) -> None:
    module = make_module("object_exits", EXITS_AS_IT_IS_LOADED)
    with (
        loader_of(source, module.Double()) as loader,
        pytest.raises(WorkerError, match=r"^\S+object_exits\.py exits in line 7 .*, which loads what") as caught,
    ):
        next(iter(loader))
    assert "imports" not in str(caught.value)


@pytest.mark.parametrize("given", ["filesystem", "transform"])
def test_a_module_that_exits_when_it_is_imported_is_named(source: str, make_module: MakeModule, given: str) -> None:
    """By the feeder, which imports it for the file system, and by a worker."""
    module = make_module("user_exits", EXITS)
    function, others = (abs, {"filesystem": module.Mounted()}) if given == "filesystem" else (module.double, {})
    with pytest.raises(WorkerError, match=r"user_exits\.py exits in line 5 \(SystemExit: start train\.py\)"):
        with loader_of(source, function, **others) as loader:
            next(iter(loader))
