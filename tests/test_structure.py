"""The house rules of the source tree, read from its syntax: who may import whom, and how large the whole may get.

Which library may be used where is for ruff to check, in `pyproject.toml`.

Each rule is a function of a `Tree`, so that the tests at the end can show it a small tree that breaks it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEVELS = (
    ("limits", "text", "arguments", "log_records"),
    ("errors",),
    ("memory", "totals"),
    ("tar", "storage", "order"),
    ("images",),
    ("index",),
    ("fetch", "write", "sampling"),
    ("decode",),
    ("workers",),
    ("statistics",),
    ("feeder",),
    ("options",),
    ("trainer",),
    ("cluster",),
    ("loader",),
    ("tar_dataset",),
    ("pack",),
    ("streamload",),
    ("cli",),
    ("__main__",),
)
"""The parts, lowest first. A module may import from its own part and from lower ones. `streamload` is the package's
face with the public names; the command line uses it, and `python -m streamload` is the command line."""

MOST_LINES_OF_CODE = 19_000
"""Lines that are neither docstrings, nor comments, nor blank. It only ever goes down."""
MOST_CHANGING_ATTRIBUTES = 8
"""Of a class: attributes that are assigned after construction."""
KNOWS_LOCAL = {"storage", "fetch"}
"""Rooms that may ask whether a shard is local."""

FORBIDDEN_NAMES = {"utils", "util", "common", "base", "helper", "helpers", "manager", "core", "impl", "misc"}

HEAVY = {"torch", "torchvision", "cv2", "PIL", "simplejpeg"}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module: where, what, and how."""

    line: int
    target: str
    for_types_only: bool


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    text: str
    imports: tuple[Import, ...]

    @property
    def part(self) -> str:
        pieces = self.name.split(".")
        return pieces[0] if len(pieces) == 1 else pieces[1]

    def at(self, line: int) -> str:
        return f"{self.name}:{line}"


Tree = dict[str, Module]


def read_tree(root: Path) -> Tree:
    """Every module below `root`/streamload, by its full name."""
    modules: Tree = {}
    for path in sorted((root / "streamload").rglob("*.py")):
        pieces = path.relative_to(root).with_suffix("").parts
        name = ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)
        text = path.read_text()
        tree = ast.parse(text)
        imports = tuple(_imports(tree, pieces))
        modules[name] = Module(name, path, tree, text, imports)
    return modules


def _imports(node: ast.AST, pieces: tuple[str, ...], types_only: bool = False) -> Iterator[Import]:
    """The import statements, in functions too, with whether they stand below TYPE_CHECKING."""
    types_only = types_only or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(child.lineno, alias.name, types_only) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = pieces[: len(pieces) - child.level] if child.level else ()
            base = ".".join([*package, *([child.module] if child.module else [])])
            yield from (Import(child.lineno, f"{base}.{alias.name}", types_only) for alias in child.names)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _imports(child, pieces, types_only)


def _ours(tree: Tree, target: str) -> str | None:
    """The module of ours that an import reads: the longest prefix of its name that is one."""
    pieces = target.split(".")
    if pieces[0] != "streamload":
        return None
    for end in range(len(pieces), 0, -1):
        if (name := ".".join(pieces[:end])) in tree:
            return name
    return pieces[0]


# -- the rules: each returns what breaks it ------------------------------------------------------------------------


def upward_imports(tree: Tree) -> list[str]:
    """Imports of a higher part, of a neighbour on the same level, or between parts that have no level."""
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    found = [
        f"{module.name}: the part {module.part!r} has no level" for module in tree.values() if module.part not in level
    ]
    for module in tree.values():
        for item in module.imports:
            target = _ours(tree, item.target)
            if target is None or (item.for_types_only and module.name == "streamload"):
                continue
            part = tree[target].part if target in tree else target
            if part != module.part and level.get(part, len(LEVELS)) >= level.get(module.part, -1):
                found.append(f"{module.at(item.line)} ({module.part}) imports {target} ({part})")
    return found


def import_circles(tree: Tree) -> list[str]:
    """Modules that import each other, however long the way round; the types of arguments are known both ways."""
    reads = {
        name: {
            target
            for item in module.imports
            # A module's own package is imported with it, but `streamload` itself imports nothing by that.
            if not item.for_types_only and (target := _ours(tree, item.target)) not in (None, name, "streamload")
        }
        for name, module in tree.items()
    }
    try:
        graphlib.TopologicalSorter(reads).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def meaningless_names(tree: Tree) -> list[str]:
    """Modules, folders and classes whose name says nothing."""
    found = [name for name in tree if FORBIDDEN_NAMES & set(name.lower().split("."))]
    for module in tree.values():
        for node in _nodes(module.tree):
            if isinstance(node, ast.ClassDef) and node.name.strip("_").lower() in FORBIDDEN_NAMES:
                found.append(f"{module.at(node.lineno)} {node.name}")
    return found


def private_names_in_tests(tests: Path) -> list[str]:
    """Where a test imports or patches a private name of ours; ruff finds where one reads a private attribute.

    What only a private name can reach is a missing parameter.
    """
    private = re.compile(r"""^from streamload[\w.]* import [^\n]*\b_\w|['"]streamload[\w.]*\._[a-z]""", re.MULTILINE)
    return [str(path) for path in tests.rglob("*.py") if private.search(path.read_text())]


def long_names_of_tests(tests: Path) -> list[str]:
    """Names of tests with more than 70 letters."""
    return [name for path in tests.rglob("test_*.py") for name in re.findall(r"def (test_\w{66,})", path.read_text())]


def too_large(tree: Tree) -> list[str]:
    """The whole, if it has more lines of code than it may."""
    lines = sum(map(code_lines, tree.values()))
    return [f"there are {lines:,} lines of code"] if lines > MOST_LINES_OF_CODE else []


def too_much_state(tree: Tree) -> list[str]:
    """Classes with too many attributes that change after construction."""
    found = []
    for module in tree.values():
        for node in _nodes(module.tree):
            if isinstance(node, ast.ClassDef):
                changing = len(_changing(node))
                if changing > MOST_CHANGING_ATTRIBUTES:
                    found.append(f"{module.at(node.lineno)} {node.name} changes {changing} attributes")
    return found


def _changing(node: ast.ClassDef) -> set[str]:
    """The attributes of `self` that methods other than `__init__` assign."""
    names = set()
    for function in node.body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name != "__init__":
            for each in ast.walk(function):
                if (
                    isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and ast.unparse(each.value) == "self"
                ):
                    names.add(each.attr)
    return names


def asks_whether_local(tree: Tree) -> list[str]:
    """Places outside storage and fetching that ask whether a shard is local."""
    return [
        module.at(node.lineno)
        for module in tree.values()
        if module.part not in KNOWS_LOCAL
        for node in _nodes(module.tree)
        if getattr(node, "attr", None) == "is_local" or getattr(node, "id", None) == "is_local"
    ]


@functools.cache
def _nodes(tree: ast.AST) -> list[ast.AST]:
    """All below, which several rules look at."""
    return list(ast.walk(tree))


def code_lines(module: Module) -> int:
    """Lines that are neither docstrings, nor comments, nor blank."""
    lines = {
        number for number, line in enumerate(module.text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"
    }
    for node in _nodes(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


RULES: list[Callable[[Tree], list[str]]] = [
    upward_imports,
    import_circles,
    meaningless_names,
    too_large,
    too_much_state,
    asks_whether_local,
]


def test_the_source_keeps_the_rules() -> None:
    source = read_tree(ROOT)
    assert len(source) > 50
    assert {rule.__name__: rule(source) for rule in RULES} == {rule.__name__: [] for rule in RULES}
    assert private_names_in_tests(ROOT / "tests") == []
    assert long_names_of_tests(ROOT / "tests") == []


def loaded_by(libraries: set[str], *modules: str) -> str:
    """Which of the libraries a fresh process has imported after each of our modules."""
    loop = f"for name in {modules!r}: importlib.import_module(name); print(name, *({libraries!r} & sys.modules.keys()))"
    command = [sys.executable, "-c", f"import importlib, sys\n{loop}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_a_fresh_process_loads_no_heavy_library() -> None:
    """What a feeder and a worker start with may not even import NumPy: they are bound to the trainer's life first."""
    starts = "streamload.feeder.start", "streamload.workers.worker_start"
    assert loaded_by({"numpy", "asyncio", "cloudpickle"}, *starts).split() == [*starts]
    processes = "streamload", "streamload.workers.worker", "streamload.feeder.process", "streamload.cli.main"
    assert loaded_by(HEAVY, *processes).split() == [*processes]


@pytest.mark.parametrize(("platform", "says"), [("win32", "on Windows use WSL2"), ("darwin", "")])
def test_windows_is_refused_with_what_to_use(platform: str, says: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import streamload"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == (says != "")
    assert done.stderr.rstrip().endswith(says)


# -- every rule can fail -------------------------------------------------------------------------------------------


BROKEN = {
    "__init__.py": "",
    "attic/box.py": "",  # has no level
    "memory/manager.py": "from streamload.tar import header",
    "order/a.py": "from streamload.order.b import b\nx = shard.is_local",
    "order/b.py": "from streamload.order import c\nif TYPE_CHECKING:\n    import streamload.index.e",
    "order/c.py": "def f():\n    import streamload.order.a",
    "index/e.py": "class A:\n def f(self):\n" + "".join(f"  self.x{number} = 1\n" for number in range(9)),
}
FOUND = {
    upward_imports: {"the part 'attic' has no level", "memory.manager:1 (memory) imports", "order.b:3 (order) imports"},
    import_circles: {"streamload.order.a"},
    meaningless_names: {"streamload.memory.manager"},
    too_large: {"lines of code"},
    too_much_state: {"index.e:1 A changes 9 attributes"},
    asks_whether_local: {"order.a:2"},
}


def test_each_rule_finds_what_breaks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MOST_LINES_OF_CODE", 2)
    for name, text in BROKEN.items():
        (tmp_path / "streamload" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "streamload" / name).write_text(text)
    tree = read_tree(tmp_path)
    for rule in RULES:
        found = rule(tree)
        assert len(found) == len(FOUND[rule]), found
        assert all(any(complaint in each for each in found) for complaint in FOUND[rule]), found
