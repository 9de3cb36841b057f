"""Calls of functions that may need remote I/O: here if everything is local, else in a feeder's process.

The libraries of object stores have threads, and would hang in a process that is forked after they were used.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from streamload.decode.failure import error_from
from streamload.errors import WorkerError
from streamload.feeder.messages import WHAT_HOLDS_UP, Call, Calls
from streamload.fetch.fetched_listing import is_all_local
from streamload.index.columns import Columns
from streamload.index.listing import Listing
from streamload.options import Options
from streamload.sampling.mixture import Portion
from streamload.sampling.selection import ColumnsOf, Selection
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls, as_strings, expand_urls
from streamload.trainer.connection import Connection, FeederProcess, with_another_feeder

_log = logging.getLogger("streamload")
_numbers = itertools.count()
# How long a feeder may take to say what holds it up.
_ANSWER_S = 3.0


def ask(connection: Connection, function: str, *arguments: Any) -> Any:
    """Return what a feeder answers to a call; raise what it answers, and what `Connection.call` raises."""
    answer = connection.call(Call(next(_numbers), function, arguments))
    if answer.failure is not None:
        raise error_from(answer.failure)
    return answer.value


def what_holds_up(connection: Connection) -> str:
    """Say what the next batch of a configured feeder waits for; empty if nothing shows."""
    try:
        return str(connection.call(Call(next(_numbers), WHAT_HOLDS_UP), _ANSWER_S).value or "")
    except TimeoutError:
        return connection.describe()
    except WorkerError as error:  # it has died meanwhile
        return error.message


def named_places(portions: Iterable[Portion]) -> list[str]:
    """Return everything that the arguments of datasets name. Raises what `expand_urls` raises."""
    places: list[str] = []
    for portion in portions:
        places += expand_urls(portion.urls)
        places += [] if portion.index is None else [os.fspath(portion.index)]
        places += [place for sidecar in portion.sidecars for place in expand_urls(sidecar)]
    return places


def listing_places(listing: Listing) -> list[str]:
    """Return where the shards of a listing and their indexes lie."""
    return [f"{folder}/" for folder in listing.folders]


class FeederClient:
    """Calls functions of `Calls`: in this process if all places are local or can be read in no other process.

    Else a feeder's process is started with the first call, and again if it has ended.

    Attributes:
        storages: where everything lies.
        is_process_local: only this process can read some place.
        is_here: functions are called in this process.
        process: the feeder's process that was started last, which may be closed; None if there is none.
    """

    def __init__(
        self,
        storages: Storages,
        places: Iterable[str],
        start: Callable[[], FeederProcess] = lambda: FeederProcess(0, None),
    ) -> None:
        self.storages = storages
        self._places = list(places)
        self.is_process_local = any(map(storages.is_process_local, self._places))
        self.is_here = self.is_process_local or is_all_local(self._places, storages)
        self._start = start
        self._calls = Calls()
        self.process: FeederProcess | None = None

    def feeder(self) -> FeederProcess:
        """Return the feeder's process; another one than before if that has ended.

        Raises:
            TypeError, ValueError: an option of the storages makes no sense.
        """
        if self.process is not None and self.process.death is not None:
            _log.warning("%s; another one is started, and goes on in its place", self.process.death)
            self.close()
        if self.process is None or self.process.closed:
            self.storages.check(self._places)
            self.process = self._start()
        return self.process

    def connect(self) -> FeederProcess | Calls:
        """Return what answers calls now. Raises what `feeder` raises."""
        return self._calls if self.is_here else self.feeder()

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function, as `call_once`, and once more in another process if the feeder's dies."""
        return with_another_feeder(partial(self.call_once, function, *arguments))

    def call_once(self, function: str, *arguments: Any) -> Any:
        """Call a function. Blocks.

        Raises:
            FeederDiedError: the feeder's process died meanwhile.
            Exception: what the function raises, and what `connect` raises.
        """
        peer = self.connect()
        if isinstance(peer, Calls):
            return peer.call_here(function, arguments)
        try:
            return ask(peer, function, *arguments)
        except BaseException:
            if not peer.configured:  # else a pass finds out that it is dead
                peer.close()
            raise

    def list_shards(self, urls: Urls, index: str | os.PathLike[str] | None, sidecars: Sequence[Urls] = ()) -> Listing:
        """See `list_shards`, and what it raises."""
        if not self.is_here:  # paths and sequences may be of classes that the feeder does not know
            urls, index = as_strings(urls), None if index is None else os.fspath(index)
            sidecars = tuple(map(as_strings, sidecars))
        listing: Listing = self.call("list_shards", urls, index, self.storages, sidecars)
        return listing

    def select(self, selection: Selection, listing: Listing) -> NDArray[np.bool_]:
        """Return which samples of a dataset take part, bool[N], in the order of the listing.

        Raises:
            TypeError, ValueError, StreamloadError: as `Selection.select` and `read_columns`.
        """
        counts: Sequence[int] | None = listing.counts

        def read(names: Sequence[str]) -> Columns:
            nonlocal counts
            columns, found = self.call("read_columns", listing, self.storages, tuple(names))
            counts = found.tolist()
            return cast("Columns", columns)

        def count() -> int:
            return sum(self.counts(listing) if counts is None else counts)

        if selection.where is None:
            return np.ones(count(), np.bool_)
        folders = tuple(dict.fromkeys(shard.folder for shard in listing.shards))
        names = partial(self.call, "read_class_names", folders, self.storages)
        return selection.select(ColumnsOf(read, names), count)

    def counts(self, listing: Listing) -> Sequence[int]:
        """Return the samples of each shard; those without an index are scanned. Raises what `read_columns` raises."""
        if listing.counts is not None:
            return listing.counts
        _, found = self.call("read_columns", listing, self.storages, ())
        return cast("Sequence[int]", found.tolist())

    def close(self) -> None:
        """End the feeder's process. Idempotent; the next call starts another one."""
        if self.process is not None:
            self.process.close()
            self.process = None


class NamedClasses:
    """A dataset that knows the names of its classes."""

    _listing: Listing
    _options: Options

    @cached_property
    def classes(self) -> list[str] | None:
        """The names of the classes by number, as `shardify` has written them beside the shards; None where it has not.

        They are read from `classes.json` at the first use.

        Raises:
            DatasetIndexError: it is damaged, or the folders of the shards have different ones.
            StorageError: it cannot be read.
        """
        folders, storages = tuple(dict.fromkeys(shard.folder for shard in self._listing.shards)), self._options.storages
        with closing(FeederClient(storages, folders)) as client:  # a process that is started for it ends with it
            names: tuple[str, ...] | None = client.call("read_class_names", folders, storages)
        return None if names is None else list(names)
