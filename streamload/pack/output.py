"""Lines and JSON on standard output, lines on standard error, and the form of numbers and tables in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer

from streamload.text import printable


def print_line(line: str) -> None:
    """Print a line on standard output; `printable`, since keys and fields are whatever an archive contains."""
    _print(printable(line))


def print_document(document: Any) -> None:
    """Print a JSON document, the only one of a command, on standard output."""
    _print(json.dumps(document, indent=2))


def print_array(items: Iterable[Any]) -> None:
    """Print a JSON document that is an array, an item a line, none of which is kept."""
    before = "["
    for item in items:
        _print(f"{before}\n{json.dumps(item)}", end="")
        before = ","
    _print("[]" if before == "[" else "\n]")


def say(line: str) -> None:
    """Print a line on standard error; `printable`."""
    typer.echo(printable(line), err=True)


def _print(text: str, end: str = "\n") -> None:
    try:
        typer.echo(text + end, nl=False)
    except OSError as exc:  # a full disk
        exc.filename = "standard output"
        raise


def aligned(rows: Sequence[Sequence[str]], *, numbers: int) -> Iterator[str]:
    """The rows as lines in columns: names to the left, and behind the first column so many numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{text:>{w}}" if 0 < n <= numbers else f"{text:<{w}}"
            for n, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def shown_bytes(size: float) -> str:
    """Bytes in a suitable unit, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def shown_time(seconds: float) -> str:
    """Seconds as `12 s`, `3:04` or `1:02:03`; under ten with a decimal."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
