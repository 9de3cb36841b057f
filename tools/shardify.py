"""Run the command `shardify` from a checkout: `python tools/shardify.py SOURCE DEST`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from streamload.__main__ import shardify  # noqa: E402

if __name__ == "__main__":
    shardify()
