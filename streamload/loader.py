"""Iterate over tar shards in batches, in an exact and resumable order."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from threading import RLock
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, Self

from streamload.arguments import advises, as_python, check_int
from streamload.decode.tasks import OnError, Transform
from streamload.errors import SampleError, StreamloadError, without_secrets
from streamload.options import Options, RayFeeders, rank_and_world_size
from streamload.order.options import batches_per_rank
from streamload.order.share import EpochStart
from streamload.order.state import LoaderState, check, fingerprint
from streamload.sampling.arguments import Mixture, SamplingOptions, Weights, portions_of
from streamload.sampling.expression import Where
from streamload.statistics import Meter, Statistics
from streamload.storage.local_files import replace_file
from streamload.storage.protocol import UNKNOWN_BYTES
from streamload.storage.storages import Urls
from streamload.tar.extensions import Decode
from streamload.text import counted, warn_at_caller
from streamload.totals import trace_json
from streamload.trainer.device import Cuda, device_for
from streamload.trainer.epoch_iterator import BatchBuilder, Cursor, EpochIterator, acquire_for_thread
from streamload.trainer.feeder_link import FeederLink, OpenDataset, named_places
from streamload.workers.launchers import check_detected_rank, depends_on_detected_rank

# Keywords of torch's DataLoader, and the removed `feeders`, with the values that change nothing here.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "batch_sampler": (None,),
    "feeders": (None,),
    "generator": (None,),
    "in_order": (True,),
    "multiprocessing_context": (None,),
    "persistent_workers": (True, False),
    "pin_memory": (True, "auto"),
    "pin_memory_device": ("",),
    "prefetch_factor": (None, 2),
    "shuffle": (None,),
    "timeout": (0, 0.0),
}


class StreamLoader(OpenDataset):
    """Iterate over the samples of tar shards (WebDataset's format) in batches of tensors.

    Each pass of a `for` loop is one epoch. An epoch's order depends only on `seed`, the epoch's number and the dataset,
    not on workers, timing, or an index. Every sample is delivered exactly once (but see `drop_last`, `pad`), or is
    named in an error or in `skipped` (the newest 10,000).

    A feeder process and `num_workers` worker processes start with the loader and run until it is closed. A pass that is
    left early (`break`, an exception in the loop's body) skips the rest of its epoch. An error of the loader, and
    Ctrl-C while it waits for a batch, end the processes; the next pass starts new ones. A process that dies is
    replaced, and the epoch continues with the same batches. The loader leaves no thread running in the process
    that iterates, and only one thread at a time may use it. In an event loop, use `async for` and `async with`, which
    let other coroutines run while the loader waits.

    Attributes:
        rank, world_size, batch_size, drop_last, num_workers: the arguments, with None and "auto" resolved.

    Args:
        urls: a folder of shards; or paths or urls, with braces (`train-{000000..000123}.tar`) or globs, in a
            list or joined by `::`; or a `Mixture` of datasets.
        batch_size: samples in a batch, on each rank. More than the dataset's size gives one batch, or none with
            `drop_last`.
        shuffle: use a new order in each epoch: permute shards, and shuffle samples within a window of 10,000 samples,
            or of the given number.
        fields: the fields to read, with alternatives: `("jpg;png", "cls")` gives tuples; `"txt?"` is optional;
            "__key__" and "__url__" can be among them. None gives dicts of all fields.
        transform: a function of a sample, or a mapping from fields to functions of their values. A parameter named
            `rng` gets a `numpy.random.Generator`; for other functions `random`, `numpy.random` and torch are seeded.
            Randomness depends on `seed`, the epoch and the sample alone. `async def` functions run concurrently within
            a batch. Can be set later, for the next pass.
        num_workers: worker processes; "auto" is this rank's share of the processors; give more if functions wait for
            I/O. 0 makes batches in the caller's thread. `RayFeeders(4, num_cpus=8)` makes the same batches on nodes of
            a Ray cluster: in four feeders, each with eight workers and its own `memory_budget`.
        device: "cuda", "cuda:1", a number or a torch.device: copy batches there, one batch ahead. None leaves them in
            host memory, which is page-locked if there is CUDA.
        where: the samples to use: a condition such as `aesthetic > 5 and "txt"` (docs/choosing-samples.md); a function
            of the columns (arrays by name) that returns a boolean for each sample; a list of keys; or the `Path` of a
            file with one key per line.
        storage_options: credentials and options for remote storage, in fsspec's spellings (`key`, `secret`, `token`,
            `anon`, `endpoint_url`, `client_kwargs`). By default they come from the environment, as for other tools.
        memory_budget: memory for fetched shards and requests, in bytes or as "8GB"; "auto" is a quarter of the free
            memory, divided among the ranks of a machine. Local uncompressed shards use none of it.
        decode: (data) True decodes by extension; a mapping from extensions to functions of bytes extends or replaces
            the built-in decoders; WebDataset's decoders, one or a list, are tried first; False leaves bytes.
            Pickles are never loaded.
        join: (data) sidecars, one or a list: datasets with more fields of the samples, matched by key, as written by
            `streamload map --sidecar`.
        verify: (data) check every field against the checksum in the index.
        collate_fn: (batches) makes a batch from a list of samples; by default as torch's `default_collate`.
        drop_last: (batches) drop the last samples of an epoch if they do not fill a batch on every rank.
        pad: (batches) with several ranks, fill the last batch with the first samples of the order, so that all ranks
            have the same number of batches and samples. False delivers every sample exactly once, for evaluation.
        seed: (order) determines the order and all randomness.
        lanes: (order) the number of streams that the order is interleaved from; by default the first run's world size.
            A state restores it, at any world size.
        weights: (selection) how often to draw samples, with replacement: "balanced", a mapping from labels to the
            weight of a sample, or one number for each sample. Needs `shuffle`.
        sampler: (selection) an iterable of sample numbers for all ranks, in order, such as a torch Sampler.
        epoch_size: (selection) samples per epoch, over all ranks; without `weights`, each epoch begins where the last
            one ended.
        worker_init_fn: (workers) called with the worker's number when a worker starts.
        prefetch_batches: (workers) the number of batches to make ahead.
        index: (storage) a folder or url with the index of the shards, if the index is not beside them.
        filesystem: (storage) an fsspec filesystem to read everything with; `urls` and `index` are its paths.
        cache_dir: (storage) cache remote shards in this local folder, which ranks of one user on a machine may share.
        cache_size: (storage) maximum size of the cache, in bytes or as "200GB"; by default nine tenths of the free
            space.
        on_error: (errors) raise a failed sample's error ("raise"), leave the sample out of its batch ("skip"), or
            substitute another sample of the batch ("replace"). If every sample of a batch fails, the previous batch
            takes its place, so that ranks keep step; with pad=False the batch is left out. Bugs (TypeError, NameError)
            always raise.
        rank: (ranks) this process's rank; by default that of torch.distributed, or RANK.
        world_size: (ranks) the number of ranks; by default that of torch.distributed, or WORLD_SIZE.

    Raises:
        TypeError, ValueError: an argument is invalid; the message has its name, its value and a valid value.
        ShardNotFoundError: a shard does not exist, or a pattern matches nothing.
        StorageError: a shard or an index cannot be read.
        DatasetIndexError: an index is damaged or describes other shards, or writing the shards was interrupted. The
            first pass raises this error if folders give different classes the same label in their `classes.json`.
    """

    _stays_in_trainer = True
    # These properties are read-only, since setting them would have no effect.
    batch_size, drop_last = property(attrgetter("_options.batch_size")), property(attrgetter("_options.drop_last"))
    num_workers = property(attrgetter("_options.workers"))

    @partial(advises, neutral=_NEUTRAL)
    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mixture,
        batch_size: int = 1,
        shuffle: bool | int = False,
        *,
        fields: Sequence[str] | None = None,
        transform: Transform | None = None,
        num_workers: int | Literal["auto"] | RayFeeders = "auto",
        device: Any = None,
        where: Where | None = None,
        storage_options: Mapping[str, Any] | None = None,
        memory_budget: int | str = "auto",
        decode: Decode = True,
        join: Urls | None = None,
        verify: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pad: bool = True,
        seed: int = 0,
        lanes: int | None = None,
        weights: Weights | None = None,
        sampler: Iterable[int] | None = None,
        epoch_size: int | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        prefetch_batches: int = 4,
        index: str | os.PathLike[str] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_size: int | str | None = None,
        on_error: OnError = "raise",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        options = Options.among(locals())
        cuda = Cuda(device_for(device))
        self._move = None if cuda.device is None else cuda.move
        self.rank, self.world_size = rank_and_world_size(rank, world_size)
        self._sampling = SamplingOptions(
            weights,
            sampler,
            epoch_size,
            mixture=urls if isinstance(urls, Mixture) else None,
            shuffle=shuffle,
            batch_size=batch_size,
            lanes=lanes,
            rank=self.rank,
            world_size=self.world_size,
        )
        self._uses_detected_rank = depends_on_detected_rank(rank)
        portions = portions_of(urls, index, where=where, join=join)
        self._options = options = options.resolved_for(named_places(portions.values()))
        start_elsewhere = None
        if (feeders := options.feeders) is not None:
            from streamload.cluster.connection import RayChannel

            start_elsewhere = partial(RayChannel, feeders, budget_is_automatic=memory_budget == "auto")
        try:
            self._link = FeederLink(options, portions, self._sampling, cuda=cuda, start_elsewhere=start_elsewhere)
        except StreamloadError as error:  # the library's own frames tell the user nothing
            raise error.with_traceback(None) from error.__cause__
        self._listing = self._link.listing
        self._batch_builder = BatchBuilder(on_error, repeats=pad and on_error != "raise")
        self._cursor, self._in_use, self._meter = Cursor(), RLock(), Meter(options.workers)
        self._iterator: weakref.ref[EpochIterator] | None = None

    @property
    def transform(self) -> Transform | None:
        """Return the transform, which can be set: the next pass uses the new one, a running pass the old one.

        Raises:
            TypeError, ValueError: the new value is invalid; the loader is unchanged.
        """
        return self._options.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._link.change_transform(transform)
        self._options = self._link.options

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a StreamLoader owns processes and has a position in an epoch, so it cannot be copied or pickled"
        )

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise TypeError, with advice for wrapping the loader in a DataLoader."""
        raise TypeError(
            "a StreamLoader is the loader itself and takes the place of DataLoader: iterate over it (for batch in "
            "loader), or put a streamload.TarDataset, whose samples have numbers, into a DataLoader"
        )

    def __repr__(self) -> str:
        shards, options = self._listing.shards, self._options
        cursor = self._cursor
        return (
            f"<StreamLoader of {counted(len(shards), 'shard')} from {without_secrets(shards[0].url)!r}, "
            f"batch_size={options.batch_size}, "
            f"rank {self.rank} of {self.world_size}, {counted(options.workers, 'worker')}, "
            f"epoch {cursor.epoch}, position {cursor.position}>"
        )

    @property
    def dataset(self) -> range:
        """Return a range over the selected samples, for frameworks that use its length. Waits as `len(loader)` does."""
        selected = self._sampling.n_selected
        return range(sum(self._known_counts()) if selected is None else selected)

    @property
    def skipped(self) -> list[SampleError]:
        """Return the errors of the newest 10,000 skipped or replaced samples, in the order of their batches.

        `statistics().skipped_samples` counts all of them.
        """
        return list(self._batch_builder.skipped)

    def __len__(self) -> int:
        """Return the number of this rank's batches in an epoch. Without an index, the first call scans all shards.

        Raises:
            ShardFormatError: a shard is damaged.
            TypeError: the sampler has no length.
        """
        order = self._link.settings().order
        samples = self._sampling.epoch_samples
        if samples is None:
            samples = sum(self._known_counts())
        return batches_per_rank(order, samples, self.rank, self.world_size)

    def __iter__(self) -> EpochIterator:
        """Begin a pass: the next epoch, or the rest of an epoch that was resumed or ended by an error of the loader.

        A running pass ends; its next batch raises LoaderClosedError. If that pass delivered no batch, its epoch
        starts again; if it delivered every batch, its epoch is finished, even if the loop did not ask for more.

        Raises:
            LoaderClosedError: the loader was closed.
            RuntimeError: another thread uses the loader; or the detected rank is wrong (see `check_detected_rank`).
        """
        acquire_for_thread(self._in_use)
        try:
            if self._uses_detected_rank:
                check_detected_rank(self.rank, self.world_size)
            self._end_iterator("another pass of the same loader has begun; for two at once make two loaders")
            self._link.end_if_outdated()
            epoch, position = self._cursor.next_start()
            start = self._start_at(epoch, position)
            if position:
                self._link.last_position(start)  # raises for a position after the end
            connection = self._link.begin(start)
            self._cursor = Cursor(epoch, position)
            iterator = EpochIterator(
                start,
                connection,
                self._link,
                self._batch_builder,
                self._cursor,
                meter=self._meter,
                on_nothing=self._explain_empty_pass,
                in_use=self._in_use,
                move=self._move,
            )
            self._iterator = weakref.ref(iterator)
            return iterator
        finally:
            self._in_use.release()

    def __aiter__(self) -> EpochIterator:
        """Begin a pass for `async for batch in loader`, otherwise as for `for`.

        Other coroutines run while the pass waits for a batch; with `num_workers=0`, between batches. If the task is
        cancelled during a wait, no batch is lost: `anext` on the same iterator (`batches = aiter(loader)`) continues.
        Starting the processes blocks the event loop for some milliseconds. One event loop after another can use a
        loader.

        Raises:
            LoaderClosedError, RuntimeError: as for `__iter__`.
        """
        return iter(self)

    def _start_at(self, epoch: int, position: int) -> EpochStart:
        counts = self._known_counts() if self._sampling.needs_counts else ()
        return self._sampling.start(epoch, position, sum(counts))

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read `epoch`, from its start, or from the loaded position if that epoch was resumed.

        A running pass that has delivered no batch changes to `epoch` instead, since Lightning sets the epoch after
        creating the iterator.
        """
        epoch = as_python(epoch)
        check_int("epoch", epoch, 0)
        running = None if self._iterator is None else self._iterator()
        if running is None or not running.is_unused():
            self._cursor.epoch_to_come = epoch
        elif epoch != self._cursor.epoch:
            self._cursor.epoch, self._cursor.position = epoch, 0
            running.restart(self._start_at(epoch, 0))

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Return an object through which Lightning finds `set_epoch`, at `batch_sampler.sampler`."""
        return SimpleNamespace(sampler=self)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position, as a small dict of JSON types, for `load_state_dict`.

        The position counts the samples delivered to the loops of all ranks, without prefetched ones. Every rank's state
        is the same, so saving one is enough. Within the loop and after `break`, the state is the position after the
        last delivered batch; after a whole loop, the next epoch's start.
        """
        return self._state_at(*self._cursor.to_save()).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was called: the next pass is the rest of that epoch, at any world size.

        No sample comes again. With the same `batch_size * world_size` the global batches are the same too.

        Raises:
            LoaderStateError: `state` is not a state, or is of another dataset or order.
        """
        loaded = LoaderState.from_json(state)
        names = [shard.name for shard in self._listing.shards]
        own = fingerprint((name, UNKNOWN_BYTES) for name in names)
        if loaded.fingerprint != own:
            own = fingerprint(zip(names, self._link.sizes(), strict=True))
        now = replace(self._state_at(loaded.epoch, loaded.position), fingerprint=own)
        check(loaded, now, lanes=self._options.lanes)
        self._end_iterator("a state was loaded")
        if self._sampling.resume(loaded) or loaded.lanes != self._link.lanes:
            self._link.disconnect()
            self._link.lanes = loaded.lanes
        self._cursor = Cursor(loaded.epoch, loaded.position)

    def resume(self) -> None:
        """Continue the epoch after `break`: the next pass yields its remaining batches."""
        self.load_state_dict(self.state_dict())

    def statistics(self) -> Statistics:
        """Return counts and durations since the loader was created, and its bottleneck."""
        feeders = self._options.feeders
        return self._meter.statistics(self._batch_builder.n_skipped, None if feeders is None else feeders.num_cpus)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record a `with` block to a file for ui.perfetto.dev or chrome://tracing, even if the block raises.

        The trace shows the loop's steps and waits, the workers' tasks and scans, and requests, with the durations that
        `statistics()` sums.

        Args:
            path: the file to write or replace, with a few hundred bytes per event.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: a trace of this loader is already being recorded.
        """
        if self._meter.events is not None:
            raise RuntimeError("a trace of this loader is being recorded already")
        replace_file(os.fspath(path), lambda file: file.write(trace_json(()).encode()), durable=False)
        self._meter.events = []
        self._link.trace(on=True)
        try:
            yield
        finally:
            events, self._meter.events = self._meter.events, None
            self._link.trace(on=False)
            replace_file(os.fspath(path), lambda file: file.write(trace_json(events).encode()), durable=False)

    def close(self) -> None:
        """End the feeder and its workers, waiting up to a second. Delivered batches stay valid. Idempotent."""
        self._end_iterator("the loader was closed")
        self._link.close()

    async def aclose(self) -> None:
        """Close the loader like `close`, blocking the event loop."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- the feeder -------------------------------------------------------------------------------------------------

    def _known_counts(self) -> tuple[int, ...]:
        if self._link.counts is not None:
            return self._link.counts
        acquire_for_thread(self._in_use)
        try:
            return self._link.count()
        finally:
            self._in_use.release()

    def _explain_empty_pass(self, start: EpochStart) -> None:
        members, options = self._batch_builder.skipped_members, self._options
        if start.position:
            warn_at_caller(
                f"this pass has no batch: it resumes from a state saved after the last batch of epoch {start.epoch}, "
                f"and the next pass is epoch {start.epoch + 1}; a loop that counts epochs must call "
                f"set_epoch({start.epoch + 1}) first"
            )
        elif not sum(self._known_counts()):
            members.explain_emptiness()
        elif options.drop_last and (samples := self._sampling.samples_of(start, self._known_counts())):
            members.explain_dropped_epoch(samples, options.batch_size, start.world_size)

    def _end_iterator(self, why: str) -> None:
        running = None if self._iterator is None else self._iterator()
        if running is not None:
            running.end(why)
        self._iterator = None

    def _state_at(self, epoch: int, position: int) -> LoaderState:
        return LoaderState(
            seed=self._options.seed,
            epoch=epoch,
            position=position,
            lanes=self._link.lanes,
            window=self._options.shuffle_window,
            shuffle=self._options.shuffles,
            fingerprint=self._known_fingerprint,
            **self._sampling.state(epoch),
        )

    @cached_property
    def _known_fingerprint(self) -> str:
        """Return the dataset's fingerprint without requests: a digest of names alone if the listing lacks sizes."""
        shards = self._listing.shards
        has_sizes = all(shard.bytes != UNKNOWN_BYTES for shard in shards)
        return fingerprint((shard.name, shard.bytes if has_sizes else UNKNOWN_BYTES) for shard in shards)
