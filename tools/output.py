"""Lines on standard output and standard error, and the form of numbers and tables in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import typer

from streamload.text import printable

__all__ = ["aligned", "print_line", "say", "shown_bytes", "shown_time"]


def print_line(line: str) -> None:
    """Print a line on standard output; `printable`, since keys and fields are whatever an archive contains."""
    typer.echo(printable(line))


def say(line: str) -> None:
    """Print a line on standard error; `printable`."""
    typer.echo(printable(line), err=True)


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
