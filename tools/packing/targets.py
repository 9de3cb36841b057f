"""Whether shards may go where the user wants them: what is there is neither overwritten nor mixed up unasked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape

from streamload_tools.failures import UsageError, say
from streamload_tools.packing.publishing import CLASSES, NAMES
from streamload_tools.packing.run_records import PackingRecords
from streamload_tools.packing.staging import is_being_published, is_unfinished, remove_remains
from streamload_tools.sizes import counted

from streamload.storage.protocol import Storage
from streamload.write.destination import existing_names

__all__ = ["Start", "check_local", "check_places", "check_remote", "refuse_shards"]


@dataclass(frozen=True, slots=True)
class Start:
    """How a run begins: with what is there, or anew."""

    overwrite: bool
    resume: bool


def check_places(source: str, dest: str, *, remote: bool) -> None:
    """Refuse a source and a destination that make no sense together."""
    if "://" in source:
        raise UsageError(f"SOURCE is {source!r}, but this version packs local files only")
    if remote:
        return
    real_source, real_dest = os.path.realpath(source), os.path.realpath(dest)
    if os.path.isdir(source) and os.path.commonpath([real_source, real_dest]) == real_source:
        raise UsageError(
            f"DEST {dest!r} lies in SOURCE {source!r}, where shards would be taken for a class; choose another"
        )
    if os.path.exists(dest) and not os.path.isdir(dest):
        raise UsageError(f"DEST {dest!r} is a file; give a folder")


def check_local(dest: str, splits: Sequence[str], start: Start) -> bool:
    """Refuse to write over what is there; False if there is nothing to do."""
    if is_being_published(dest):
        return True  # the shards there may be those of the run that is unfinished
    targets = _targets(dest, splits)
    for folder in targets:
        existing = NAMES.existing(folder)
        if existing and start.resume and not start.overwrite and not is_unfinished(dest):
            remove_remains(dest)
            say(_nothing_to_resume(folder, existing))
            return False
    refuse_shards(dest, splits, start)
    for folder in _left_overs(dest, targets) if splits != [""] else []:
        raise _of_another_split(folder)
    return True


def check_remote(storage: Storage, dest: str, splits: Sequence[str], start: Start) -> bool:
    """The same for a bucket, with one listing for each folder."""
    records = PackingRecords(storage, dest)
    if records.run() is not None:
        return True  # the shards there may be those of the run that is unfinished
    targets = _targets(dest, splits)
    for folder in targets:
        existing = existing_names(storage, folder, NAMES)
        if existing and start.resume and not start.overwrite:
            records.remove()
            say(_nothing_to_resume(folder, existing))
            return False
        if existing and not start.overwrite:
            raise _in_the_way(folder, existing)
    if splits != [""]:
        inside = [info.url.rstrip("/") for info in storage.list(f"{escape(dest)}/*", folders=True)]
        for folder in [dest, *inside]:
            packed_before = folder not in targets and storage.list(f"{escape(folder)}/{CLASSES}")
            if packed_before and existing_names(storage, folder, NAMES):
                raise _of_another_split(folder)
    return True


def _nothing_to_resume(folder: str, existing: Sequence[str]) -> str:
    return (
        f"note: there is no unfinished run to resume, and {folder!r} holds {counted(len(existing), 'shard')} already; "
        "to pack anew, add --overwrite"
    )


def _in_the_way(folder: str, existing: Sequence[str]) -> UsageError:
    return UsageError(
        f"{folder!r} holds {counted(len(existing), 'shard')} already; replace them with --overwrite, or choose "
        "another DEST"
    )


def _of_another_split(folder: str) -> UsageError:
    return UsageError(
        f"{folder!r} holds shards of an earlier run with another --split, or none, which would stay beside the new "
        "ones; remove them first"
    )


def _targets(dest: str, splits: Sequence[str]) -> list[str]:
    return [os.path.join(dest, split) if split else dest for split in splits]


def refuse_shards(dest: str, splits: Sequence[str], start: Start) -> None:
    """Refuse shards in the way."""
    for folder in _targets(dest, splits):
        existing = NAMES.existing(folder)
        if existing and not start.overwrite:
            raise _in_the_way(folder, existing)


def _left_overs(dest: str, targets: Sequence[str]) -> list[str]:
    """Folders of an earlier run of shardify that this one would not replace."""
    if not os.path.isdir(dest):
        return []
    folders = [dest, *(os.path.join(dest, name) for name in sorted(os.listdir(dest)) if not name.startswith("."))]
    return [
        folder
        for folder in folders
        if folder not in targets and os.path.exists(os.path.join(folder, CLASSES)) and NAMES.existing(folder)
    ]
