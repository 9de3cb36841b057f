"""What to say to whoever named a folder or shards that are not there."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.errors import ShardNotFoundError, StorageError
from streamload.index.shard_names import is_shard_name
from streamload.index.unfinished import PACKING, SHARDIFY_ADVICE, STAGING
from streamload.storage.protocol import ShardInfo, Storage, escaped, protocol_of, without_secrets
from streamload.text import counted

__all__ = ["braces_error", "folder_advice", "shards_in"]

_MOST_LOOKED_INTO = 16
"""Of the folders in a folder: remotely each of them costs a request, and an ImageFolder may have thousands."""


def shards_in(storage: Storage, folder: str) -> Sequence[ShardInfo]:
    """The shards that lie in a folder, by one listing of it."""
    return [found for found in storage.list(f"{escaped(folder)}/*") if is_shard_name(found.url)]


def folder_advice(storage: Storage, folder: str) -> str:
    """What may have been meant by a folder that holds no shards; looks at what lies in it."""
    if _is_being_packed(storage, folder):
        return SHARDIFY_ADVICE
    inside = [found.url.rstrip("/") for found in storage.list(f"{escaped(folder)}/*", folders=True)]
    with_shards = next((each for each in inside[:_MOST_LOOKED_INTO] if shards_in(storage, each)), None)
    if with_shards is not None:
        every = f"{without_secrets(folder)}/**/*.tar"
        return f"folders in it do: name one of them, such as {without_secrets(with_shards)!r}, or all: {every!r}"
    if inside and protocol_of(folder) == "file":
        return f"if it is an ImageFolder (one folder a class), pack it first: shardify {folder} DESTINATION"
    if inside:
        return (
            "if it is an ImageFolder (one folder a class), pack it first, from a local copy: shardify COPY "
            f"{without_secrets(folder)}-shards"
        )
    return "check the path"


def _is_being_packed(storage: Storage, folder: str) -> bool:
    if protocol_of(folder) == "file":
        return storage.is_folder(f"{folder}/{STAGING}")
    try:
        return storage.info(f"{folder}/{PACKING}").bytes > 0
    except StorageError:
        return False


def braces_error(pattern: str, named: int, there: int, error: ShardNotFoundError) -> ShardNotFoundError:
    """The error for the first missing shard of those that braces stand for, of which some are there."""
    if not there:
        return error  # it is the name that is wrong, not the numbers
    return ShardNotFoundError(
        f"no such shard: {without_secrets(pattern)!r} names {counted(named, 'shard')}, and {there:,} of them exist; "
        "this is the first that is missing. Check the numbers in the braces, or name the folder",
        url=error.url,
    )
