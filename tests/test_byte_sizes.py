"""Numbers of bytes as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from streamload.arguments import parse_bytes


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("256MB", 256_000_000),
        ("256M", 256_000_000),
        ("1.5 GB", 1_500_000_000),
        ("100KiB", 102_400),
        ("4096", 4096),
        (4096, 4096),
        ("7b", 7),
        (" 2gib ", 2**31),
        ("1e9", 10**9),
    ],
)
def test_sizes_are_read(written: int | str, size: int) -> None:
    assert parse_bytes("--max-bytes", written) == size


@pytest.mark.parametrize("written", ["", "MB", "3XB", "-1MB", "1 MB 2", "0", "0.1B", "1e999", "nan", "\u0663MB", 0, -1])
def test_other_sizes_are_refused(written: int | str) -> None:
    with pytest.raises(ValueError, match=r"^--max-bytes=.* must be a positive number of bytes, or a string such as"):
        parse_bytes("--max-bytes", written)


@pytest.mark.parametrize("written", [True, 1.5, None, b"1MB"])
def test_what_is_no_size_at_all_is_refused(written: Any) -> None:
    with pytest.raises(TypeError, match="must be a positive number of bytes"):
        parse_bytes("memory_budget", written)
