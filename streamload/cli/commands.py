"""The entry points `shardify` and `streamload`.

The module is on its own because it imports the commands late, so that Ctrl-C during the imports ends with one line too.
"""

from __future__ import annotations

import sys
from importlib import import_module


def shardify() -> None:
    """Run `shardify` with the arguments of this process."""
    _run("streamload.cli.shardify")


def streamload() -> None:
    """Run `streamload` with the arguments of this process."""
    _run("streamload.cli.main")


def _run(module: str) -> None:
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        _say_interrupted()
        raise SystemExit(130) from None
    except SystemExit as end:
        # typer raises this for Ctrl-C while it parses arguments; `reported_errors` sets no cause.
        if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
            _say_interrupted()
        raise
    finally:
        # Ctrl-C while the interpreter ends would print a traceback: so it ends the process, which shells report as 130.
        signal = import_module("signal")
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _say_interrupted() -> None:
    sys.stderr.write("interrupted\n")
