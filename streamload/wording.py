"""Numbers of things, and lists of names, as people write them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "listed"]

_MOST_LISTED = 20


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`, `3 batches`, `0 entries`."""
    if noun.endswith("y") and noun[-2] not in "aeo":
        plural = f"{noun[:-1]}ies"
    else:
        plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Sequence[str]) -> str:
    """`jpg, cls`; of very many the first 20, those without a dot before others, `and 1,234 more`."""
    if len(names) <= _MOST_LISTED:
        return ", ".join(names)
    shown = sorted(names, key=lambda name: "." in name)[:_MOST_LISTED]
    return f"{', '.join(shown)} and {len(names) - _MOST_LISTED:,} more"
