"""Call functions that may need remote I/O: here if everything is local, else in a feeder's process.

The libraries of object stores have threads, and would hang in a process that is forked after they were used.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import no_attribute
from streamload.errors import StorageError
from streamload.feeder.messages import Calls
from streamload.fetch.resident import is_all_local
from streamload.index.columns import Columns
from streamload.index.listing import Listing
from streamload.memory.unnamed import naming_the_limit
from streamload.options import Options
from streamload.sampling.mixture import Portion
from streamload.sampling.selection import ColumnsOf, Selection
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls, as_strings, expand_urls
from streamload.trainer.checks import labelled_folders
from streamload.trainer.connection import Connection, start_feeder_process, with_another_feeder

if TYPE_CHECKING:
    from streamload.trainer.device import Cuda

_log = logging.getLogger("streamload")


def named_places(portions: Iterable[Portion]) -> list[str]:
    """Return all places that the arguments of datasets name. Raises what `expand_urls` raises."""
    places: list[str] = []
    for portion in portions:
        places += expand_urls(portion.urls)
        places += [] if portion.index is None else [os.fspath(portion.index)]
        places += [place for sidecar in portion.sidecars for place in expand_urls(sidecar)]
    return places


def listing_places(listing: Listing) -> list[str]:
    """Return the folders of a listing's shards."""
    return [f"{folder}/" for folder in listing.folders]


class FeederClient:
    """Calls functions of `Calls`: in this process if no other one can read, or need read, the places.

    Else the first call starts a feeder's process, and another if that has ended.

    Attributes:
        is_process_local: only this process can read some place.
        is_here: functions are called in this process.
        process: the newest feeder's process, which may be closed.
    """

    def __init__(
        self, storages: Storages, places: Iterable[str], *, workers: int = 0, cuda: Cuda | None = None
    ) -> None:
        self.storages = storages
        self._places = list(places)
        self.is_process_local = any(map(storages.is_process_local, self._places))
        self.is_here = self.is_process_local or is_all_local(self._places, storages)
        self._workers = workers
        self._cuda = cuda
        self._calls = Calls()
        self.process: Connection | None = None

    def feeder(self) -> Connection:
        """Return the feeder's process; start one if there is none that runs.

        Raises:
            TypeError, ValueError: an option of the storages makes no sense.
        """
        if self.process is not None and self.process.death is not None:
            _log.warning("%s; another one is started, and goes on in its place", self.process.death)
            self.close()
        if self.process is None or self.process.closed:
            self.storages.check(self._places)
            try:
                self.process = start_feeder_process(self._workers, self._cuda)
            except OSError as error:
                raise naming_the_limit(error) from error
        return self.process

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function, and once more in another process if the feeder dies."""
        return with_another_feeder(partial(self.call_once, function, *arguments))

    def call_once(self, function: str, *arguments: Any) -> Any:
        """Call a function once.

        Raises:
            FeederDiedError: the feeder died.
            Exception: what the function raises, and what `feeder` raises.
        """
        if self.is_here:
            return self._calls.call_here(function, arguments)
        return self.feeder().call(function, *arguments)

    def list_shards(self, urls: Urls, index: str | os.PathLike[str] | None, sidecars: Sequence[Urls] = ()) -> Listing:
        """See `list_shards`, and what it raises."""
        if not self.is_here:  # paths and sequences may be of classes that the feeder does not know
            urls, index = as_strings(urls), None if index is None else os.fspath(index)
            sidecars = tuple(map(as_strings, sidecars))
        listing: Listing = self.call("list_shards", urls, index, self.storages, sidecars)
        return listing

    def select(self, selection: Selection, listing: Listing) -> NDArray[np.bool_]:
        """Return which samples take part, bool[N], in the order of the listing.

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
        return selection.select(ColumnsOf(read, partial(self.class_names, listing)), count)

    def class_names(self, listing: Listing) -> tuple[str, ...] | None:
        """Return the names of the classes. Raises what `read_class_names` raises."""
        folders = tuple(dict.fromkeys(shard.folder for shard in listing.shards))
        names: tuple[str, ...] | None = self.call("read_class_names", folders, self.storages)
        return names

    def check_classes(self, portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> None:
        """Refuse folders whose classes differ; ignore files that may not be read.

        Raises:
            DatasetIndexError: they differ, or a `classes.json` is damaged.
            StorageError: the storage cannot be reached.
        """
        for folders in labelled_folders(portions, listings, options):
            try:
                self.call("read_class_names", folders, self.storages)
            except StorageError as error:
                if type(error) is not StorageError:
                    raise  # else whoever may read objects but not list them is refused what is not there, too

    def counts(self, listing: Listing) -> Sequence[int]:
        """Return the samples of each shard, scanned if need be. Raises what `read_columns` raises."""
        if listing.counts is not None:
            return listing.counts
        _, found = self.call("read_columns", listing, self.storages, ())
        return cast("Sequence[int]", found.tolist())

    def close(self) -> None:
        """End the feeder's process. Idempotent."""
        if self.process is not None:
            self.process.close()
            self.process = None


class OpenDataset(ABC):
    """A dataset that is closed at the end of a `with` block, and knows the names of its classes."""

    _listing: Listing
    _options: Options

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # type checkers would believe that there is every attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(type(self), name)

    @cached_property
    def classes(self) -> list[str] | None:
        """The names of the classes by number, as `shardify` writes them beside the shards; None if there are none.

        Raises:
            DatasetIndexError: it is damaged, or the folders of the shards have different ones.
            StorageError: it cannot be read.
        """
        places = listing_places(self._listing)
        with closing(FeederClient(self._options.storages, places)) as client:  # its process ends with it
            names = client.class_names(self._listing)
        return None if names is None else list(names)
