"""Numbers of things in messages: one is singular, and no message has a plural written behind a number by hand."""

from __future__ import annotations

from pathlib import Path

from streamload.errors import ShardFormatError
from streamload.text import counted, listed, printable

ROOT = Path(__file__).resolve().parents[1]


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
