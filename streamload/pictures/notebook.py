"""Tables for notebooks: on its own because loaders and datasets show themselves alike."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from streamload.text import printable

__all__ = ["html_table"]


def html_table(title: str, rows: Mapping[str, str], note: str = "") -> str:
    """A table of names and values, with a title and perhaps a note below; everything in it is escaped."""
    cells = "".join(
        f'<tr><td style="text-align:left">{_escaped(name)}</td><td style="text-align:left">{_escaped(value)}</td></tr>'
        for name, value in rows.items()
    )
    below = f"<em>{_escaped(note)}</em>" if note else ""
    return f"<div><strong>{_escaped(title)}</strong><table>{cells}</table>{below}</div>"


def _escaped(text: str) -> str:
    return escape(printable(text))
