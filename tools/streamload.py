"""Run the command `streamload` from a checkout: `python tools/streamload.py COMMAND`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's folder would hide the package

from streamload.__main__ import streamload  # noqa: E402

if __name__ == "__main__":
    streamload()
