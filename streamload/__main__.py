"""The entry points `shardify` and `streamload`; `python -m streamload` runs the latter.

Ctrl-C raises KeyboardInterrupt only while a command runs; before and after, it ends the process without a traceback.
"""

from __future__ import annotations

import signal
from importlib import import_module


def shardify() -> None:
    """Run `shardify` with the arguments of this process."""
    _run("streamload.cli.shardify", "shardify")


def streamload() -> None:
    """Run `streamload` with the arguments of this process."""
    _run("streamload.cli.main", "streamload")


def _run(module: str, name: str) -> None:
    if is_on := signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a script's `&` turns Ctrl-C off
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import_module(module).app(prog_name=name)
    finally:
        if is_on:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    streamload()
