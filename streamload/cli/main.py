"""`streamload`: the commands that index, list, verify, describe and measure shards."""

from __future__ import annotations

from typing import Annotated

import typer

from streamload.cli.arguments import PlainUsage, show_version
from streamload.cli.bench import bench_command
from streamload.cli.index import index_command
from streamload.cli.ls import ls_command
from streamload.cli.map import map_command
from streamload.cli.show import show_command
from streamload.cli.stats import stats_command
from streamload.cli.verify import verify_command

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Index, list, verify, draw and measure sharded tar datasets.",
)
app.command("index", cls=PlainUsage, short_help="Read shards once and write their index.")(index_command)
app.command("ls", cls=PlainUsage, short_help="List shards, or every sample.")(ls_command)
app.command("verify", cls=PlainUsage, short_help="Read every byte of shards and compare it with the index.")(
    verify_command
)
app.command("stats", cls=PlainUsage, short_help="Describe a dataset in numbers.")(stats_command)
app.command("show", cls=PlainUsage, short_help="Draw samples side by side to a picture.")(show_command)
app.command("map", cls=PlainUsage, short_help="Make a dataset of another one by a function.")(map_command)
app.command("bench", cls=PlainUsage, short_help="Measure how fast a loader reads shards here.")(bench_command)


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=show_version("streamload"), is_eager=True
        ),
    ] = False,
) -> None:
    """The options before the command."""
    del version


def main() -> None:
    """The entry point `streamload`."""
    app(prog_name="streamload")


if __name__ == "__main__":
    main()
