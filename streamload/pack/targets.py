"""Checks of the destination: nothing there is overwritten, or mixed with new shards, unless the user says so."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

from streamload.index.shard_names import ShardNaming
from streamload.index.unfinished import STAGING
from streamload.pack.failures import UsageError
from streamload.pack.finished_options import changed_options
from streamload.pack.output import say
from streamload.pack.publishing import CLASSES, NAMES
from streamload.pack.remote_staging import local_folder
from streamload.pack.run_records import PackingRecords
from streamload.pack.staging import is_being_published, is_unfinished, remove_remains
from streamload.storage.protocol import Storage
from streamload.storage.storages import Storages
from streamload.text import counted
from streamload.write.destination import existing_names


@dataclass(frozen=True, slots=True)
class Place:
    """The destination.

    Attributes:
        dest: a path, or a url without a trailing slash.
        storages: with its storage, if it is remote.
        staging: the local folder to pack in, if it is remote; None is the system's folder for temporary files.
        naming: what the shards are called.
    """

    dest: str
    storages: Storages | None
    staging: str | None
    naming: ShardNaming = NAMES

    @property
    def storage(self) -> Storage | None:
        """The storage of the destination, if it is remote."""
        return None if self.storages is None else self.storages.for_url(self.dest)

    def staging_folder(self) -> str:
        """Return the folder that runs into this destination pack in. Raises OSError."""
        if self.storage is None:
            return os.path.join(self.dest, STAGING)
        return local_folder(self.dest, self.staging)


@dataclass(frozen=True, slots=True)
class Start:
    """What to do with what is in the destination."""

    overwrite: bool
    resume: bool


def check_places(source: str, dest: str, *, remote: bool) -> None:
    """Raise UsageError if source and destination do not fit together."""
    if "://" in source:
        raise UsageError(f"SOURCE is {source!r}, but this version packs local files only")
    if remote:
        return
    real_source, real_dest = os.path.realpath(source), os.path.realpath(dest)
    if os.path.isdir(source) and os.path.commonpath([real_source, real_dest]) == real_source:
        raise UsageError(
            f"DEST {dest!r} lies in SOURCE {source!r}, where the shards would look like a class; choose another"
        )
    if os.path.exists(dest) and not os.path.isdir(dest):
        raise UsageError(f"DEST {dest!r} is a file; give a folder")


def check_destination(place: Place, splits: Sequence[str], start: Start, options: Mapping[str, Any]) -> bool:
    """Whether there is something to do at a destination.

    Args:
        place: the destination.
        splits: the names of its folders, or "" for itself.
        start: what to do with what is there.
        options: which the bytes of the shards depend on.

    Raises:
        UsageError: there are shards already, and they are not to be replaced; or they are to be resumed with options
            other than theirs.
        StorageError, OSError: it cannot be read.
    """
    records = None if place.storage is None else PackingRecords(place.storage, place.dest)
    in_flight = is_being_published(place.dest) if records is None else records.run() is not None
    if in_flight:
        return True  # the shards there may be those of the unfinished run
    folders = _folders(place.dest, splits)
    resumes = start.resume and not start.overwrite and not (records is None and is_unfinished(place.dest))
    for folder in folders if resumes else ():
        existing = _existing(place, folder)
        if existing:
            changed = changed_options(folder, place.storage, options)
            if changed is not None:
                raise UsageError(
                    f"{folder!r} is finished, and was packed with other options: {changed}; to pack again, replace "
                    "--resume by --overwrite, or choose another DEST"
                )
            if records is not None:
                records.remove()
            remove_remains(place.staging_folder(), place.dest)
            say(
                f"note: there is no unfinished run to resume, and {folder!r} holds {counted(len(existing), 'shard')} "
                "already; to pack again, add --overwrite"
            )
            return False
    refuse_shards(place, splits, start)
    for folder in _other_folders(place) if splits != [""] else ():
        if folder not in folders and _existing(place, folder):
            raise UsageError(
                f"{folder!r} holds shards of an earlier run with another --split, or none, which would stay beside "
                "the new ones; remove them first"
            )
    return True


def refuse_shards(place: Place, splits: Sequence[str], start: Start) -> None:
    """Raise UsageError if there are shards that are not to be replaced."""
    for folder in _folders(place.dest, splits) if not start.overwrite else ():
        existing = _existing(place, folder)
        if existing:
            raise UsageError(
                f"{folder!r} holds {counted(len(existing), 'shard')} already; replace them with --overwrite, or choose "
                "another DEST"
            )


def _folders(dest: str, splits: Sequence[str]) -> list[str]:
    return [os.path.join(dest, split) if split else dest for split in splits]


def _existing(place: Place, folder: str) -> list[str]:
    """The names of the shards in a folder."""
    if place.storage is None:
        return place.naming.existing(folder)
    return existing_names(place.storage, folder, place.naming)


def _other_folders(place: Place) -> list[str]:
    """The destination and the folders in it with a `classes.json`, as earlier runs of shardify leave them."""
    if place.storage is not None:
        inside = place.storage.list(f"{escape(place.dest)}/*", folders=True)
        folders = [place.dest, *(info.url.rstrip("/") for info in inside)]
        return [folder for folder in folders if place.storage.list(f"{escape(folder)}/{CLASSES}")]
    names = sorted(os.listdir(place.dest)) if os.path.isdir(place.dest) else ()
    folders = [place.dest, *(os.path.join(place.dest, name) for name in names if not name.startswith("."))]
    return [folder for folder in folders if os.path.exists(os.path.join(folder, CLASSES))]
