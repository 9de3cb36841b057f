"""`--storage-option key=value`: what a storage needs to know, such as credentials."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from streamload_tools.failures import UsageError

__all__ = ["StorageOption", "parse_storage_options"]

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="What the storage needs to know, as KEY=VALUE in fsspec's spellings: endpoint_url=..., key=..., "
        "secret=..., anon=true. A value in braces is JSON, as in s3={...} for one protocol of several. May be given "
        "several times. Default: as the storage's own tools find it.",
    ),
]
"""The option as a command declares it."""

_WORDS = {"true": True, "false": False, "null": None}


def parse_storage_options(texts: Sequence[str]) -> dict[str, Any]:
    """The options by their keys. `true`, `false` and `null` are what they say, and what stands in braces is JSON.

    Numbers stay text, since keys and secrets may look like numbers.

    Raises:
        UsageError: a text is not KEY=VALUE, a key comes twice, or what stands in braces is not JSON.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"--storage-option {key!r}: give KEY=VALUE, as in endpoint_url=http://127.0.0.1:9000")
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
        raise UsageError(f"--storage-option {key!r}: what stands in braces is not JSON ({exc})") from exc
