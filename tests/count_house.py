"""Counts how large the house is: `python tests/count_house.py [FOLDER]`, a checkout of any commit.

Prints lines of code (without docstrings, comments and blank lines), modules, those with a single importer, those of
them that are short, messages between processes, and Protocols.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

from test_structure import ROOT, Tree, code_lines, importers, read_tree

SHORT_LINES = 60
MESSAGE_MODULES = ("feeder.messages", "decode.tasks", "workers.tasks", "log_records", "packing.work")


def count(tree: Tree) -> dict[str, int]:
    """The figures by name."""
    modules = {name: module for name, module in tree.items() if not module.path.name.startswith("__")}
    readers = importers(tree)
    single = [name for name in modules if len(readers.get(name, ())) == 1]
    classes = [
        (name, node)
        for name, module in modules.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    return {
        "lines of code": sum(code_lines(module) for module in tree.values()),
        "modules": len(modules),
        "with a single importer": len(single),
        f"of these below {SHORT_LINES} lines": sum(code_lines(modules[name]) < SHORT_LINES for name in single),
        "classes in modules of messages": sum(name.endswith(MESSAGE_MODULES) for name, _ in classes),
        "Protocols": sum(any(ast.unparse(base).startswith("Protocol") for base in node.bases) for _, node in classes),
    }


def rooms(tree: Tree) -> Counter[str]:
    """Lines of code by room."""
    found: Counter[str] = Counter()
    for module in tree.values():
        found[module.part] += code_lines(module)
    return found


def main(root: Path) -> None:
    tree = read_tree(root)
    for name, value in count(tree).items():
        print(f"{value:7,}  {name}")
    for room, lines in rooms(tree).most_common():
        print(f"{lines:7,}  {room}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
