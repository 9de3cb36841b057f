"""Options, exit statuses and printing that the commands share."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from streamload.errors import StreamloadError
from streamload.pack.run import UsageError, say
from streamload.text import printable

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
_REMOVED = {
    "--crop": "leave it out; images are cropped to 224 pixels",
    "--field": "use `stats --pixels`",
    "--json": "use `ls --samples --json`",
    "--partition": "give --split-column, with the table of labels as the source",
    "--plot": "use `loader.trace`, which records a run for Perfetto",
    "--ray": "leave it out; this command runs on one machine",
    "--record-size": "leave it out",
    "--staging": "set TMPDIR",
    "--sync": "run `sync` afterwards",
    "--where": "use `show --where`, or where= of a StreamLoader; len(loader.dataset) counts the samples",
}
EXIT_STATUS = "Exit status: 0 success; 1 failed, or damage found; 2 wrong usage; 130 ended by Ctrl-C."


class Command(TyperCommand):
    """Run a command, and turn its errors into one message and an exit status. The help lists the statuses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        paragraphs = (self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(p.split()) if p[:8] != "Examples" else p for p in paragraphs)
        self.epilog = EXIT_STATUS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; refuse removed options with advice."""
        known = {name for parameter in self.params for name in parameter.opts}
        for name in (arg.partition("=")[0] for arg in args):
            if name in _REMOVED and name not in known:
                raise typer.BadParameter(f"there is no {name}: {_REMOVED[name]}", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turn errors that a user can cause into a message and an exit status."""
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `streamload.__main__`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `streamload ls ... | head`: typer exits silently
        except (StreamloadError, ValueError, OSError, KeyboardInterrupt) as exc:
            status, message = FAILED, f"error: {exc}"
            if isinstance(exc, UsageError):
                status = WRONG_USAGE
            elif isinstance(exc, OSError):
                message = f"error: cannot read or write {exc.filename or 'a file'}: {exc.strerror or exc}"
            elif isinstance(exc, KeyboardInterrupt):
                status, message = INTERRUPTED, "interrupted"
            say("; ".join([message, *getattr(exc, "__notes__", ())]))
            raise typer.Exit(status) from exc


def print_line(line: str) -> None:
    """Print a line, with control characters escaped."""
    _print(printable(line))


def print_document(document: Any) -> None:
    """Print a JSON document."""
    _print(json.dumps(document, indent=2))


def print_array(items: Iterable[Any]) -> None:
    """Print a JSON array, one item per line, without holding all items in memory."""
    before = "["
    for item in items:
        _print(f"{before}\n{json.dumps(item)}", end="")
        before = ","
    _print("[]" if before == "[" else "\n]")


def print_table(rows: Sequence[Sequence[str]], numbers: int) -> None:
    """Print rows in columns; the `numbers` columns after the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if 0 < column <= numbers else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print_line("  ".join(cells).rstrip())


def _print(text: str, end: str = "\n") -> None:
    try:
        typer.echo(text + end, nl=False)
    except OSError as exc:  # a full disk
        exc.filename = "standard output"
        raise


def parse_storage_option(text: str) -> tuple[str, Any]:
    """Parse one `KEY=VALUE`; `true`, `false`, `null` and JSON in braces are converted. Errors never show the value."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter("give KEY=VALUE, as in endpoint_url=http://127.0.0.1:9000")
    try:
        return key, json.loads(value) if value in ("true", "false", "null") or value.startswith("{") else value
    except ValueError as exc:
        raise typer.BadParameter(f"{key}: the value in braces is not JSON ({exc}); correct it") from None


def show_version(context: typer.Context, requested: bool) -> None:
    """Print the version and exit, for `--version`."""
    if requested:
        typer.echo(f"{context.info_name} {version('streamload')}")
        raise typer.Exit


Urls = Annotated[
    list[str],
    typer.Argument(
        help="Shards, patterns (braces, globs) or folders: local paths, or s3://, gs://, az://, https:// and the like.",
        metavar="URLS",
        show_default=False,
    ),
]
StorageOption = Annotated[
    list[Any] | None,
    typer.Option(
        "--storage-option",
        parser=parse_storage_option,
        metavar="KEY=VALUE",
        help="A storage option as fsspec spells it, such as endpoint_url=..., key=... or anon=true; "
        "repeatable. s3={...} gives the options of one protocol as JSON.",
    ),
]
Index = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="The index's folder, if it is not beside the shards.")
]
Where = Annotated[str | None, typer.Option(help="Select samples, as in 'label == 3 and \"txt\"'.")]
Fields = Annotated[str | None, typer.Option(metavar="FIELDS", help="Read only these fields, as in 'jpg;png,cls,txt?'.")]
Workers = Annotated[int | None, typer.Option(help="Shards to read in parallel. Default: 1 (Ray: 4) per core.", min=1)]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray cluster: HOST:PORT, or auto (RAY_ADDRESS or this machine's). Nodes need the files at the same paths.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
