"""What to say of a sample that lacks a wanted field: the fields that it has, and which alternative may be meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamload.dataset.table import ShardTable
from streamload.decode.decoders import is_image
from streamload.decode.tasks import RowFailure

__all__ = ["with_fields"]

_SOUNDS = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac")
_FILMS = ("mp4", "webm", "mkv", "avi", "mov")


def with_fields(failure: RowFailure, table: ShardTable, wanted: Sequence[str] | None) -> RowFailure:
    """A failure with more to say in its message if it is that of a missing field.

    Args:
        failure: any.
        table: of its shard.
        wanted: the fields that were asked for; None for all.
    """
    if not failure.missing_field or failure.field is None:
        return failure
    existing = table.sample_fields(failure.sample)
    message = f"{failure.message}; it has {', '.join(existing)}"
    others = {name for entry in wanted or () for name in entry.split(";")}
    instead = next((name for name in existing if name not in others and _alike(name, failure.field)), None)
    if instead is not None:
        message += f'; to take either, write "{failure.field};{instead}" in fields'
    return replace(failure, message=message)


def _alike(name: str, wanted: str) -> bool:
    """Whether a field may stand for a wanted one: an image for an image, but not a mask, as `seg.png`, for a photo."""
    return any(_sort(name) == _sort(entry) != ("", "") for entry in wanted.split(";"))


def _sort(name: str) -> tuple[str, str]:
    """What a field is named before its last extension, and what that stands for; empty where that is not known."""
    before, _, extension = name.rpartition(".")
    if is_image(extension):
        return before, "image"
    if extension in _SOUNDS:
        return before, "sound"
    return (before, "film") if extension in _FILMS else ("", "")
