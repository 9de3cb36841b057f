"""A loader's link to its feeder, which is started at the first use, and again after it was closed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import Job, OwnTransforms, Transform
from streamload.errors import LoaderClosedError, StreamloadError
from streamload.feeder.messages import COUNT_SAMPLES, Configure, PipelineSettings, Tracing
from streamload.fetch.fetched_listing import fetched_shards
from streamload.index.columns import Labels
from streamload.index.listing import Listing, joined_listing
from streamload.log_records import log_levels
from streamload.memory.unnamed import descriptor_limit, naming_the_limit
from streamload.options import Options
from streamload.order.share import EpochStart
from streamload.sampling.arguments import SamplingOptions
from streamload.sampling.mixture import Portion
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.trainer.checks import (
    check_classes,
    check_fields,
    check_window_fits,
    labelled_folders,
    warn_of_no_effect,
    warn_of_separate_crops,
)
from streamload.trainer.connection import Connection, FeederProcess
from streamload.trainer.device import Cuda
from streamload.trainer.feeder_client import FeederClient, call_feeder, named_places
from streamload.trainer.scan_progress import ScanProgress
from streamload.workers.launchers import found_rank

_log = logging.getLogger("streamload")


class FeederLink:
    """Starts the feeder, in a process of its own or in the caller's thread, and knows the shards that it reads.

    Args:
        options: the loader's.
        portions: the datasets, by name.
        cuda: page-locks memory, if there is a device.
        start_elsewhere: starts and configures feeders on other nodes; None where the feeder is to be on this machine.

    Attributes:
        listing: the shards.
        traces: whether feeders note events for a trace.
        edges: the shards of dataset d are `edges[d]:edges[d + 1]` of the listing.

    Raises:
        TypeError, ValueError, StreamloadError: as `list_shards`.
    """

    def __init__(
        self,
        options: Options,
        portions: Mapping[str, Portion],
        *,
        cuda: Cuda,
        start_elsewhere: Callable[[Configure], Connection] | None = None,
    ) -> None:
        self._options = options
        self._cuda = cuda
        self._start_elsewhere = start_elsewhere
        self._portions = portions
        self._sampling: SamplingOptions | None = None
        self._own_transforms: OwnTransforms = ()
        self._connection: Connection | None = None
        # It does not refer to this object: in a circle, processes would outlive a loader that was dropped.
        places = named_places(portions.values())
        self._client = FeederClient(options.storages, places, partial(_start_process, options, cuda))
        self._closed = self.traces = False
        self._configured: tuple[Configure, Job | None] | None = None
        self._classes_agree = False
        self._job: bytes | None = None
        self._given: tuple[Any, ...] = ()
        self._changed = False
        self._changed_before = self._warned_of_changes = False
        self._sizes: tuple[int, ...] | None = None
        self._listings = self._find()
        self._listed_by = self._client.process if len(portions) == 1 else None
        self.listing = self._listings[0] if len(self._listings) == 1 else self._joined()
        self.edges = tuple(accumulate((len(listing.shards) for listing in self._listings), initial=0))

    def settings(self, lanes: int) -> PipelineSettings:
        """How the order and the batches are made."""
        settings = self._options.pipeline(lanes, self._existing)
        sampling = None if self._sampling is None else self._sampling.sampling
        return settings._replace(order=replace(settings.order, sampling=sampling))

    def begin(self, start: EpochStart, lanes: int, *, at_once: bool = True) -> Connection:
        """Request an epoch from a configured feeder, and return the connection to it.

        Args:
            start: of the epoch.
            lanes: of the order.
            at_once: False where the feeder has begun it by itself: then it is requested with the next message.

        Raises:
            StreamloadError: as `connect`.
        """
        connection = self.connect(lanes)
        if self.traces:
            connection.send_later(Tracing(on=True))
        (connection.send if at_once else connection.send_later)(start)
        return connection

    def trace(self, *, on: bool) -> None:
        """Have the feeder note events for a trace, or no more: the running one, and those after it."""
        self.traces = on
        if self._connection is not None and not self._connection.closed and self._connection.death is None:
            self._connection.send_later(Tracing(on=on))

    def connect(self, lanes: int) -> Connection:
        """The connection to a configured feeder; in the place of one that has died, another one configured alike.

        Raises:
            LoaderClosedError: the loader was closed.
            DatasetIndexError: labels of several folders are read, and the same label has different names in them.
            StorageError: a `classes.json` cannot be read.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        if self._connection is None or (self._connection.closed and self._connection.death is None):
            self._check_classes()
            self._configured = self._configuration(lanes)
            self._connection = self._start(*self._configured)
        elif self._connection.death is not None:  # what has changed since then is for the next pass
            assert self._configured is not None
            self._connection = self._start(*self._configured)
        connection = self._connection
        if self._closed:  # by another thread meanwhile
            connection.close()
            raise LoaderClosedError("the loader was closed; make a new one")
        return connection

    def change_transform(self, transform: Transform | None) -> Options:
        """Have later passes use another transform; a running pass is not changed.

        Raises:
            TypeError, ValueError: it makes no sense, or has functions for fields that no sample has.
        """
        options = replace(self._options, transform=transform)
        check_fields(self._portions, self._listings, options)
        self._options, self._changed = options, True
        return options

    def take_changes(self) -> None:
        """End a feeder whose workers have other functions, or other values that these refer to, than there are now.

        To be called between two passes. What the feeder has begun ahead was made with the old ones.

        Raises:
            TypeError: a function now holds something that cannot leave this process.
        """
        if self._connection is None or self._connection.closed or self._connection.death is not None:
            self._connection = None
            return
        if self._changed or self._given != self._functions():
            self.disconnect()
            return
        if self._job is None:  # without workers the functions are the user's own objects
            return
        now = self._pickled_job()
        # Some pickles are never twice the same, which says nothing.
        changed = now != self._job and now == self._pickled_job()
        again, self._changed_before = changed and self._changed_before, changed
        if changed:
            _log.info("the workers are restarted: the loader's functions, or values that they refer to, have changed")
            self.disconnect()
        if again and not self._warned_of_changes:
            self._warned_of_changes = True
            _log.warning(
                "the workers are restarted at each pass: the loader's functions, or values that they refer to, change "
                "each time. If no transform needs these values, keep them out of its objects and modules"
            )

    def _pickled_job(self) -> bytes:
        return self._options.pickled_job(self._own_transforms, self._existing)

    def count(self, lanes: int, *, in_pass: bool) -> tuple[int, ...]:
        """The samples of each shard; waits until all have been scanned.

        Args:
            lanes: of the order.
            in_pass: a pass is running, which then hears of a failure too.

        Raises:
            StreamloadError: a shard cannot be read, or is damaged.
        """
        if self._start_elsewhere is not None:  # the feeders there are busy with batches
            return tuple(self._client.counts(self.listing))
        try:
            counts: tuple[int, ...] = call_feeder(partial(self.connect, lanes), COUNT_SAMPLES)
        except Exception:
            if not in_pass:  # nobody else would take the failure away, and the next call would get it
                self.disconnect()
            raise
        return counts

    def labels(self) -> Labels:
        """The labels of all samples, from the index.

        Raises:
            DatasetIndexError: there are none, or the index is damaged.
            StorageError: the index cannot be read.
        """
        labels: Labels = self._client.call("read_labels", self.listing, self._options.storages)
        return labels

    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes by label, from `classes.json` beside the shards; None where there is none.

        Raises:
            DatasetIndexError: it is damaged, or the folders of the shards have different ones.
            StorageError: it cannot be read.
        """
        return self._class_names_in(tuple(dict.fromkeys(shard.folder for shard in self.listing.shards)))

    def _class_names_in(self, folders: tuple[str, ...]) -> tuple[str, ...] | None:
        names: tuple[str, ...] | None = self._client.call("read_class_names", folders, self._options.storages)
        return names

    def sizes(self) -> tuple[int, ...]:
        """The bytes of each shard. Where the listing did not have them, each shard is requested, once.

        Raises:
            StorageError: a shard cannot be looked at.
        """
        if self._sizes is None:
            shards = self.listing.shards
            unknown = [shard.url for shard in shards if shard.bytes == UNKNOWN_BYTES]
            found = self._client.call("look_at", unknown, self._options.storages) if unknown else {}
            self._sizes = tuple(found.get(shard.url, shard.bytes) for shard in shards)
        return self._sizes

    def check(self, lanes: int, world_size: int) -> None:
        """Refuse what cannot be, as far as the listing says; then no feeder is left. Warn of what has no effect.

        Raises:
            ValueError: no shard has a wanted field, or more must be held in memory at once than the budget allows.
        """
        try:
            check_fields(self._portions, self._listings, self._options)
            if len(self._listings) == 1:  # else what has to be held depends on the shares; the first batches show
                check_window_fits(self.listing, self.settings(lanes).order, self._options, world_size)
            warn_of_no_effect(self._options, self._listings)
            warn_of_separate_crops(self._options)
        except (TypeError, ValueError, Warning):
            self.close()
            raise

    def choose(self, sampling: SamplingOptions) -> None:
        """Find out what epochs are made of; where that cannot be, no feeder is left.

        Raises:
            TypeError, ValueError: the weights, or what is to take part, don't fit the dataset.
            DatasetIndexError: they need labels or columns that the index does not have, or classes.json is damaged.
            ShardFormatError: a shard without an index is damaged.
            StorageError: the index or classes.json cannot be read.
        """
        try:
            sampling.resolve(self.edges, self._selected(), self.labels, self.class_names)
            if self.listing.counts is not None:
                sampling.check_counts(self.listing.counts)
        except (TypeError, ValueError, StreamloadError):
            self.close()
            raise
        self._sampling = sampling
        own = [portion.transform for portion in self._portions.values()]
        if any(each is not None for each in own):
            self._own_transforms = tuple(zip(self.edges, own, strict=False))

    def _selected(self) -> NDArray[np.bool_] | None:
        """Which samples take part, in the order of the listing; None for all."""
        selections = [portion.selection for portion in self._portions.values()]
        if all(selection.is_everything for selection in selections):
            return None
        found = []
        for name, selection, listing in zip(self._portions, selections, self._listings, strict=True):
            try:
                found.append(self._client.select(selection, listing))
            except (TypeError, ValueError) as error:
                if not name:
                    raise
                raise type(error)(f"dataset {name!r}: {error}") from None
        selected = np.concatenate(found)
        return None if selected.all() else selected

    def disconnect(self) -> None:
        """End the feeder; the next `connect` starts another one."""
        if self._connection is not None:
            self._connection.close()
        self._client.close()
        self._connection = self._listed_by = None

    def request_end(self) -> list[int]:
        """Have the feeder end before it is closed; descriptors that turn readable when it has, for the caller."""
        process = self._client.process
        ending = None if process is None else process.request_end()
        return [] if ending is None else [ending]

    def close(self) -> None:
        """End the feeder for good. Idempotent."""
        self._closed = True
        self.disconnect()

    def _find(self) -> list[Listing]:
        """Local shards are listed here; for remote ones the feeder is started, so that no I/O library comes in here."""
        try:
            return [self._client.list_shards(each.urls, each.index, each.sidecars) for each in self._portions.values()]
        except Exception:
            self.disconnect()
            raise

    @property
    def _existing(self) -> Sequence[str]:
        """The fields that samples have; empty where that is not known."""
        return () if self.listing.counts is None else self.listing.fields

    def _joined(self) -> Listing:
        try:
            return joined_listing(self._listings)
        except ValueError:
            self.close()
            raise

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

    def _configuration(self, lanes: int) -> tuple[Configure, Job | None]:
        """What a feeder is told now, and the job where this process makes the rows."""
        options = self._options
        self._job = self._pickled_job() if options.workers else None
        self._given = self._functions()
        self._changed = False
        configure = Configure(
            listing=self.listing,
            settings=self.settings(lanes),
            job=self._job or b"",
            workers=options.workers,
            fetching=options.fetching(self._existing),
            import_path=tuple(entry or os.getcwd() for entry in sys.path),
            ends_at_failure=options.on_error == "raise",
            log_levels=log_levels(),
            descriptors=0 if options.workers else descriptor_limit(),
        )
        return configure, None if options.workers else options.job(self._own_transforms, self._existing)

    def _start(self, configure: Configure, job: Job | None) -> Connection:
        """Configure a feeder, which is started if there is none."""
        if self._start_elsewhere is not None:
            self._client.close()
            return self._start_elsewhere(configure)
        if job is not None and self._needs_no_process():
            from streamload.trainer.in_process_feeder import InProcessFeeder  # with the scheduler and the decoders

            return InProcessFeeder(configure, self.listing, job, _progress())
        process = self._client.find_running()
        if process is None:
            process = self._client.process = _start_process(self._options, self._cuda)
        elif process is self._listed_by:
            configure = configure._replace(listing=None)
        if job is not None:
            process.make_rows(job)
        process.send(configure)
        return process

    def _needs_no_process(self) -> bool:
        """Whether the caller makes the rows, and nothing has to be fetched for that, or only this process could."""
        client = self._client
        if self._options.workers or not client.is_here:
            return False
        return client.is_process_local or not fetched_shards(self.listing, self._options.storages)

    def _functions(self) -> tuple[Any, ...]:
        """What the user has given by field or extension, and may have changed since."""
        given = (self._options.decode, self._options.transform, *(own for _, own in self._own_transforms))
        return tuple(dict(each) for each in given if isinstance(each, Mapping))


def _progress() -> ScanProgress:
    """Of the first rank alone, where a launcher has started several."""
    return ScanProgress(shows=(found_rank() or (0, 1))[0] == 0)


def _start_process(options: Options, cuda: Cuda) -> FeederProcess:
    """A feeder, which starts the workers."""
    locks = cuda if options.workers else None
    try:
        workers = options.workers if options.feeders is None else 0
        return FeederProcess(workers, locks, _progress())
    except OSError as error:
        raise naming_the_limit(error) from error
