"""Calls to a feeder: what they refuse before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_shards import write_numbers

from streamload import StreamLoader


def test_an_index_in_memory_is_refused_to_workers(tmp_path: Path) -> None:
    folder = write_numbers(tmp_path, [5])
    with pytest.raises(ValueError, match="only this process can read 'memory://index': it lies in its memory"):
        StreamLoader(folder, num_workers=1, index="memory://index")
