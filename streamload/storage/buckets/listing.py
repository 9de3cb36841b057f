"""What a pattern stands for in a bucket: by listings of one level each, and of all below a prefix for `**`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from streamload.storage.patterns import ANY_FOLDERS, fits, pattern_steps
from streamload.storage.protocol import is_pattern, matches

__all__ = ["ObjectListing"]


class ObjectListing:
    """Looks up patterns in one bucket.

    Args:
        level: lists what lies right below a prefix: its `objects` and `common_prefixes`, as obstore gives them.
        below: lists all objects below a prefix, at any depth, of whose paths a function says so.
    """

    def __init__(self, level: Callable[[str], Any], below: Callable[[str, Callable[[str], bool]], list[Any]]) -> None:
        self._level = level
        self._below = below

    def objects(self, components: Sequence[str]) -> list[Any]:
        """The objects whose keys the components of a pattern stand for, each once, as obstore describes them."""
        prefixes, steps = self._prefixes(components)
        if steps[0] != ANY_FOLDERS:
            return [meta for prefix in prefixes for meta in self._objects(prefix, steps[0])]
        return [meta for prefix in prefixes for meta in self._below(prefix, partial(_fits_below, prefix, steps))]

    def folders(self, components: Sequence[str]) -> list[str]:
        """The folders (what keys have before a slash) that the components stand for, each once."""
        prefixes, steps = self._prefixes(components)
        if steps[0] != ANY_FOLDERS:
            return [found for prefix in prefixes for found in self._folders(prefix, steps[0])]
        return [
            f"{prefix}/{folder}".lstrip("/")
            for prefix in prefixes
            for folder in _folders_of(_relative(meta["path"], prefix) for meta in self._below(prefix, lambda _: True))
            if fits(folder, steps)
        ]

    def _prefixes(self, components: Sequence[str]) -> tuple[Sequence[str], list[str]]:
        """Where to look, and the steps of the pattern from there on: one, or as many as there are from `**` on."""
        steps = pattern_steps(components) or ["*"]
        first = next((number for number, step in enumerate(steps) if is_pattern(step)), len(steps) - 1)
        prefixes: Sequence[str] = ["/".join(steps[:first])]
        while first < len(steps) - 1 and steps[first] != ANY_FOLDERS:
            prefixes = [match for prefix in prefixes for match in self._folders(prefix, steps[first])]
            first += 1
        return prefixes, steps[first:]

    def _folders(self, prefix: str, component: str) -> Sequence[str]:
        if not is_pattern(component):
            return [f"{prefix}/{component}".lstrip("/")]
        return [found for found in self._level(prefix)["common_prefixes"] if matches(found, component)]

    def _objects(self, prefix: str, component: str) -> Sequence[Any]:
        return [meta for meta in self._level(prefix)["objects"] if matches(meta["path"], component)]


def _fits_below(prefix: str, steps: Sequence[str], path: str) -> bool:
    return fits(_relative(path, prefix), steps)


def _relative(path: str, prefix: str) -> str:
    return path[len(prefix) :].strip("/")


def _folders_of(paths: Iterable[str]) -> set[str]:
    """All folders in which paths lie, at any depth."""
    found: set[str] = set()
    for path in paths:
        while (path := path.rpartition("/")[0]) and path not in found:
            found.add(path)
    return found
