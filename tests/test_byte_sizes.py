"""Numbers of bytes as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from streamload.arguments import parse_bytes


@pytest.mark.parametrize(
    ("written", "size"),
    [("256MB", 256_000_000), ("1.5 G", 1_500_000_000), ("4096", 4096), (4096, 4096), (" 2gib ", 2**31), ("1e9", 10**9)],
)
def test_sizes_are_read(written: int | str, size: int) -> None:
    assert parse_bytes("--max-bytes", written) == size


@pytest.mark.parametrize("written", ["", "MB", "-1MB", "1 MB 2", "0", "0.1B", "1e999", "nan", 0, -1, True, 1.5, None])
def test_other_sizes_are_refused(written: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match="^--max-bytes=.* must be a positive number of bytes, or a string"
    ):
        parse_bytes("--max-bytes", written)
