"""The arguments and options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from streamload.pack.failures import EXIT_STATUS, UsageError
from streamload.tar.header_chain import RECORD_BYTES

_WORDS = {"true": True, "false": False, "null": None}

Urls = Annotated[
    list[str],
    typer.Argument(
        help="Shards, patterns (braces, globs) or folders: local paths, or s3://, gs://, az://, https:// and the like.",
        metavar="URLS",
        show_default=False,
    ),
]
Index = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="The folder of the index, if it is not beside the shards.")
]
Where = Annotated[
    str | None, typer.Option(metavar="CONDITION", help="Only samples that meet it, as 'label == 3 and \"txt\"'.")
]
Workers = Annotated[int | None, typer.Option(metavar="N", help="Shards to read at once. Default: one per core.", min=1)]
RecordSize = Annotated[
    int,
    typer.Option(
        metavar="BYTES", min=RECORD_BYTES, help="The largest record of the archives, as `tar -b` wrote them (512 each)."
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Work on the nodes of this Ray cluster, which must see the same files: HOST:PORT, or auto for the one "
        "that this machine belongs to.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="An option of the storage in fsspec's spelling, such as endpoint_url=..., key=..., secret=... or "
        "anon=true; repeatable. A value in braces is JSON: s3={...} holds the options of one protocol. Default: the "
        "credentials that the storage's own tools find.",
    ),
]


class PlainUsage(TyperCommand):
    """A command whose usage line is `ls [OPTIONS] URLS...`; some versions of typer put arguments in braces, and their
    types behind their names.

    Its help ends with the examples, which stand last in the docstring, line by line, and the exit status.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help, _, examples = (self.help or "").partition("\n\nExamples:\n")
        shown = f"Examples:\n\n\b\n{examples}\n\n" if examples else ""
        self.epilog = shown + EXIT_STATUS

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options and arguments, in their order."""
        return [piece.removeprefix("{").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The arguments and the options, each with its help."""
        records = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        shown = [(param.param_type_name, record) for param, record in records if record is not None]
        arguments = [(name.partition(" ")[0], text) for kind, (name, text) in shown if kind == "argument"]
        options = [record for kind, record in shown if kind != "argument"]
        for title, lines in (("Arguments", arguments), ("Options", options)):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


def show_version(command: str) -> Callable[[bool], None]:
    """A callback for `--version` that prints the version and exits."""

    def show(requested: bool) -> None:
        if requested:
            typer.echo(f"{command} {version('streamload')}")
            raise typer.Exit

    return show


def parse_storage_options(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parse `KEY=VALUE` texts. `true`, `false` and `null` are values of Python, and a value in braces is JSON.

    Numbers stay text, since keys and secrets may look like numbers.

    Raises:
        UsageError: a text is not KEY=VALUE, a key is repeated, or a value in braces is not JSON.
    """
    options: dict[str, Any] = {}
    for number, text in enumerate(texts or (), 1):
        key, equals, value = text.partition("=")
        if not key or not equals:  # the text may be a secret
            raise UsageError(
                f"--storage-option number {number}: give KEY=VALUE, as in endpoint_url=http://127.0.0.1:9000"
            )
        if key in options:
            raise UsageError(f"--storage-option {key!r} is given twice")
        options[key] = _value(key, value)
    return options


def _value(key: str, text: str) -> Any:
    if not text.startswith("{"):
        return _WORDS.get(text, text)
    try:
        return json.loads(text)
    except ValueError as exc:
        raise UsageError(f"--storage-option {key!r}: the value in braces is not JSON ({exc})") from exc
