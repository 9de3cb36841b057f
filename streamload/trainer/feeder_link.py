"""A loader's link to its feeder, which is started at the first use, and again after it was closed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import Job, OwnTransforms, Transform
from streamload.errors import LoaderClosedError, StreamloadError
from streamload.feeder.messages import COUNT_SAMPLES, Configure, PipelineSettings, Tracing
from streamload.fetch.fetched_listing import fetched_shards
from streamload.index.listing import joined_listing
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
from streamload.trainer.connection import Connection, FeederProcess, with_another_feeder
from streamload.trainer.device import Cuda
from streamload.trainer.feeder_client import FeederClient, ask, named_places
from streamload.trainer.scan_progress import ScanProgress
from streamload.workers.launchers import found_rank

_log = logging.getLogger("streamload")

_RESTARTS_WARNED_OF = 2


class _Configured(NamedTuple):
    """What a feeder was told, the job if this process makes the rows, and what the user had given."""

    message: Configure
    job: Job | None
    functions: list[object]


class FeederLink:
    """Starts the feeder, in a process of its own or in the caller's thread, and knows the shards that it reads.

    Args:
        options: the loader's.
        portions: the datasets, by name.
        sampling: what epochs are made of; it is resolved here.
        cuda: page-locks memory, if there is a device.
        start_elsewhere: starts and configures feeders on other nodes.

    Raises:
        TypeError, ValueError: the arguments do not fit the dataset, or need more memory than the budget allows.
        StreamloadError: as `list_shards`; or labels or columns that are needed are missing, or cannot be read.
    """

    def __init__(
        self,
        options: Options,
        portions: Mapping[str, Portion],
        sampling: SamplingOptions,
        *,
        cuda: Cuda,
        start_elsewhere: Callable[[Configure], Connection] | None = None,
    ) -> None:
        self._options = options
        self._start_elsewhere = start_elsewhere
        self._portions = portions
        self._sampling = sampling
        self._connection: Connection | None = None
        # It does not refer to this object: in a circle, processes would outlive a loader that was dropped.
        places = named_places(portions.values())
        self._client = FeederClient(options.storages, places, partial(_start_process, options, cuda))
        self._closed = False
        self._configured: _Configured | None = None
        self._restarts_in_a_row = 0
        try:
            # Local shards are listed here; for remote ones the feeder is started, so that no I/O library comes in here.
            self._listings = [self._client.list_shards(p.urls, p.index, p.sidecars) for p in portions.values()]
            self._listed_by = self._client.process if len(portions) == 1 else None
            self.listing = self._listings[0] if len(self._listings) == 1 else joined_listing(self._listings)
            edges = tuple(accumulate((len(listing.shards) for listing in self._listings), initial=0))
            own = [portion.transform for portion in portions.values()]
            has_own = any(each is not None for each in own)
            self._own_transforms: OwnTransforms = tuple(zip(edges, own, strict=False)) if has_own else ()
            self._resolve_sampling(edges)
            check_fields(portions, self._listings, options)
            if len(self._listings) == 1:  # else what has to be held depends on the shares; the first batches show
                check_window_fits(self.listing, self.settings(sampling.lanes).order, options, sampling.place[1])
            warn_of_no_effect(options, self._listings)
            warn_of_separate_crops(options)
        except Exception:
            self.close()
            raise

    def _resolve_sampling(self, edges: tuple[int, ...]) -> None:
        storages = self._options.storages
        folders = tuple(dict.fromkeys(shard.folder for shard in self.listing.shards))
        read_labels = partial(self._client.call, "read_labels", self.listing, storages)
        read_names = partial(self._client.call, "read_class_names", folders, storages)
        self._sampling.resolve(edges, self._selected(), read_labels, read_names)
        if self.listing.counts is not None:
            self._sampling.check_counts(self.listing.counts)

    def _selected(self) -> NDArray[np.bool_] | None:
        """Which samples take part, in the order of the listing; None for all."""
        selections = [portion.selection for portion in self._portions.values()]
        if all(selection.where is None for selection in selections):
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

    def settings(self, lanes: int) -> PipelineSettings:
        """Return how the order and the batches are made."""
        settings = self._options.pipeline(lanes, self._existing)
        return settings._replace(order=replace(settings.order, sampling=self._sampling.sampling))

    def begin(self, start: EpochStart, lanes: int, *, traced: bool, at_once: bool = True) -> Connection:
        """Request an epoch from a configured feeder, at once unless it has begun it by itself."""
        connection = self.connect(lanes)
        if traced:
            connection.send_later(Tracing(on=True))
        (connection.send if at_once else connection.send_later)(start)
        return connection

    def trace(self, *, on: bool) -> None:
        """Have the running feeder record events for a trace, or stop doing so."""
        if self._connection is not None and not self._connection.closed and self._connection.death is None:
            self._connection.send_later(Tracing(on=on))

    def connect(self, lanes: int) -> Connection:
        """Return the connection to a configured feeder; if one has died, to another one that is configured alike.

        Raises:
            LoaderClosedError: the loader was closed.
            DatasetIndexError: the same label has different names in several folders.
            StorageError: a `classes.json` cannot be read.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        connection = self._connection
        if connection is None or connection.closed or connection.death is not None:
            if self._configured is None or connection is None or connection.death is None:
                self._configured = self._configuration(lanes)  # else what has changed since is for the next pass
            connection = self._connection = self._start(self._configured)
        if self._closed:  # by another thread meanwhile
            connection.close()
            raise LoaderClosedError("the loader was closed; make a new one")
        return connection

    def change_transform(self, transform: Transform | None) -> Options:
        """Have later passes use another transform. Raises TypeError or ValueError if it makes no sense."""
        options = replace(self._options, transform=transform)
        check_fields(self._portions, self._listings, options)
        self._options = options
        return options

    def take_changes(self) -> None:
        """End a feeder whose workers have other functions, or values that these refer to, than there are now.

        Called between passes: what the feeder has begun ahead was made with the old ones.

        Raises:
            TypeError: a function now holds something that cannot leave this process.
        """
        connection, configured = self._connection, self._configured
        if connection is None or configured is None or connection.closed or connection.death is not None:
            self._connection = None
            return
        functions, before = self._functions(), configured.functions
        if len(functions) != len(before) or any(now is not then for now, then in zip(functions, before, strict=True)):
            self.disconnect()
            return
        if not configured.message.job:  # without workers the functions are the user's own objects
            return
        job = self._pickled_job()
        # Some pickles are never twice the same, which says nothing.
        changed = job != configured.message.job and job == self._pickled_job()
        self._restarts_in_a_row = self._restarts_in_a_row + 1 if changed else 0
        if changed:
            _log.info("the workers are restarted: the loader's functions, or values that they refer to, have changed")
            self.disconnect()
        if self._restarts_in_a_row == _RESTARTS_WARNED_OF:
            _log.warning(
                "the workers are restarted at each pass: the loader's functions, or values that they refer to, change "
                "each time. If no transform needs these values, keep them out of its objects and modules"
            )

    def _pickled_job(self) -> bytes:
        return self._options.pickled_job(self._own_transforms, self._existing)

    def count(self, lanes: int, *, in_pass: bool) -> tuple[int, ...]:
        """Return the samples of each shard; waits until all have been scanned.

        If a pass is running, it hears of a failure too. Raises StreamloadError if a shard cannot be read, or is
        damaged.
        """
        if self._start_elsewhere is not None:  # the feeders there are busy with batches
            return tuple(self._client.counts(self.listing))
        try:
            counts: tuple[int, ...] = with_another_feeder(lambda: ask(self.connect(lanes), COUNT_SAMPLES))
        except Exception:
            if not in_pass:  # nobody else would take the failure away, and the next call would get it
                self.disconnect()
            raise
        return counts

    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each shard, which are requested if the listing did not have them."""
        shards = self.listing.shards
        unknown = [shard.url for shard in shards if shard.bytes == UNKNOWN_BYTES]
        found = self._client.call("look_at", unknown, self._options.storages) if unknown else {}
        return tuple(found.get(shard.url, shard.bytes) for shard in shards)

    def disconnect(self) -> None:
        """End the feeder; the next `connect` starts another one."""
        if self._connection is not None:
            self._connection.close()
        self._client.close()
        self._connection = None

    def request_end(self) -> int | None:
        """Have the feeder end before it is closed; see `FeederProcess.request_end`."""
        return None if self._client.process is None else self._client.process.request_end()

    def close(self) -> None:
        """End the feeder for good. Idempotent."""
        self._closed = True
        self.disconnect()

    @property
    def _existing(self) -> Sequence[str]:
        """The fields that samples have; empty if that is not known."""
        return () if self.listing.counts is None else self.listing.fields

    def _configuration(self, lanes: int) -> _Configured:
        """What a feeder is told now. Raises DatasetIndexError or StorageError if labels mean different classes."""
        options = self._options
        try:
            for folders in labelled_folders(self._portions, self._listings, options):
                check_classes(partial(self._client.call, "read_class_names", folders, options.storages))
        except StreamloadError:
            self.disconnect()
            raise
        message = Configure(
            listing=self.listing,
            settings=self.settings(lanes),
            job=self._pickled_job() if options.workers else b"",
            workers=options.workers,
            fetching=options.fetching(self._existing),
            import_path=tuple(entry or os.getcwd() for entry in sys.path),
            ends_at_failure=options.on_error == "raise",
            log_levels=log_levels(),
            descriptors=0 if options.workers else descriptor_limit(),
        )
        job = None if options.workers else options.job(self._own_transforms, self._existing)
        return _Configured(message, job, self._functions())

    def _start(self, configured: _Configured) -> Connection:
        """Configure a feeder, which is started if there is none."""
        configure, job, _ = configured
        if self._start_elsewhere is not None:
            self._client.close()
            return self._start_elsewhere(configure)
        if job is not None and self._needs_no_process():
            from streamload.trainer.in_process_feeder import InProcessFeeder  # with the scheduler and the decoders

            return InProcessFeeder(configure, self.listing, job, _progress())
        process = self._client.feeder()
        if process is self._listed_by:
            configure = configure._replace(listing=None)
        if job is not None:
            process.make_rows(job)
        process.send(configure)
        return process

    def _needs_no_process(self) -> bool:
        """Return True if the caller makes the rows, and nothing is fetched, or only by this process."""
        client = self._client
        if self._options.workers or not client.is_here:
            return False
        return client.is_process_local or not fetched_shards(self.listing, self._options.storages)

    def _functions(self) -> list[object]:
        """What the user has given, by field or extension, and may have changed since."""
        found: list[object] = []
        for given in (self._options.decode, self._options.transform, *(own for _, own in self._own_transforms)):
            found += [*given.keys(), *given.values()] if isinstance(given, Mapping) else [given]
        return found


def _progress() -> ScanProgress:
    """Of the first rank alone, if a launcher has started several."""
    return ScanProgress(shows=(found_rank() or (0, 1))[0] == 0)


def _start_process(options: Options, cuda: Cuda) -> FeederProcess:
    """A feeder, which starts the workers."""
    locks = cuda if options.workers else None
    try:
        workers = options.workers if options.feeders is None else 0
        return FeederProcess(workers, locks, _progress())
    except OSError as error:
        raise naming_the_limit(error) from error
