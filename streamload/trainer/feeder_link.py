"""Start and configure a loader's feeder."""

from __future__ import annotations

import logging
import operator
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import Job, OwnTransforms, Transform
from streamload.errors import LoaderClosedError, StreamloadError
from streamload.feeder.messages import COUNT_SAMPLES, Configure, PipelineSettings, Tracing
from streamload.fetch.resident import fetched_shards
from streamload.index.listing import joined_listing
from streamload.log_records import log_levels
from streamload.memory.unnamed import descriptor_limit
from streamload.options import Options
from streamload.order.share import EpochStart
from streamload.sampling.arguments import SamplingOptions
from streamload.sampling.mixture import Portion
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.trainer.checks import (
    check_fields,
    check_window_fits,
    naming_dataset,
    warn_of_separate_crops,
    warn_of_unused_decoders,
)
from streamload.trainer.connection import Connection, DirectChannel, with_another_feeder
from streamload.trainer.device import Cuda
from streamload.trainer.feeder_client import FeederClient, named_places

_log = logging.getLogger("streamload")


class FeederLink:
    """Lists the shards of a loader, and starts its feeder at the first use, and again after it was closed.

    Args:
        options: the loader's.
        portions: the datasets, by name.
        sampling: the loader's; resolved here.
        cuda: page-locks memory.
        start_elsewhere: starts and configures feeders on other nodes.

    Attributes:
        listing: the shards of all datasets.
        counts: the samples of each shard, if known.

    Raises:
        TypeError, ValueError: the arguments do not fit the dataset or the budget.
        StreamloadError: as `list_shards`; or needed labels or columns are missing, or cannot be read.
    """

    def __init__(
        self,
        options: Options,
        portions: Mapping[str, Portion],
        sampling: SamplingOptions,
        *,
        cuda: Cuda,
        start_elsewhere: Callable[[Configure], DirectChannel] | None = None,
    ) -> None:
        self.options = options
        self.lanes = sampling.lanes
        self._start_elsewhere = start_elsewhere
        self._portions = portions
        self._sampling = sampling
        self._closed = self._traced = False
        self._connection: Connection | None = None
        # What the feeder was told, and if this process makes the rows, their job.
        self._configured: tuple[Configure, Job | None] | None = None
        self._had: list[object] = []
        workers = options.workers if start_elsewhere is None else 0
        places = named_places(portions.values())
        self._client = FeederClient(options.storages, places, workers=workers, cuda=cuda if options.workers else None)
        try:
            # Local shards are listed here; for remote ones the feeder is started, so that no I/O library comes in here.
            self._listings = [self._client.list_shards(p.urls, p.index, p.sidecars) for p in portions.values()]
            self._listed_by = self._client.process if len(portions) == 1 else None
            self.listing = self._listings[0] if len(self._listings) == 1 else joined_listing(self._listings)
            self._existing = () if self.listing.counts is None else self.listing.fields
            edges = tuple(accumulate((len(listing.shards) for listing in self._listings), initial=0))
            own = [portion.transform for portion in portions.values()]
            has_own = any(each is not None for each in own)
            self._own_transforms: OwnTransforms = tuple(zip(edges, own, strict=False)) if has_own else ()
            read_labels = partial(self._client.call, "read_labels", self.listing, options.storages)
            read_names = partial(self._client.class_names, self.listing)
            sampling.resolve(edges, self._selected(), read_labels, read_names)
            self.counts = self.listing.counts
            if self.counts is not None:
                sampling.check_counts(self.counts)
            check_fields(portions, self._listings, options)
            if len(self._listings) == 1:  # else what has to be held depends on the shares
                check_window_fits(self.listing, self.settings().order, options, sampling.place[1])
            known = all(listing.counts is not None for listing in self._listings)
            names = [name for listing in self._listings for name in listing.fields]
            warn_of_unused_decoders(options, names if known else [])
            warn_of_separate_crops(options.transform)
        except BaseException:  # after Ctrl-C too, whose traceback keeps this object
            self.close()
            raise

    def _selected(self) -> NDArray[np.bool_] | None:
        """Return which samples take part, in the order of the listing; None for all."""
        if all(portion.selection.where is None for portion in self._portions.values()):
            return None
        found = []
        for (name, portion), listing in zip(self._portions.items(), self._listings, strict=True):
            with naming_dataset(name):
                found.append(self._client.select(portion.selection, listing))
        selected = np.concatenate(found)
        return None if selected.all() else selected

    def settings(self) -> PipelineSettings:
        """Return the settings of every epoch."""
        settings = self.options.pipeline(self.lanes, self._existing)
        return settings._replace(order=replace(settings.order, sampling=self._sampling.sampling))

    def begin(self, start: EpochStart, *, at_once: bool = True) -> Connection:
        """Request an epoch; not at once if the feeder has begun it by itself."""
        connection = self.connect()
        if self._traced:
            connection.send(Tracing(on=True), later=True)
        connection.send(start, later=not at_once)
        return connection

    def trace(self, *, on: bool) -> None:
        """Start or stop recording events for a trace."""
        self._traced = on
        if (connection := self._living()) is not None:
            connection.send(Tracing(on=on), later=True)

    def _living(self) -> Connection | None:
        connection = self._connection
        return None if connection is None or connection.closed or connection.death is not None else connection

    def connect(self) -> Connection:
        """Return the connection to a configured feeder; replace a dead one by one configured alike.

        Raises:
            LoaderClosedError: the loader was closed.
            DatasetIndexError, StorageError: as `FeederClient.check_classes`.
        """
        if self._closed:
            raise LoaderClosedError("the loader was closed; make a new one")
        connection = self._living()
        if connection is None:
            if self._connection is None or self._connection.death is None:
                self._configure()  # else what has changed since is for the next pass
            connection = self._connection = self._start()
            if self._closed:  # by another thread meanwhile
                connection.close()
                raise LoaderClosedError("the loader was closed; make a new one")
        return connection

    def change_transform(self, transform: Transform | None) -> None:
        """Use another transform from the next pass on. Raises what `check_fields` raises."""
        options = replace(self.options, transform=transform)
        check_fields(self._portions, self._listings, options)
        self.options = options

    def take_changes(self) -> None:
        """Between passes, end a feeder whose workers have outdated functions or values.

        Raises:
            TypeError: a function holds something that cannot leave this process.
        """
        if self._living() is None or self._configured is None:
            self._connection = None
            return
        functions, before = self._functions(), self._configured[0].job
        if len(functions) != len(self._had) or not all(map(operator.is_, functions, self._had)):
            self.disconnect()
        elif before:  # else the functions are the user's own objects
            job = self.options.pickled_job(self._own_transforms, self._existing)
            # Some pickles are never twice the same.
            if job != before and job == self.options.pickled_job(self._own_transforms, self._existing):
                _log.warning(
                    "the workers are restarted: the loader's functions, or values that they refer to, have changed "
                    "since the last pass. If no transform needs these values, keep them out of its objects and modules"
                )
                self.disconnect()

    def _functions(self) -> list[object]:
        """Return the options and all user functions, to see whether one was replaced."""
        arguments = (self.options.decode, self.options.transform, *(own for _, own in self._own_transforms))
        nested = [each.values() if isinstance(each, Mapping) else (each,) for each in arguments]
        return [self.options, *chain.from_iterable(nested)]

    def count(self, *, in_pass: bool) -> tuple[int, ...]:
        """Return the samples of each shard, scanned if need be. Raises StreamloadError for a bad shard.

        A running pass raises the same error.
        """
        if self.counts is not None:
            return self.counts
        if self._start_elsewhere is not None:  # the feeders there are busy with batches
            counts = tuple(self._client.counts(self.listing))
        else:
            try:
                counts = with_another_feeder(lambda: self.connect().call(COUNT_SAMPLES))
            except Exception:
                if not in_pass:  # nobody else would take the failure away, and the next call would get it
                    self.disconnect()
                raise
        self._sampling.check_counts(counts)
        self.counts = counts
        return counts

    def last_position(self, start: EpochStart) -> float:
        """Return the position after an epoch's last batch. Raises what `SamplingOptions.last_position` raises."""
        return self._sampling.last_position(start, self.counts, self.settings().order)

    def sizes(self) -> tuple[int, ...]:
        """Return the bytes of each shard, requested if the listing lacks them."""
        shards = self.listing.shards
        unknown = [shard.url for shard in shards if shard.bytes == UNKNOWN_BYTES]
        found = self._client.call("look_at", unknown, self.options.storages) if unknown else {}
        return tuple(found.get(shard.url, shard).bytes for shard in shards)

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
        """Make the configuration of feeders. Raises what `FeederClient.check_classes` raises."""
        options, existing = self.options, self._existing
        try:
            self._client.check_classes(self._portions, self._listings, options)
        except StreamloadError:
            self.disconnect()
            raise
        message = Configure(
            listing=self.listing,
            settings=self.settings(),
            job=options.pickled_job(self._own_transforms, existing) if options.workers else b"",
            workers=options.workers,
            fetching=options.fetching(existing),
            import_path=tuple(entry or os.getcwd() for entry in sys.path),
            ends_at_failure=options.on_error == "raise",
            log_levels=log_levels(),
            descriptors=0 if options.workers else descriptor_limit(),
        )
        self._configured = message, None if options.workers else options.job(self._own_transforms, existing)
        self._had = self._functions()

    def _start(self) -> Connection:
        """Configure a feeder; start it if there is none."""
        assert self._configured is not None
        (configure, job), client = self._configured, self._client
        if self._start_elsewhere is not None:
            client.close()
            return Connection(self._start_elsewhere(configure))
        fetched = () if client.is_process_local else fetched_shards(self.listing, self.options.storages)
        if job is not None and client.is_here and not fetched:
            from streamload.trainer.in_process_feeder import InProcessChannel  # with the scheduler and the decoders

            connection = Connection(InProcessChannel(configure, self.listing))
        else:
            connection = client.feeder()
            if connection is self._listed_by:
                configure = configure._replace(listing=None)
        if job is not None:
            from streamload.workers.caller_worker import CallerWorker  # with the decoders

            connection.make_rows(CallerWorker(job))
        if client.process is connection:
            connection.send(configure)
        return connection
