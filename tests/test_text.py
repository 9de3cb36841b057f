"""Words and numbers: in messages, and sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from streamload.arguments import parse_bytes
from streamload.errors import ShardFormatError
from streamload.text import counted, listed, printable


def test_counted() -> None:
    counts = [(1, "shard"), (2000, "shard"), (3, "batch"), (2, "class"), (0, "entry"), (2, "key")]
    said = ["1 shard", "2,000 shards", "3 batches", "2 classes", "0 entries", "2 keys"]
    assert [counted(*each) for each in counts] == said


def test_listed() -> None:
    assert listed([]) == ""
    assert listed(["jpg", "a.b", "cls"]) == "jpg, a.b, cls"
    names = [f"{number}.png" for number in range(20)]
    assert listed(names) == ", ".join(names)
    assert listed([*names, "cls"]) == f"cls, {', '.join(names[:19])} and 1 more"
    assert listed(names * 100).endswith(", 19.png and 1,980 more")


def test_no_name_acts_on_a_terminal() -> None:
    assert printable("ünï 日本語 👩\u200d💻\ttab\nline") == "ünï 日本語 👩\u200d💻\ttab\nline"
    assert printable("\x1b[2J\x07\r\x7f\x9b\u202e\u2028\udcff") == r"\x1b[2J\x07\r\x7f\x9b\u202e\u2028\udcff"
    assert listed(["a\x1b[31m"]) == r"a\x1b[31m"
    error = ShardFormatError("the field \x1b[31m", url="\x1b.tar", key="\x1b[2J")
    assert str(error) == r"the field \x1b[31m (shard '\x1b.tar', sample '\x1b[2J')"


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
