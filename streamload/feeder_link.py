"""A loader's link to its feeder: made when it is first needed, made anew after it was closed."""

from __future__ import annotations

import os
import sys
from typing import Any

from streamload.batch.transfer import cuda_registry, pinning
from streamload.connection import Connection, FeederHere, FeederProcess
from streamload.dataset.urls import Urls, expand_urls
from streamload.decode.failure import error_from
from streamload.errors import LoaderClosedError, StreamloadError
from streamload.fetch.budget import check_budget
from streamload.fetch.fetched_shards import fetched_shards
from streamload.fetch.listing.listing import Listing, list_shards
from streamload.fetch.listing.sizes import look_at
from streamload.fetch.storage.protocol import UNKNOWN_BYTES
from streamload.fetch.unpack.unpacking import compression_of
from streamload.messages import Configure, Counted, CountSamples, Failed, FindShards, Found, LookAt, LookedAt
from streamload.options import Options

__all__ = ["FeederLink"]


class FeederLink:
    """Starts the feeder, in a process of its own or right here, and knows the shards that it reads.

    Args:
        options: the loader's.
        urls: the shards.
        index: a folder with an index for them, or None.

    Attributes:
        listing: the shards.

    Raises:
        TypeError, ValueError, StreamloadError: as `list_shards`.
    """

    def __init__(self, options: Options, urls: Urls, index: str | os.PathLike[str] | None) -> None:
        self._options = options
        self._connection: Connection | None = None
        self._unconfigured: FeederProcess | None = None
        self._closed = False
        self._sizes: tuple[int, ...] | None = None
        self.listing = self._find(urls, None if index is None else os.fspath(index))

    def connect(self, lanes: int) -> Connection:
        """The connection to a feeder that has been told what to do.

        Raises:
            LoaderClosedError: the loader was closed.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        if self._connection is None or self._connection.closed:
            self._connection = self._start(lanes)
        return self._connection

    def count(self, lanes: int) -> tuple[int, ...]:
        """The samples of each shard; waits until all have been scanned.

        Raises:
            StreamloadError: a shard cannot be read, or is damaged.
        """
        connection = self.connect(lanes)
        connection.send(CountSamples())
        counted: Counted = self._answer(connection, Counted)
        return counted.counts

    def sizes(self) -> tuple[int, ...]:
        """The bytes of each shard. Where the listing could not tell, each shard is asked for, once.

        Raises:
            StorageError: a shard cannot be looked at.
        """
        if self._sizes is None:
            shards = self.listing.shards
            unknown = [shard.url for shard in shards if shard.bytes == UNKNOWN_BYTES]
            found = self._look_at(unknown) if unknown else {}
            self._sizes = tuple(found.get(shard.url, shard.bytes) for shard in shards)
        return self._sizes

    def check(self, lanes: int, world_size: int) -> None:
        """Refuse what cannot be, as far as the listing tells; then no feeder is left.

        Raises:
            ValueError: no shard has a wanted field, or more must be held in memory at once than the budget allows.
        """
        try:
            if self.listing.counts is not None:  # else the fields are not known yet, and the first batch tells
                self._options.check_fields_exist(self.listing.fields)
            self._check_budget(lanes, world_size)
        except ValueError:
            self.close()
            raise

    def _check_budget(self, lanes: int, world_size: int) -> None:
        listing, options = self.listing, self._options
        fetched = fetched_shards(listing, options.storages)
        order = options.pipeline(lanes).order
        if not fetched or listing.counts is None or options.cache_dir is not None or not order.shuffle:
            return
        sizes = [shard.bytes for shard in listing.shards]
        if min(sizes) < 0 or any(compression_of(listing.shards[shard].url) for shard in fetched):
            return
        check_budget(
            options.fetching().budget_bytes,
            window=order.window,
            samples=sum(listing.counts),
            data_bytes=sum(sizes),
            lanes=lanes,
            lanes_read=lanes // world_size if lanes % world_size == 0 else lanes,
            shards=len(sizes),
        )

    def disconnect(self) -> None:
        """End the feeder; the next `connect` starts another one."""
        for connection in (self._connection, self._unconfigured):
            if connection is not None:
                connection.close()
        self._connection = self._unconfigured = None

    def close(self) -> None:
        """End the feeder for good. Twice is fine."""
        self._closed = True
        self.disconnect()

    def _find(self, urls: Urls, index: str | None) -> Listing:
        """Local shards are listed here; for remote ones the feeder is started, so that no I/O library comes in here."""
        options, named = self._options, tuple(expand_urls(urls))
        here = options.workers == 0 or all(map(options.storages.is_local, (*named, index or "/")))
        if here:
            return list_shards(urls, index, options.storages)
        self._unconfigured = connection = self._start_process()
        connection.send(FindShards(named, index, options.storages))
        try:
            message = connection.receive(None)
        except StreamloadError:
            self.disconnect()
            raise
        if isinstance(message, Found):
            return message.listing
        self.disconnect()
        raise error_from(message.failure)

    def _look_at(self, urls: list[str]) -> dict[str, int]:
        if self._options.workers == 0:
            return look_at(urls, self._options.storages)
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._unconfigured = self._unconfigured or self._start_process()
        connection.send(LookAt(tuple(urls), self._options.storages))
        looked: LookedAt = self._answer(connection, LookedAt)
        return dict(zip(urls, looked.sizes, strict=True))

    def _answer(self, connection: Connection, kind: type[Any]) -> Any:
        """Wait for an answer of some kind; what comes before it belongs to a pass that is under way."""
        meanwhile: list[Any] = []
        try:
            while not isinstance(message := connection.receive(None), kind):
                meanwhile.append(message)
                if isinstance(message, Failed):
                    raise error_from(message.failure)
        finally:
            connection.put_back(meanwhile)
        return message

    def _start(self, lanes: int) -> Connection:
        options = self._options
        configure = Configure(
            listing=self.listing,
            settings=options.pipeline(lanes),
            job=options.pickled_job() if options.workers else b"",
            workers=options.workers,
            executor=options.executor,
            fetching=options.fetching(),
            import_path=tuple(entry or os.getcwd() for entry in sys.path),
        )
        if options.workers == 0:
            return FeederHere(configure, options.job())
        connection, self._unconfigured = self._unconfigured or self._start_process(), None
        connection.send(configure)
        return connection

    def _start_process(self) -> FeederProcess:
        options = self._options
        registry = cuda_registry() if options.pin_memory else None
        workers = options.workers if options.executor == "process" else 0
        return FeederProcess(workers, None if registry is None else pinning(registry))
