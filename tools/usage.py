"""The usage line of a command as manuals write it: `ls [OPTIONS] URLS...`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

__all__ = ["PlainUsage"]


class PlainUsage(TyperCommand):
    """A command whose usage line has its arguments' names without braces, which some versions of typer add."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options and arguments, in their order."""
        return [piece.removeprefix("{").replace("}", "") for piece in super().collect_usage_pieces(ctx)]
