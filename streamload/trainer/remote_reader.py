"""Reading what is not local, for somebody who reads at random: in a process of its own, as a feeder does.

The libraries that speak to object stores have threads, and would hang in a process that is forked after they were used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from streamload.decode.failure import error_from
from streamload.feeder.messages import Answer, Call, Failed, ReadFrom
from streamload.fetch.range_reader import ByteRange, RangeReader
from streamload.index.class_names import read_class_names
from streamload.index.listing import Listing, list_shards
from streamload.storage.storages import Storages
from streamload.storage.urls import expand_urls
from streamload.tar.table import ShardTable
from streamload.trainer.connection import FeederProcess

__all__ = ["RemoteReader", "class_names_in", "find_classes", "find_listing", "remote_reader"]

Read = TypeVar("Read")


class RemoteReader(Protocol):
    """Reads what is not local; see `RangeReader` for what is raised."""

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more, because it was closed or has failed."""

    def tables(self, shards: Sequence[int]) -> Sequence[ShardTable | None]:
        """The table of each shard; None for one that no index knows."""

    def read(self, ranges: Sequence[ByteRange]) -> Sequence[bytes]:
        """The bytes of each range."""

    def close(self) -> None:
        """End it. Idempotent."""


class _ReaderProcess:
    """Reads in a process of its own."""

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._process = FeederProcess(0, None, at_once=0)
        self._process.send(ReadFrom(listing, storages))

    @property
    def closed(self) -> bool:
        return self._process.closed

    def tables(self, shards: Sequence[int]) -> Sequence[ShardTable | None]:
        loaded: Sequence[ShardTable | None] = _call(self._process, RangeReader.tables, shards)
        return loaded

    def read(self, ranges: Sequence[ByteRange]) -> Sequence[bytes]:
        read: Sequence[bytes] = _call(self._process, RangeReader.read, ranges)
        return read

    def close(self) -> None:
        self._process.close()


class _ReaderHere:
    """Reads what only this process can, such as `memory://`: in a loop of its own, since the caller may be in one."""

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._listing = listing
        self._storages = storages

    @property
    def closed(self) -> bool:
        return False

    def tables(self, shards: Sequence[int]) -> Sequence[ShardTable | None]:
        return self._run(lambda reader: reader.tables(shards))

    def read(self, ranges: Sequence[ByteRange]) -> Sequence[bytes]:
        return self._run(lambda reader: reader.read(ranges))

    def close(self) -> None:
        """Nothing stays open."""

    def _run(self, action: Callable[[RangeReader], Awaitable[Sequence[Read]]]) -> Sequence[Read]:
        async def run() -> Sequence[Read]:
            reader = RangeReader(self._listing, self._storages)
            try:
                return await action(reader)
            finally:
                await reader.aclose()

        with ThreadPoolExecutor(1, "streamload-read") as thread:
            return thread.submit(lambda: asyncio.run(run())).result()


def find_listing(urls: Any, index: str | os.PathLike[str] | None, storages: Storages) -> Listing:
    """`list_shards`, in a process of its own where something remote is asked.

    Raises:
        TypeError, ValueError, StreamloadError: as `list_shards`.
    """
    named = tuple(expand_urls(urls))
    places = named if index is None else (*named, os.fspath(index))
    if any(map(storages.is_process_local, places)) or all(map(storages.is_local, places)):
        return list_shards(urls, index, storages)
    storages.check(places)
    listing: Listing = _called_once(list_shards, named, None if index is None else os.fspath(index), storages)
    return listing


def find_classes(listing: Listing, storages: Storages) -> list[str] | None:
    """`read_class_names` of the shards' folders, in a process of its own where something remote is asked.

    Raises:
        StreamloadError: as `read_class_names`.
    """
    names = class_names_in(tuple(dict.fromkeys(shard.folder for shard in listing.shards)), storages)
    return None if names is None else list(names)


def class_names_in(folders: tuple[str, ...], storages: Storages) -> tuple[str, ...] | None:
    """`read_class_names` where `find_classes` would read them. Raises what it raises."""
    if any(map(storages.is_process_local, folders)) or all(map(storages.is_local, folders)):
        return read_class_names(folders, storages)
    names: tuple[str, ...] | None = _called_once(read_class_names, folders, storages)
    return names


def _called_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns or raises in a process that is started for it."""
    process = FeederProcess(0, None, at_once=0)
    try:
        return _call(process, function, *arguments)
    finally:
        process.close()


def _call(process: FeederProcess, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns or raises there. A process that died, or whose answer nobody waited for, is closed."""
    try:
        process.send(Call(function, arguments))
        answer: Answer | Failed = process.receive(None)
    except BaseException:  # Ctrl-C too: the answer that still comes must not be taken for that to another question
        process.close()
        raise
    if answer.failure is not None:
        raise error_from(answer.failure)
    assert isinstance(answer, Answer)
    return answer.result


def remote_reader(listing: Listing, storages: Storages) -> RemoteReader:
    """Whoever can read these shards, started when it is asked for the first time."""
    here = any(storages.is_process_local(shard.url) for shard in listing.shards)
    return _ReaderHere(listing, storages) if here else _ReaderProcess(listing, storages)
