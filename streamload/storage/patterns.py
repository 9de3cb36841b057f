"""Patterns of several components, of which `**` stands for any number of folders, none included."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.storage.protocol import matches

ANY_FOLDERS = "**"
"""As a whole component; within one it is no more than `*`, as everywhere."""


def pattern_steps(components: Sequence[str]) -> list[str]:
    """The components of a pattern, from which the same follows in fewer steps; the last one is never `**`.

    Several `**` in a row are one. At the end it stands for everything at any depth, which is `**/*`.
    """
    steps: list[str] = []
    for component in components:
        if component != ANY_FOLDERS or steps[-1:] != [ANY_FOLDERS]:
            steps.append(component)
    return [*steps, "*"] if steps[-1:] == [ANY_FOLDERS] else steps


def fits(path: str, steps: Sequence[str]) -> bool:
    """Whether a path, relative to where the pattern begins, is one that it stands for.

    Args:
        path: without a slash at either end.
        steps: see `pattern_steps`. Folders that are hidden are passed by what names them as hidden, not by `**`.
    """
    return _fit(path.split("/"), steps)


def _fit(names: Sequence[str], steps: Sequence[str]) -> bool:
    if not steps or not names:
        return not steps and not names
    if steps[0] != ANY_FOLDERS:
        return matches(names[0], steps[0]) and _fit(names[1:], steps[1:])
    return _fit(names, steps[1:]) or (not names[0].startswith(".") and _fit(names[1:], steps))
