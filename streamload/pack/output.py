"""Lines on standard error, and the form of numbers in them."""

from __future__ import annotations

import typer

from streamload.text import printable


def say(line: str) -> None:
    """Print a line on standard error; `printable`."""
    typer.echo(printable(line), err=True)


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
