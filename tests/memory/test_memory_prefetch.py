"""Slots that are given away while batches in them have not reached the loop yet."""

from __future__ import annotations

import os
import time
from pathlib import Path

from make_shards import write_numbers

from streamload import StreamLoader


def test_batches_made_far_ahead_survive_a_len_in_the_middle_of_the_loop(tmp_path: Path) -> None:
    """Counting takes messages from the feeder ahead of the loop; slots retired by these may hold batches to come."""
    source = write_numbers(tmp_path / "shards", [200] * 4, index=False)
    made = tmp_path / "made"
    made.touch()

    def count(value: int) -> int:
        descriptor = os.open(made, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, b".")
        os.close(descriptor)
        return value

    seen = []
    with StreamLoader(
        source, 1, fields=("cls",), transform={"cls": count}, num_workers=1, prefetch_batches=1000
    ) as loader:
        for (number,) in loader:
            if not seen:
                while made.stat().st_size < 800:  # until all batches wait for the loop
                    time.sleep(0.01)
                assert len(loader) == 800
            seen.append(int(number))
    assert seen == list(range(800))
