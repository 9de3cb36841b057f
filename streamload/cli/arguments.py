"""The arguments and options that several commands share, each defined once."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from streamload.tar.header_chain import RECORD_BYTES

_WORDS = {"true": True, "false": False, "null": None}


def parse_storage_option(text: str) -> tuple[str, Any]:
    """Return one `KEY=VALUE` as a pair. `true`, `false`, `null` and JSON in braces are converted; numbers stay text.

    Raises:
        BadParameter: the text is not KEY=VALUE, or its braces are not JSON. It never quotes the text, which may be a
            secret.
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter("give KEY=VALUE, as in endpoint_url=http://127.0.0.1:9000")
    if not value.startswith("{"):
        return key, _WORDS.get(value, value)
    try:
        return key, json.loads(value)
    except ValueError as exc:
        raise typer.BadParameter(f"{key}: the value in braces is not JSON ({exc}); correct it") from None


def show_version(command: str) -> Callable[[bool], None]:
    """Return a callback of `--version` that prints the version and exits."""

    def show(requested: bool) -> None:
        if requested:
            typer.echo(f"{command} {version('streamload')}")
            raise typer.Exit

    return show


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
        help="An option of the storage in fsspec's spelling, such as endpoint_url=..., key=..., secret=... or "
        "anon=true; repeatable. A value in braces is JSON: s3={...} holds the options of one protocol. Default: the "
        "credentials that the storage's own tools find.",
    ),
]
Index = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="The folder of the index, if it is not beside the shards.")
]
Where = Annotated[str | None, typer.Option(help="Select samples, as in 'label == 3 and \"txt\"'.")]
Fields = Annotated[str | None, typer.Option(metavar="FIELDS", help="Read only these fields, as in 'jpg;png,cls,txt?'.")]
Seed = Annotated[int | None, typer.Option(help="Choose at random, by this seed.", min=0)]
Workers = Annotated[int | None, typer.Option(help="Shards to read at once. Default: one per core.", min=1)]
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
