"""Start and configure a loader's feeder, and call functions that may need remote I/O.

Functions run here if everything is local, else in a feeder's process: the libraries of object stores start threads, and
would hang in a process that the user forks afterwards.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import alternatives, did_you_mean, no_attribute
from streamload.decode.tasks import Job, OwnTransforms, Transform
from streamload.errors import LoaderClosedError, StorageError, StreamloadError
from streamload.feeder.messages import Calls, Configure, PipelineSettings, Tracing
from streamload.fetch.resident import fetched_shards, is_all_local
from streamload.index.listing import Listing, joined_listing
from streamload.log_records import log_levels
from streamload.memory.unnamed import descriptor_limit, with_limit_named
from streamload.options import Options
from streamload.order.share import EpochStart
from streamload.sampling.arguments import Portion, SamplingOptions
from streamload.sampling.expression import ColumnsOf, Selection
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.storage.storages import Storages, Urls, as_strings, expand_urls
from streamload.tar.extensions import KIND_OF, applies_to
from streamload.tar.header_chain import LINK, MISSING_END
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted, listed, warn_at_caller
from streamload.trainer.connection import Connection, FeederDiedError, second_death, start_feeder_process

if TYPE_CHECKING:
    from streamload.trainer.device import Cuda  # which imports torch

_log = logging.getLogger("streamload")


class FeederLink:
    """List a loader's shards, and start its feeder: at once with workers, else at first use.

    `sampling` is resolved here. `start_elsewhere` starts and configures remote feeders, and returns a channel.

    Attributes:
        counts: the number of samples of each shard, if known.

    Raises:
        TypeError, ValueError: the arguments do not fit the dataset.
        StreamloadError: as `list_shards`; or needed labels or columns are missing, or cannot be read.
    """

    def __init__(
        self,
        options: Options,
        portions: Mapping[str, Portion],
        sampling: SamplingOptions,
        *,
        cuda: Cuda,
        start_elsewhere: Callable[[Configure], Any] | None = None,
    ) -> None:
        self.options = options
        self.lanes = sampling.lanes
        self._start_elsewhere = start_elsewhere
        self._portions = portions
        self._sampling = sampling
        self._closed = self._traced = False
        self._connection: Connection | None = None
        # The feeder's configuration, and the job if this process makes the rows.
        self._configured: tuple[Configure, Job | None] | None = None
        self._configured_functions: list[object] = []
        workers = options.workers if start_elsewhere is None else 0
        places = named_places(portions.values())
        self._client = FeederClient(options.storages, places, workers=workers, cuda=cuda if options.workers else None)
        try:
            # Local shards are listed here, remote ones in the feeder, so that this process imports no I/O library.
            if workers:
                self._client.feeder()  # started first, since its imports take as long as a long listing
            self._listings = [self._client.list_shards(p.urls, p.index, p.sidecars) for p in portions.values()]
            self.listing = self._listings[0] if len(self._listings) == 1 else joined_listing(self._listings)
            edges = tuple(accumulate((len(listing.shards) for listing in self._listings), initial=0))
            own = tuple((edge, portion.transform) for edge, portion in zip(edges, portions.values(), strict=False))
            self._own_transforms: OwnTransforms = own if any(each is not None for _, each in own) else ()
            read_labels = partial(self._client.call, "read_labels", self.listing, options.storages)
            sampling.resolve(edges, self._selected(), read_labels)
            self.counts = self.listing.counts
            if self.counts is not None:
                sampling.check_counts(self.counts)
            check_fields(portions, self._listings, options)
            refuse_unused_decoders(options, () if self.counts is None else self.listing.fields)
        except BaseException:  # even after Ctrl-C, whose traceback keeps this object alive
            self.close()
            raise

    def _selected(self) -> NDArray[np.bool_] | None:
        """Return a mask of the selected samples, in the order of the listing; None for all."""
        if all(portion.selection.where is None for portion in self._portions.values()):
            return None
        masks = []
        for (name, portion), listing in zip(self._portions.items(), self._listings, strict=True):
            with naming_dataset(name):
                masks.append(self._client.select(portion.selection, listing))
        selected = np.concatenate(masks)
        return None if selected.all() else selected

    def settings(self) -> PipelineSettings:
        """Return the settings that all epochs share."""
        return self.options.pipeline(self.lanes, self._sampling.sampling)

    def begin(self, start: EpochStart) -> Connection:
        """Request an epoch, and return the connection to the feeder."""
        connection = self.connect()
        if self._traced:
            connection.send(Tracing(on=True))
        connection.send(start)
        return connection

    def trace(self, *, on: bool) -> None:
        """Start or stop recording events for a trace."""
        self._traced = on
        if (connection := self._living()) is not None:
            connection.send(Tracing(on=on))

    def _living(self) -> Connection | None:
        connection = self._connection
        return None if connection is None or connection.closed or connection.death is not None else connection

    def connect(self) -> Connection:
        """Return the connection to a configured feeder; replace a dead feeder by one with the same configuration.

        Raises:
            LoaderClosedError: the loader was closed.
            TypeError, ValueError, OSError, StreamloadError: as `Options.pickled_job`, and `check_classes` and `feeder`
                of `FeederClient`.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        connection = self._living()
        if connection is None:
            if self._connection is None or self._connection.death is None:
                self._configure()  # else the dead feeder's configuration stays for this pass
            connection = self._connection = self._start()
            if self._closed:  # another thread has closed the loader meanwhile
                self.disconnect()
                raise LoaderClosedError("the loader was closed; make a new one")
        return connection

    def change_transform(self, transform: Transform | None) -> None:
        """Use another transform from the next pass on. Raises as `check_fields`."""
        options = replace(self.options, transform=transform)
        check_fields(self._portions, self._listings, options)
        self.options = options

    def end_if_outdated(self) -> None:
        """Between passes, end a feeder whose workers have outdated functions or values.

        Raises:
            TypeError: a function holds something that cannot leave this process.
        """
        if self._living() is None or self._configured is None:
            self._connection = None
            return
        functions, old_job = self._functions(), self._configured[0].job
        configured = self._configured_functions
        if len(functions) != len(configured) or not all(map(operator.is_, functions, configured)):
            self.disconnect()
        elif old_job:  # without workers there is no pickle, and the functions are the user's own objects
            job = self.options.pickled_job(self._own_transforms)
            # A second pickle shows whether the first differs by chance: some objects never give the same pickle twice.
            if job != old_job and job == self.options.pickled_job(self._own_transforms):
                _log.warning(
                    "the workers are restarted: the loader's functions, or values that they refer to, have changed "
                    "since the last pass. To avoid this, let them refer to no value that changes"
                )
                self.disconnect()

    def _functions(self) -> list[object]:
        """Return the options and all user functions, to detect replacements."""
        arguments = (self.options.decode, self.options.transform, *(own for _, own in self._own_transforms))
        nested = [each.values() if isinstance(each, Mapping) else (each,) for each in arguments]
        return [self.options, *chain.from_iterable(nested)]

    def count(self) -> tuple[int, ...]:
        """Return each shard's number of samples; if unknown, scan the shards without an index.

        Raises:
            LoaderClosedError: the loader was closed.
            ValueError: as `SamplingOptions.check_counts`.
            StreamloadError: as `read_columns`.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        if self.counts is None:
            # If this needs a process, it is a separate one, which ends with this call, even at Ctrl-C.
            with closing(FeederClient(self.options.storages, listing_places(self.listing))) as client:
                counts = tuple(client.counts(self.listing))
            self._sampling.check_counts(counts)
            self.counts = counts
        return self.counts

    def last_position(self, start: EpochStart) -> float:
        """Return the position after an epoch's last batch. Raises as `SamplingOptions.last_position`."""
        return self._sampling.last_position(start, self.counts, self.settings().order)

    def sizes(self) -> tuple[int, ...]:
        """Return each shard's size in bytes, requested if the listing lacks it."""
        shards = self.listing.shards
        unknown = [shard.url for shard in shards if shard.bytes == UNKNOWN_BYTES]
        infos = self._client.call("shard_infos", unknown, self.options.storages) if unknown else {}
        return tuple(infos.get(shard.url, shard).bytes for shard in shards)

    def disconnect(self) -> None:
        """End the feeder; the next `connect` starts another one."""
        if self._connection is not None:
            self._connection.close()
        self._client.close()
        self._connection = None

    def close(self) -> None:
        """End the feeder for good. Idempotent."""
        self._closed = True
        self.disconnect()

    def _configure(self) -> None:
        """Record the configuration of feeders. Raises as `Options.pickled_job` and `FeederClient.check_classes`."""
        options = self.options
        try:
            self._client.check_classes(self._portions, self._listings, options)
        except StreamloadError:
            self.disconnect()
            raise
        message = Configure(
            listing=self.listing,
            settings=self.settings(),
            job=options.pickled_job(self._own_transforms) if options.workers else b"",
            workers=options.workers,
            fetching=options.fetching(),
            import_path=tuple(entry or os.getcwd() for entry in sys.path),
            ends_at_failure=options.on_error == "raise",
            log_levels=log_levels(),
            descriptors=0 if options.workers else descriptor_limit(),
        )
        self._configured = message, None if options.workers else options.job(self._own_transforms)
        self._configured_functions = self._functions()

    def _start(self) -> Connection:
        """Configure a feeder, started if there is none; return the connection."""
        assert self._configured is not None
        (configure, job), client = self._configured, self._client
        if self._start_elsewhere is not None:
            client.close()
            return Connection(self._start_elsewhere(configure))
        is_here = job is not None and client.is_here
        if is_here and (client.is_process_local or not fetched_shards(self.listing, self.options.storages)):
            from streamload.trainer.in_process_feeder import InProcessChannel  # imports the scheduler and the decoders

            connection = Connection(InProcessChannel(configure))
        else:
            connection = client.feeder()
        if job is not None:
            from streamload.workers.caller_worker import CallerWorker  # imports the decoders

            connection.make_rows(CallerWorker(job))
        if client.process is connection:
            connection.send(configure)
        return connection


class FeederClient:
    """Call functions of `Calls`: in a feeder's process if reading `places` takes requests, else in this process.

    The first call starts the feeder; a later call starts another feeder if the first has ended.

    Attributes:
        is_process_local: True if only this process can read some of the places (`memory://`), so all calls stay here.
        is_here: True if functions are called in this process.
        process: the connection to the newest feeder's process, which may be closed.
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
        self._read_from: Listing | None = None
        self.process: Connection | None = None

    def feeder(self) -> Connection:
        """Return the connection to the feeder's process; start one if none is running.

        Raises:
            TypeError, ValueError: a storage option is invalid.
            OSError, WorkerError: no process can be started.
        """
        if self.process is not None and self.process.death is not None:
            _log.warning("%s; another one is started in its place", self.process.death)
            self.close()
        if self.process is None or self.process.closed:
            self.storages.check(self._places)
            try:
                self.process = start_feeder_process(self._workers, self._cuda)
            except OSError as error:
                raise with_limit_named(error) from error
            if self._read_from is not None:
                self.process.call("open_reader", self._read_from, self.storages)
        return self.process

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function, once more in another process if the feeder dies.

        Raises:
            WorkerError: the second feeder died as well.
            Exception: an error of the function, or of `feeder`.
        """
        if self.is_here:
            return self._calls.call_here(function, arguments)
        with suppress(FeederDiedError):
            return self.feeder().call(function, *arguments)
        try:
            return self.feeder().call(function, *arguments)
        except FeederDiedError as error:
            raise second_death(error) from error

    def read_from(self, listing: Listing) -> None:
        """Set the shards that the functions "read_tables" and "read_ranges" read."""
        self.call("open_reader", listing, self.storages)
        self._read_from = listing

    def list_shards(self, urls: Urls, index: str | os.PathLike[str] | None, sidecars: Sequence[Urls] = ()) -> Listing:
        """Call `list_shards`. Raises as `list_shards`."""
        if not self.is_here:  # paths and sequences may be of classes that the feeder does not know
            urls, index = as_strings(urls), None if index is None else os.fspath(index)
            sidecars = tuple(map(as_strings, sidecars))
        listing: Listing = self.call("list_shards", urls, index, self.storages, sidecars)
        return listing

    def select(self, selection: Selection, listing: Listing) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, bool[N], in the order of the listing.

        Raises:
            TypeError, ValueError, StreamloadError: as `Selection.select` and `read_columns`.
        """
        if selection.where is None:
            return np.ones(sum(self.counts(listing)), np.bool_)
        columns = ColumnsOf(
            lambda names: self.call("read_columns", listing, self.storages, tuple(names))[0],
            partial(self.class_names, listing),
        )
        return selection.select(columns, lambda: sum(self.counts(listing)))

    def class_names(self, listing: Listing) -> tuple[str, ...] | None:
        """Return the names of the classes. Raises as `read_class_names`."""
        folders = tuple(dict.fromkeys(shard.folder for shard in listing.shards))
        names: tuple[str, ...] | None = self.call("read_class_names", folders, self.storages)
        return names

    def check_classes(self, portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> None:
        """Refuse folders whose classes differ; ignore a `classes.json` that permissions hide.

        Raises:
            DatasetIndexError: the classes differ, or a `classes.json` is damaged.
            StorageError: the storage cannot be reached.
        """
        folders = labelled_folders(portions, listings, options)
        try:
            if len(folders) > 1:
                self.call("read_class_names", folders, self.storages)
        except StorageError as error:
            # If listing is forbidden, a missing `classes.json` raises a plain StorageError.
            if type(error) is not StorageError:
                raise

    def counts(self, listing: Listing) -> Sequence[int]:
        """Return each shard's number of samples; scan shards without an index. Raises as `read_columns`."""
        if listing.counts is not None:
            return listing.counts
        _, counts = self.call("read_columns", listing, self.storages, ())
        return cast("Sequence[int]", counts.tolist())

    def close(self) -> None:
        """End the feeder's process. Idempotent."""
        if self.process is not None:
            self.process.close()
            self.process = None


def named_places(portions: Iterable[Portion]) -> list[str]:
    """Return all URLs and paths in the arguments of datasets. Raises as `expand_urls`."""
    places: list[str] = []
    for portion in portions:
        places += expand_urls(portion.urls)
        places += [] if portion.index is None else [os.fspath(portion.index)]
        places += [place for sidecar in portion.sidecars for place in expand_urls(sidecar)]
    return places


def listing_places(listing: Listing) -> list[str]:
    """Return the folders of a listing's shards and indexes."""
    return [f"{folder}/" for folder in listing.folders]


def check_fields(portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> None:
    """Refuse fields that an indexed dataset does not have.

    Raises:
        TypeError, ValueError: a field does not exist; the message names it and, in a mixture, the dataset.
    """
    for (name, portion), listing in zip(portions.items(), listings, strict=True):
        with naming_dataset(name):
            own = portion.transform
            effective = options if own is None else replace(options, transform=own)
            if listing.counts is not None:
                effective.check_fields_exist(listing.fields)


@contextmanager
def naming_dataset(name: str) -> Iterator[None]:
    """Name a mixture's dataset in a TypeError or ValueError of the block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"dataset {name!r}: {error}") from None


def labelled_folders(portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> tuple[str, ...]:
    """Return the folders whose labels must mean the same classes.

    A dataset with its own transform is left out, because the transform can change the labels.
    """
    folders: dict[str, None] = {}
    for portion, listing in zip(portions.values(), listings, strict=True):
        unknown = (LABEL_FIELD,) if listing.counts is None else listing.fields
        names = unknown if options.field_names is None else options.field_names
        if portion.transform is None and any(LABEL_FIELD in entry.split(";") for entry in names):
            folders |= dict.fromkeys(shard.folder for shard in listing.shards)
    return tuple(folders)


def refuse_unused_decoders(options: Options, existing: Sequence[str]) -> None:
    """Raise ValueError for a decoder that no field needs, such as one for a misspelt extension.

    A mapping can serve several datasets, so unused decoders for known extensions are refused only if all decoders are
    unused. `existing` are the fields of the shards, if known.
    """
    if not isinstance(options.decode, Mapping):
        return
    requested = [name for entry in options.field_names or () for name in entry.split(";")]
    read = [name for name in dict.fromkeys(existing) if name in requested or options.field_names is None] or requested
    names = [name for key in options.decode for name in alternatives(key)]
    unused = [name for name in names if not any(applies_to(name, field) for field in (*read, *requested))]
    wrong = unused if len(unused) == len(names) else [name for name in unused if name not in KIND_OF]
    if read and wrong:
        hint = f"the fields that are read are {listed(read)}{did_you_mean(wrong[0], read)}"
        raise ValueError(f"decode has a function for {wrong[0]!r}, but {hint}")


class SkippedMembers:
    """Warn once of skipped links, of shards without an end-of-archive marker, and of epochs without a batch."""

    def __init__(self) -> None:
        self._skipped: Mapping[str, int] = {}
        self._reported: set[str] = set()

    def inspect(self, skipped: Mapping[str, int]) -> None:
        """Record how many members scans have skipped, by reason; warn if samples may lack members."""
        self._skipped = skipped
        if links := skipped.get(LINK, 0):
            self._warn_once(
                "links",
                f"{counted(links, 'link')} skipped in the shards read so far, since a link in an archive has no bytes "
                "of its own; if they belong to samples, pack the shards with `tar --hard-dereference -h`",
            )
        if count := skipped.get(MISSING_END, 0):
            self._warn_once(
                "end",
                f"an end-of-archive marker is missing in {counted(count, 'shard')} read so far, so members may be "
                "missing at the end; `streamload verify` names each such shard: fetch or pack it again",
            )

    def explain_emptiness(self) -> None:
        """Warn that no shard has a sample."""
        reasons = [f"{count:,} {reason}" for reason, count in self._skipped.items() if reason != MISSING_END]
        skipped = f": all their members were skipped ({', '.join(reasons)})" if reasons else ""
        self._warn_once(
            "empty", f"the shards hold no samples{skipped}; samples are files named KEY.FIELD, like 1.jpg, 1.cls"
        )

    def explain_dropped_epoch(self, samples: int, batch_size: int, world_size: int) -> None:
        """Warn that `drop_last` leaves an epoch without a batch."""
        ranks = f" on each of {counted(world_size, 'rank')}" if world_size > 1 else ""
        self._warn_once(
            "dropped",
            f"drop_last=True drops the whole epoch: it has {counted(samples, 'sample')}, and one batch of batch_size="
            f"{batch_size}{ranks} takes {batch_size * world_size:,}; give a smaller batch_size, or drop_last=False",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            warn_at_caller(message)


class OpenDataset:
    """Base of datasets that close at the end of a `with` block, and know their class names."""

    _listing: Listing
    _options: Options

    def close(self) -> None:
        """Close the dataset."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(type(self), name)

    @cached_property
    def classes(self) -> list[str] | None:
        """Return the names of the classes by number, from the shards' `classes.json`; None if there is none.

        Raises:
            DatasetIndexError: a `classes.json` is damaged, or the folders of the shards have different classes.
            StorageError: a `classes.json` cannot be read.
        """
        places = listing_places(self._listing)
        with closing(FeederClient(self._options.storages, places)) as client:  # its process ends with the block
            names = client.class_names(self._listing)
        return None if names is None else list(names)
