"""Numbers of things, as people write them."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`, `3 batches`, `0 entries`."""
    if noun.endswith("y") and noun[-2] not in "aeo":
        plural = f"{noun[:-1]}ies"
    else:
        plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
