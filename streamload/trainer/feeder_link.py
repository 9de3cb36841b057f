"""A loader's link to its feeder: made when it is first needed, made anew after it was closed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from streamload.decode.failure import error_from
from streamload.decode.job_pickle import PickledJob
from streamload.decode.tasks import OwnTransforms, Transform
from streamload.errors import LoaderClosedError, StreamloadError, WorkerError
from streamload.feeder.messages import Answer, Call, Configure, Counted, CountSamples, Failed
from streamload.index.class_names import read_class_names
from streamload.index.finder import look_at
from streamload.index.labels import Labels, read_labels
from streamload.index.listing import Listing, joined_listing, list_shards
from streamload.log_records import log_levels
from streamload.memory.unnamed import naming_the_limit
from streamload.options import Options
from streamload.sampling.arguments import SamplingOptions
from streamload.sampling.mixture import Portion
from streamload.schedule.scheduler import PipelineSettings
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.storage.urls import expand_urls
from streamload.trainer.checks import check_classes, check_fields, check_window_fits, labelled_folders
from streamload.trainer.connection import Connection, FeederProcess
from streamload.trainer.in_process_feeder import InProcessFeeder
from streamload.trainer.no_effect import warn_of_no_effect
from streamload.trainer.page_locked import HostRegistry, cuda_registry, pinning

__all__ = ["FeederLink"]

_log = logging.getLogger("streamload")


class FeederLink:
    """Starts the feeder, in a process of its own or right here, and knows the shards that it reads.

    Args:
        options: the loader's.
        portions: the datasets, by name.
        registry: finds what page-locks memory, if anything does.

    Attributes:
        listing: the shards.
        edges: the shards of dataset d are `edges[d]:edges[d + 1]` of the listing.

    Raises:
        TypeError, ValueError, StreamloadError: as `list_shards`.
    """

    def __init__(
        self,
        options: Options,
        portions: Mapping[str, Portion],
        *,
        registry: Callable[[], HostRegistry | None] = cuda_registry,
    ) -> None:
        self._options = options
        self._registry = registry
        self._portions = portions
        self._sampling: SamplingOptions | None = None
        self._own_transforms: OwnTransforms = ()
        self._connection: Connection | None = None
        self._unconfigured: FeederProcess | None = None
        self._knows_listing: FeederProcess | None = None
        self._closed = False
        self._classes_agree = False
        self._job: PickledJob | None = None
        self._given: tuple[Any, ...] = ()
        self._changed = False
        self._changed_before: set[str] = set()
        self._warned_of_changes = False
        self._sizes: tuple[int, ...] | None = None
        self._listings = self._find()
        self.listing = self._listings[0] if len(self._listings) == 1 else self._joined()
        self.edges = tuple(accumulate((len(listing.shards) for listing in self._listings), initial=0))

    def settings(self, lanes: int) -> PipelineSettings:
        """How the order and the batches are made."""
        settings = self._options.pipeline(lanes)
        choice = None if self._sampling is None else self._sampling.choice
        return replace(settings, order=replace(settings.order, choice=choice))

    def connect(self, lanes: int) -> Connection:
        """The connection to a feeder that has been told what to do.

        Raises:
            LoaderClosedError: the loader was closed.
            DatasetIndexError: labels of several folders are read, and the same label has different names in them.
            StorageError: a `classes.json` cannot be read.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        if self._connection is None or self._connection.closed:
            self._check_classes()
            self._connection = self._start(lanes)
        return self._connection

    def change_transform(self, transform: Transform | None) -> Options:
        """Have later passes use another transform; a pass that is in flight is not changed.

        Raises:
            TypeError, ValueError: it makes no sense, or has functions for fields that no sample has.
        """
        options = replace(self._options, transform=transform)
        check_fields(self._portions, self._listings, options)
        self._options, self._changed = options, True
        return options

    def take_changes(self) -> None:
        """End a feeder whose workers have other functions, or other states of the user's modules, than there are now.

        To be called between two passes. What the feeder has begun ahead was made with the old ones.

        Raises:
            TypeError: a function now holds something that cannot leave this process.
        """
        if self._connection is None or self._connection.closed:
            return
        if self._changed or self._given != self._functions():
            self.disconnect()
            return
        if self._job is None:  # without workers the functions are the user's own objects
            return
        now = self._options.pickled_job(self._own_transforms)
        changes = now.changes_since(self._job)
        if changes:  # some pickles are never twice the same, which says nothing
            changes -= self._options.pickled_job(self._own_transforms).changes_since(now)
        again, self._changed_before = changes & self._changed_before, changes
        if changes:
            _log.info("the workers are started anew, because this has changed: %s", ", ".join(sorted(changes)))
            self.disconnect()
        if again and not self._warned_of_changes:
            self._warned_of_changes = True
            _log.warning(
                "the workers are started anew at each pass, because this changes each time: %s. If no transform needs "
                "it, keep it out of the modules and objects of those",
                ", ".join(sorted(again)),
            )

    def count(self, lanes: int, *, in_pass: bool) -> tuple[int, ...]:
        """The samples of each shard; waits until all have been scanned.

        Args:
            lanes: of the order.
            in_pass: a pass is in flight, which then hears of a failure too.

        Raises:
            StreamloadError: a shard cannot be read, or is damaged.
        """
        connection = self.connect(lanes)
        connection.send(CountSamples())
        try:
            counted: Counted = self._answer(connection, Counted)
        except Exception:
            if not in_pass:  # nobody else would take the failure away, and the next question would be answered by it
                self.disconnect()
            raise
        return counted.counts

    def labels(self) -> Labels:
        """The labels of all samples, from the index.

        Raises:
            DatasetIndexError: there are none, or the index is damaged.
            StorageError: the index cannot be read.
        """
        listing, storages = self.listing, self._options.storages
        here = self._options.workers == 0 or all(
            folder is None or storages.is_local(folder) for folder in listing.index_of
        )
        if here:
            return read_labels(listing, storages)
        connection = self._unconfigured = self._requested_before() or self._start_process()
        labels: Labels = self._call(connection, read_labels, listing, storages)
        return labels

    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes by label, from `classes.json` beside the shards; None where there is none.

        Raises:
            DatasetIndexError: it is damaged, or the folders of the shards have different ones.
            StorageError: it cannot be read.
        """
        return self._class_names_in(tuple(dict.fromkeys(shard.folder for shard in self.listing.shards)))

    def _class_names_in(self, folders: tuple[str, ...]) -> tuple[str, ...] | None:
        storages = self._options.storages
        if self._options.workers == 0 or all(map(storages.is_local, folders)):
            return read_class_names(folders, storages)
        connection = self._unconfigured = self._requested_before() or self._start_process()
        names: tuple[str, ...] | None = self._call(connection, read_class_names, folders, storages)
        return names

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
        """Refuse what cannot be, as far as the listing tells; then no feeder is left. Warn of what has no effect.

        Raises:
            ValueError: no shard has a wanted field, or more must be held in memory at once than the budget allows.
        """
        try:
            check_fields(self._portions, self._listings, self._options)
            if len(self._listings) == 1:  # else what has to be held depends on the shares; the first batches tell
                check_window_fits(self.listing, self.settings(lanes).order, self._options, world_size)
            warn_of_no_effect(self._options, self._listings)
        except (TypeError, ValueError, Warning):
            self.close()
            raise

    def choose(self, sampling: SamplingOptions) -> None:
        """Find out what epochs are made of; where that cannot be, no feeder is left.

        Raises:
            ValueError: the weights don't fit the dataset.
            DatasetIndexError: they need labels, which the index does not have, or classes.json is damaged.
            StorageError: the index or classes.json cannot be read.
        """
        try:
            sampling.resolve(
                self.labels if sampling.needs_labels else None,
                self.edges,
                self.class_names if sampling.needs_names else None,
            )
            if self.listing.counts is not None:
                sampling.check_counts(self.listing.counts)
        except (ValueError, StreamloadError):
            self.close()
            raise
        self._sampling = sampling
        if len(self._listings) > 1:
            own = (portion.transform for portion in self._portions.values())
            self._own_transforms = tuple(zip(self.edges, own, strict=False))

    def disconnect(self) -> None:
        """End the feeder; the next `connect` starts another one."""
        for connection in (self._connection, self._unconfigured):
            if connection is not None:
                connection.close()
        self._connection = self._unconfigured = self._knows_listing = None

    def ask_to_end(self) -> list[int]:
        """Have the feeder end before it is closed; descriptors that turn readable when it has, for the caller."""
        connections = (self._connection, self._unconfigured)
        asked = [connection.ask_to_end() for connection in connections if connection is not None]
        return [descriptor for descriptor in asked if descriptor is not None]

    def close(self) -> None:
        """End the feeder for good. Idempotent."""
        self._closed = True
        self.disconnect()

    def _find(self) -> list[Listing]:
        """Local shards are listed here; for remote ones the feeder is started, so that no I/O library comes in here."""
        storages = self._options.storages
        wanted = [
            (
                portion.urls,
                tuple(expand_urls(portion.urls)),
                None if portion.index is None else os.fspath(portion.index),
            )
            for portion in self._portions.values()
        ]
        places = [place for _, named, index in wanted for place in (*named, index or "/")]
        if self._options.workers == 0 or all(map(storages.is_local, places)):
            return [list_shards(urls, index, storages) for urls, _, index in wanted]
        storages.check(places)
        self._unconfigured = connection = self._start_process()
        self._knows_listing = connection if len(self._portions) == 1 else None
        try:
            return [self._call(connection, list_shards, named, index, storages) for _, named, index in wanted]
        except Exception:
            self.disconnect()
            raise

    def _joined(self) -> Listing:
        try:
            return joined_listing(self._listings)
        except ValueError:
            self.close()
            raise

    def _look_at(self, urls: list[str]) -> dict[str, int]:
        if self._options.workers == 0:
            return look_at(urls, self._options.storages)
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._unconfigured = self._requested_before() or self._start_process()
        found: dict[str, int] = self._call(connection, look_at, urls, self._options.storages)
        return found

    def _call(self, connection: Connection, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns or raises in the feeder."""
        connection.send(Call(function, arguments))
        answer: Answer = self._answer(connection, Answer)
        if answer.failure is not None:
            raise error_from(answer.failure)
        return answer.result

    def _answer(self, connection: Connection, kind: type[Any]) -> Any:
        """Wait for an answer of some kind; what comes before it belongs to a pass that is in flight."""
        meanwhile: list[Any] = []
        try:
            while not isinstance(message := connection.receive(None), kind):
                meanwhile.append(message)
                if isinstance(message, Failed):
                    raise error_from(message.failure)
        except WorkerError:
            if connection is self._unconfigured:
                connection.close()  # it is dead, and no pass would find that out
            raise
        finally:
            connection.put_back(meanwhile)
        return message

    def _check_classes(self) -> None:
        """Refuse labels that mean different classes, once."""
        if self._classes_agree:
            return
        try:
            for folders in labelled_folders(self._portions, self._listings, self._options):
                check_classes(partial(self._class_names_in, folders))
        except StreamloadError:
            self.disconnect()
            raise
        self._classes_agree = True

    def _start(self, lanes: int) -> Connection:
        options = self._options
        job = options.pickled_job(self._own_transforms) if options.workers else None
        self._job = None if job is None else replace(job, data=b"")  # it may be large
        self._given = self._functions()
        self._changed = False
        unconfigured = self._requested_before()
        known = unconfigured is not None and self._knows_listing is unconfigured
        configure = Configure(
            listing=None if known else self.listing,
            settings=self.settings(lanes),
            job=b"" if job is None else job.data,
            workers=options.workers,
            fetching=options.fetching(),
            import_path=tuple(entry or os.getcwd() for entry in sys.path),
            ends_at_failure=options.on_error == "raise" and options.in_order,
            log_levels=log_levels(),
        )
        self._unconfigured = None  # not sooner: what does not pickle has raised, and `close` ends it
        if options.workers == 0:
            return InProcessFeeder(configure, self.listing, options.job(self._own_transforms))
        connection = unconfigured or self._start_process(options.workers)
        connection.send(configure)
        return connection

    def _functions(self) -> tuple[Any, ...]:
        """What the user has given by field or extension, and may have changed since."""
        given = (self._options.decode, self._options.transform, *(own for _, own in self._own_transforms))
        return tuple(dict(each) for each in given if isinstance(each, Mapping))

    def _requested_before(self) -> FeederProcess | None:
        """A feeder that was started to be asked something, and has not been told yet what to do."""
        connection = self._unconfigured
        return None if connection is None or connection.closed else connection

    def _start_process(self, workers_at_once: int = 1) -> FeederProcess:
        """A feeder that starts some of the workers at once, and the others while a storage is asked."""
        options = self._options
        registry = self._registry() if options.pin_memory else None
        try:
            return FeederProcess(
                options.workers, None if registry is None else pinning(registry), at_once=workers_at_once
            )
        except OSError as error:
            raise naming_the_limit(error) from error
