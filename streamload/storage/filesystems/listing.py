"""What a pattern stands for in a filesystem of fsspec: by one listing of each folder that it leads to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from streamload.errors import StorageError
from streamload.storage.filesystems.opening import OpenFilesystem, shard_info
from streamload.storage.local import LocalStorage
from streamload.storage.patterns import ANY_FOLDERS, pattern_steps
from streamload.storage.protocol import UNKNOWN_BYTES, ShardInfo, is_pattern, matches, without_secrets

__all__ = ["find_matches"]

_DEEPEST = 32
"""Folders in each other; more of them are a link that leads back to where it lies."""


async def find_matches(opened: OpenFilesystem, path: str, *, folders: bool) -> Sequence[ShardInfo]:
    """The files, or the folders, that a pattern stands for, in the order of their urls; see `Storage.list`.

    Links count as what they lead to.
    """
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(opened.fs, LocalFileSystem):  # which tells links from files in listings, and can be led round by them
        found = await asyncio.to_thread(LocalStorage().list, path, folders=folders)
        return [_local_info(opened, match, folders=folders) for match in found]
    components = path.split("/")
    first = next((number for number, part in enumerate(components) if is_pattern(part)), len(components) - 1)
    *between, last = pattern_steps(components[first:])
    prefixes = ["/".join(components[:first])]
    for step in between:
        prefixes = [*dict.fromkeys(await _folders(opened, prefixes, step))]
    kind = "directory" if folders else "file"
    entries = [entry for prefix in prefixes for entry in await _level(opened, prefix, last, kind=kind)]
    if folders:
        return [ShardInfo(url, UNKNOWN_BYTES, 0) for url in sorted(opened.url(str(entry["name"])) for entry in entries)]
    return sorted((shard_info(opened.url(entry["name"]), entry) for entry in entries), key=lambda info: info.url)


def _local_info(opened: OpenFilesystem, match: ShardInfo, *, folders: bool) -> ShardInfo:
    """As the filesystem describes it, with the version that it will give to the answers."""
    url = opened.url(match.url)
    if folders or match.bytes == UNKNOWN_BYTES:
        return ShardInfo(url, UNKNOWN_BYTES, 0)
    return shard_info(url, opened.fs.info(match.url))


async def _folders(opened: OpenFilesystem, prefixes: Sequence[str], step: str) -> Iterable[str]:
    """The folders that one step of a pattern, which is not the last, leads to."""
    if step != ANY_FOLDERS:
        return [folder for prefix in prefixes for folder in await _folders_in(opened, prefix, step)]
    found, level = [*prefixes], prefixes
    for _ in range(_DEEPEST):
        level = [folder for prefix in level for folder in await _folders_in(opened, prefix, "*")]
        if not level:
            return found
        found += level
    raise StorageError(
        f"more than {_DEEPEST} folders lie in each other here, so a link leads back to where it lies; "
        "name the folders without `**`",
        url=without_secrets(opened.url(level[0])),
    )


async def _folders_in(opened: OpenFilesystem, folder: str, component: str) -> list[str]:
    entries = await _level(opened, folder, component, kind="directory")
    names = [str(entry["name"]).rstrip("/") for entry in entries]
    return [name for name in names if name.strip("/") != folder.strip("/")]  # an object may mark the folder itself


async def _level(opened: OpenFilesystem, folder: str, component: str, *, kind: str) -> Sequence[dict[str, Any]]:
    """What in a folder matches one component of a pattern; nothing where there is no such folder."""
    try:
        entries = await opened.call("ls", folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [await _followed(opened, entry) for entry in entries if matches(str(entry["name"]), component)]
    return [entry for entry in found if entry.get("type") == kind]


async def _followed(opened: OpenFilesystem, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry itself, or what is known of that to which it leads; what leads nowhere is a file that cannot be read."""
    if entry.get("type") in ("file", "directory"):
        return entry
    try:
        return {**await opened.call("info", entry["name"]), "name": entry["name"]}
    except FileNotFoundError:
        return {"name": entry["name"], "type": "file"}
