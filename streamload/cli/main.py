"""`streamload`: the commands that index, list, verify, describe, show, map and measure shards."""

from __future__ import annotations

from typing import Annotated

import typer

from streamload.cli.command import Command, show_version
from streamload.cli.shardify import map_command
from streamload.cli.shards import bench_command, index_command, ls_command, stats_command, verify_command
from streamload.cli.show import show_command

app = typer.Typer(
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Index, list, verify, describe, show, map and measure sharded tar datasets.",
)
for command in (ls_command, index_command, verify_command, stats_command, show_command, map_command, bench_command):
    app.command(command.__name__.removesuffix("_command"), cls=Command)(command)


@app.callback()
def options(
    *, version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True)] = False
) -> None:
    """Parse the options before the command."""
    del version
