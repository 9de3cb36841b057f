"""`python -m streamload` is the command `streamload`, for where the commands of an environment are not on the path."""

from __future__ import annotations

from streamload.cli.commands import streamload

if __name__ == "__main__":
    streamload()
