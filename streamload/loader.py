"""StreamLoader: batches from tar shards, in an order that is exact and can be resumed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from streamload.arguments import advises, as_python, no_attribute
from streamload.cluster.connection import RayConnection
from streamload.decode.tasks import OnError, Transform
from streamload.errors import SampleError, without_secrets
from streamload.feeder.messages import Configure
from streamload.options import Options, rank_and_world_size
from streamload.order.options import batches_per_rank
from streamload.order.share import EpochStart
from streamload.order.state import LoaderState, check, fingerprint
from streamload.ray_feeders import RayFeeders
from streamload.sampling.arguments import SamplingOptions, Weights
from streamload.sampling.mixture import Mixture, Portion, portions_of
from streamload.sampling.selection import Where
from streamload.statistics import Meter, Statistics
from streamload.storage.local_files import replace_file
from streamload.storage.urls import Urls
from streamload.text import counted
from streamload.trace import trace_json
from streamload.trainer.batch_builder import BatchBuilder
from streamload.trainer.connection import Connection
from streamload.trainer.device import Cuda, device_for
from streamload.trainer.epoch_iterator import AsyncEpochIterator, Cursor, EpochIterator, end_of_processes, one_thread
from streamload.trainer.feeder_client import NamedClasses, named_places
from streamload.trainer.feeder_link import FeederLink
from streamload.trainer.skipped_members import NothingLeft
from streamload.workers.launchers import check_found_rank, goes_by_found_rank

# Keywords of torch's DataLoader, with those values that ask for nothing else than what is done anyway.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "batch_sampler": (None,),
    "feeders": (None,),
    "generator": (None,),
    "in_order": (True,),
    "multiprocessing_context": (None,),
    "persistent_workers": (True, False),
    "pin_memory": (True, "auto"),
    "pin_memory_device": ("",),
    "prefetch_factor": (None,),
    "shuffle": (None,),
    "timeout": (0, 0.0),
}


class StreamLoader(NamedClasses):
    """Iterates over the samples of tar shards (WebDataset's format) in batches of tensors.

    Each pass of a `for` loop is one epoch, and the next pass is the next epoch. The order of an epoch is a function of
    `seed`, the epoch's number and the dataset alone: it does not depend on workers, on timing, or on whether the shards
    have an index. Every sample is delivered exactly once, or is named in an error or in `skipped` (the newest 10,000).

    A feeder process and `num_workers` worker processes are started with the first pass and kept until the loader is
    closed, also where a pass is left early (`break`, an exception in the loop's body): then the rest of its epoch is
    given up, and the next pass is the next epoch. An error of the loader's own, and Ctrl-C while a batch is waited for,
    end them; the next pass starts others. One that dies is replaced, and the epoch goes on with the same batches. In
    the process that iterates, no thread is started, and one thread at a time may use a loader. Within an event loop,
    `async for` and `async with` do the same, and other coroutines run meanwhile.

    Args:
        urls: a folder of shards; or paths or urls, with braces (`train-{000000..000123}.tar`), globs or `::`, one or a
            list; or a `Mixture` of several datasets.
        batch_size: samples in a batch, on each rank. More than there are gives one batch.
        shuffle: a new order each epoch: shards are permuted, and samples shuffled within a window of 10,000 samples, or
            of the number given.
        fields: the fields to read, with alternatives: `("jpg;png", "cls")` gives tuples; `"txt?"` is optional;
            "__key__" and "__url__" may be among them. None gives dicts of all fields.
        transform: a function of a sample, or a mapping from fields to functions of their values. A parameter named
            `rng` gets a `numpy.random.Generator`; for others `random`, `numpy.random` and torch are seeded. Randomness
            depends on `seed`, the epoch and the sample alone. May be set later, for the next pass.
        num_workers: worker processes; "auto" is this rank's share of the processors; give more where functions sleep.
            0 makes batches in the caller's thread. `RayFeeders(4, num_cpus=8)` makes the same batches on other nodes of
            a Ray cluster: in four feeders, each with eight workers and a `memory_budget` of its own.
        device: "cuda", "cuda:1", a number or a torch.device: give batches whose tensors are there, copied one batch
            ahead. None leaves them in host memory, which is page-locked if there is CUDA.
        where: which samples take part: a condition such as `aesthetic > 5 and "txt"` (docs/choosing-samples.md); a
            function that looks columns up by name, as arrays, and returns a truth value for each sample; keys; or the
            `Path` of a file with one key a line.
        storage_options: credentials and the like for remote storage, in fsspec's spellings (`key`, `secret`, `token`,
            `anon`, `endpoint_url`, `client_kwargs`). What is not given is found where other tools find it.
        memory_budget: what fetched shards and requests may take in memory, in bytes or as "8GB"; "auto" is a quarter
            of the free memory, divided among the ranks of a machine. Local uncompressed shards take none of it.

        decode: (data) True decodes by extension; a mapping from extensions to functions of bytes adds to that or
            replaces it; False leaves bytes. Pickles are never loaded.
        join: (data) sidecars, one or a list: datasets with more fields of the samples, matched by key, as
            `streamload map --sidecar` writes them.
        verify: (data) check every field against the checksum in the index.
        collate_fn: (batches) makes a batch of a list of samples; by default as torch's `default_collate` does.
        drop_last: (batches) drop the samples at the end of an epoch that fill no batch on every rank.
        pad: (batches) with several ranks, fill the last batch with the first samples of the order, so that all ranks
            have as many batches and samples. False adds nothing: every sample exactly once, for evaluation.
        seed: (order) of the order and of all randomness.
        lanes: (order) how many streams the order is interleaved from; by default the first run's world size. The same
            number resumes at another world size.
        weights: (selection) how often samples are drawn, with replacement: "balanced", a mapping from labels or classes
            to the weight of a sample, or one number for each sample. Needs `shuffle`.
        sampler: (selection) an iterable of numbers of samples, such as a torch Sampler, which gives the order of all
            ranks; one with `rank` and `num_replicas` that of its rank.
        epoch_size: (selection) samples of an epoch, over all ranks; epochs follow each other through endless passes.
        worker_init_fn: (workers) called with the worker's number in each worker when it starts.
        prefetch_batches: (workers) batches that are made ahead.
        index: (storage) a folder with the index of the shards, if it is not beside them; it may be remote.
        filesystem: (storage) an fsspec filesystem to read everything with; `urls` and `index` are its paths.
        cache_dir: (storage) keep remote shards in this local folder, which ranks of one user on a machine may share.
        cache_size: (storage) how large that may get, in bytes or as "200GB"; by default nine tenths of the space.
        on_error: (errors) a sample that fails is raised ("raise"), left out of its batch ("skip"), or replaced by
            another sample of its batch ("replace"). For a batch of which every sample fails, the next one that is not
            empty comes twice, so that ranks keep step. Mistakes in the program (TypeError, NameError) always raise.
        rank: (ranks) this process's; by default torch.distributed's, or RANK's.
        world_size: (ranks) the number of ranks; by default torch.distributed's, or WORLD_SIZE's.

    Raises:
        TypeError, ValueError: a wrong argument; the message has its name, its value and what would be right.
        ShardNotFoundError: there is no such shard, or a pattern matches nothing.
        DatasetIndexError: an index is damaged or does not belong to its shards, or whoever wrote these was interrupted.
            From the first pass: the same label stands for different classes in several folders, by `classes.json`.
    """

    _stays_in_trainer = True

    _dataset: str | None = None

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
        decode: bool | Mapping[str, Callable[[bytes], Any]] = True,
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
        sampling = SamplingOptions.among(locals(), self.rank, self.world_size)
        self._rank_was_found = goes_by_found_rank(rank, is_divided=sampling.is_divided)
        portions = portions_of(urls, index, where=where, join=join)
        options = options.resolved_for(named_places(portions.values()))
        self._open(options, portions, sampling, cuda)
        self._link.check(self._lanes, self.world_size)

    def _open(
        self,
        options: Options,
        portions: Mapping[str, Portion],
        sampling: SamplingOptions,
        cuda: Cuda,
    ) -> None:
        self._options, self._portions, self._sampling = options, portions, sampling
        start_elsewhere: Callable[[Configure], Connection] | None = None
        if options.feeders is not None:
            start_elsewhere = partial(
                RayConnection, options.feeders, budget_is_automatic=options.memory_budget == "auto"
            )
        self._link = FeederLink(self._options, portions, cuda=cuda, start_elsewhere=start_elsewhere)
        self._listing, self._lanes = self._link.listing, self._sampling.lanes
        self._link.choose(self._sampling)
        self._counts = self._listing.counts
        self._batch_builder = BatchBuilder(options.on_error, repeats=options.repeats)
        self._nothing_left = NothingLeft(options.drop_last, options.batch_size, self._batch_builder.skipped_members)
        self._cursor, self._in_use, self._meter = Cursor(), RLock(), Meter(self._options.workers)
        self._iterator: weakref.ref[EpochIterator] | None = None

    @property
    def transform(self) -> Transform | None:
        """What the samples are transformed with; see the constructor's argument.

        When another one is set, the next pass uses it: the next epoch, or the rest of one that an error has ended. The
        running pass is not changed.

        Raises:
            TypeError, ValueError: when it is set to what the constructor would refuse; nothing is changed then.
        """
        return self._options.transform

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        self._options = self._link.change_transform(transform)

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a StreamLoader stands for processes and a place in an epoch, so it cannot be copied or pickled"
        )

    def __getitem__(self, index: Any) -> NoReturn:
        """Batches have no numbers; this is here to say so to those who wrap the loader in a DataLoader."""
        raise TypeError(
            "a StreamLoader is the loader itself and takes the place of DataLoader: iterate over it (for batch in "
            "loader), or put a streamload.TarDataset, whose samples have numbers, into a DataLoader"
        )

    if not TYPE_CHECKING:  # type checkers would believe that there is every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Nothing more than there is: this is here for methods that other loaders have."""
            raise no_attribute(type(self), name)

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
    def batch_size(self) -> int:
        """Samples in a batch of this rank."""
        return self._options.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the samples are dropped that fill no batch on every rank."""
        return self._options.drop_last

    @property
    def num_workers(self) -> int:
        """Worker processes; what "auto" came to."""
        return self._options.workers

    @property
    def dataset(self) -> range:
        """The numbers of the samples that take part, which has the length that frameworks ask a loader's dataset for.

        It takes what `len(loader)` takes.
        """
        selected = self._sampling.n_selected
        return range(self._samples() if selected is None else selected)

    @property
    def skipped(self) -> list[SampleError]:
        """The errors of the samples that were left out or replaced, in the order of their batches: the newest 10,000.

        How many there were in the loader's life, `statistics().skipped_samples` says.
        """
        return list(self._batch_builder.skipped)

    def __len__(self) -> int:
        """The number of batches of a whole epoch on this rank. Without an index it waits until the shards are scanned.

        Raises:
            ShardFormatError: a shard is damaged.
        """
        order = self._link.settings(self._lanes).order
        samples = self._sampling.epoch_samples
        return batches_per_rank(order, self._samples() if samples is None else samples, *self._sampling.place)

    def __iter__(self) -> EpochIterator:
        """Begin a pass: the next epoch, or the rest of one that was resumed or ended by an error of the loader.

        A pass that is still running ends; going on with it raises LoaderClosedError. One that has given no batch yet
        does not count: its epoch begins again. One that has given all of them is finished, as loops find that count
        steps, and leaves its processes running.

        Raises:
            LoaderClosedError: the loader was closed.
            RuntimeError: another thread uses the loader; or the rank that was found is wrong (see `check_found_rank`).
        """
        return self._begin()

    def __aiter__(self) -> AsyncEpochIterator:
        """Begin a pass for `async for batch in loader`: the same as for `for`, in state and errors.

        Other coroutines run while it waits for a batch; with `num_workers=0`, where the caller's thread makes each
        batch, they run between batches. Where the task is cancelled there, no batch is lost: with the iterator kept
        (`batches = aiter(loader)`), the next `anext(batches)` goes on. Starting the processes takes the event loop some
        milliseconds. One event loop after the other may use a loader.

        Raises:
            LoaderClosedError: the loader was closed.
        """
        return AsyncEpochIterator(self._begin())

    def _begin(self) -> EpochIterator:
        with one_thread(self._in_use):
            return self._begin_iterator()

    def _begin_iterator(self) -> EpochIterator:
        if self._rank_was_found:
            check_found_rank(self.rank, self.world_size)
        self._end_iterator("another pass of the same loader has begun; for two at once make two loaders")
        self._link.take_changes()
        epoch, position = self._cursor.next_start()
        start = self._start_at(epoch, position)
        if position:
            self._last_position(start)  # refuses a position behind the end
        self._nothing_left.look_at(start, self._sampling.samples_of(start, self._counts))
        begun_ahead = start.numbers is None and self._cursor.goes_on_at(epoch, position)
        connection = self._link.begin(start, self._lanes, at_once=not begun_ahead)
        self._cursor = Cursor(epoch, position)
        begun = EpochIterator(
            start,
            connection,
            self._batch_builder,
            self._cursor,
            self._meter,
            begin_again=lambda start: self._link.begin(start, self._lanes),
            last_position=self._last_position,
            on_nothing=self._explain_nothing,
            in_use=self._in_use,
            move=self._move,
        )
        self._iterator = weakref.ref(begun)
        return begun

    def _start_at(self, epoch: int, position: int) -> EpochStart:
        counts = self._known_counts() if self._sampling.needs_counts else ()
        return self._sampling.start(epoch, position, sum(counts))

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the next pass, from its start; if it is the one that was resumed, from where that stood.

        A pass of which no batch was requested yet is made the same: Lightning sets the epoch after making the iterator.
        """
        epoch = as_python(epoch)
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch={epoch!r} must be an integer of at least 0")
        running = self._running()
        if running is None or not running.is_unused():
            self._cursor.epoch_to_come = epoch
        elif epoch != self._cursor.epoch:
            self._cursor.epoch, self._cursor.position = epoch, 0
            running.restart(self._start_at(epoch, 0))

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Lead Lightning to `set_epoch`, which it looks for in `batch_sampler.sampler`."""
        return SimpleNamespace(sampler=self)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, as a small dict of plain values that JSON can hold.

        It counts the samples that the loop has been given, not those that were prefetched, over all ranks, so every
        rank's state is the same and one of them is enough to save. Within the loop it stands behind the current batch.
        """
        epoch, position = self._cursor.to_save()
        return LoaderState(
            seed=self._options.seed,
            epoch=epoch,
            position=position,
            lanes=self._lanes,
            window=self._options.shuffle_window,
            shuffle=self._options.shuffles,
            fingerprint=self._fingerprint(),
            **self._sampling.state(epoch),
        ).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called: the next pass is the rest of that epoch, at any world size.

        It costs nothing: no shard that lies behind is read. With the same `batch_size * world_size` the global batches
        are the same too.

        Raises:
            LoaderStateError: the state is none, or belongs to another dataset, seed, window or number of lanes.
        """
        loaded = LoaderState.from_json(state)
        check(
            loaded,
            seed=self._options.seed,
            shuffle=self._options.shuffles,
            window=self._options.shuffle_window,
            lanes=self._options.lanes,
            fingerprint=self._fingerprint(),
            sampling=self._sampling.state(loaded.epoch),
        )
        self._end_iterator("a state was loaded")
        if self._sampling.resume(loaded) or loaded.lanes != self._lanes:
            self._link.disconnect()
            self._lanes = loaded.lanes
        self._cursor = Cursor(loaded.epoch, loaded.position)

    def resume(self) -> None:
        """Continue the epoch after `break`: the next pass yields the batches that the loop has not been given."""
        self.load_state_dict(self.state_dict())

    def statistics(self) -> Statistics:
        """What the loader has done so far, and what limits it."""
        skipped, feeders = self._batch_builder.n_skipped, self._options.feeders
        if feeders is None:
            return self._meter.statistics(skipped)
        return self._meter.statistics(skipped, remote_feeders=feeders.number, processors_of_each=feeders.num_cpus)

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what happens within a `with` block, and write it to a file for ui.perfetto.dev or chrome://tracing.

        It shows the loop's steps and waits, the workers' tasks and scans, and what was fetched, each on a line of its
        own, with the durations that `statistics()` adds up. Written also where the block raises.

        Args:
            path: of the file, which is replaced; some hundred bytes an event.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: a trace of this loader is being recorded.
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
        """End the feeder and its workers. Batches that were delivered stay valid. Idempotent."""
        self._end_iterator("the loader was closed")
        self._link.close()

    async def aclose(self) -> None:
        """The same as `close`; other coroutines run while processes end. If it is cancelled, it closes at once."""
        running = self._running()
        if running is not None:
            running.stop("the loader was closed")
        try:
            await end_of_processes(self._link.request_end())
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- the feeder -------------------------------------------------------------------------------------------------

    def _known_counts(self) -> tuple[int, ...]:
        """The samples of each shard; waits until they are known."""
        if self._counts is None:
            with one_thread(self._in_use):
                counts = self._link.count(self._lanes, in_pass=self._cursor.state == "running")
                self._sampling.check_counts(counts)
                self._counts = counts
        return self._counts

    def _last_position(self, start: EpochStart) -> float:
        return self._sampling.last_position(start, self._counts, self._link.settings(self._lanes).order)

    def _explain_nothing(self, start: EpochStart) -> None:
        """A pass has ended without a batch, so all shards have been scanned."""
        if start.position:
            self._nothing_left.explain_resumed_end(start.epoch)
        elif self._nothing_left.is_possible(start):
            self._nothing_left.look_at(start, self._sampling.samples_of(start, self._known_counts()), self._samples())

    def _running(self) -> EpochIterator | None:
        return None if self._iterator is None else self._iterator()

    def _samples(self) -> int:
        return sum(self._known_counts())

    def _end_iterator(self, why: str) -> None:
        running = self._running()
        if running is not None:
            running.end(why)
        self._iterator = None

    def _fingerprint(self) -> str:
        if self._dataset is None:
            self._dataset = fingerprint(
                zip((shard.name for shard in self._listing.shards), self._link.sizes(), strict=True)
            )
        return self._dataset
