"""Check a loader's arguments, including `RayFeeders`; an error states the argument, its value and valid values."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property
from math import isfinite
from typing import Any, Literal

from streamload.arguments import (
    alternatives,
    by_field,
    check_int,
    check_takes_one,
    did_you_mean,
    handlers_in,
    parse_bytes,
)
from streamload.decode.failure import Attempt, describe_existing
from streamload.decode.job_pickle import pickle_job
from streamload.decode.tasks import SAMPLE_NAMES, Job, OnError, OwnTransforms, Transform
from streamload.feeder.messages import PipelineSettings
from streamload.fetch.budget import default_budget
from streamload.fetch.disk_cache import bytes_in_cache, shards_folder
from streamload.fetch.resident import Fetching
from streamload.order.options import MAX_LANES, MAX_SAMPLES, OrderOptions
from streamload.order.sampling import Sampling
from streamload.storage.local_files import refuse_url, why_not_private
from streamload.storage.storages import Storages
from streamload.tar.extensions import Decode
from streamload.workers.launchers import detected_rank, local_ranks, processors_of_rank

DEFAULT_WINDOW = 10_000
"""The shuffle's window in samples; mixes about eleven shards of a thousand samples."""

MOST_WORKERS, _MOST_FEEDERS = 1024, 1024
_MOST_BATCH_SIZE = 1 << 40
_WORKERS_INSTEAD = '(or "auto", the default: one per processor; or RayFeeders(...))'


@dataclass(kw_only=True)
class Options:
    """The checked arguments of `StreamLoader`, and values derived from them. Not changed after construction.

    Attributes:
        shuffles: each epoch has a new order.
        shuffle_window: how far, in samples, a sample may move within its lane.
        field_names: the requested fields in the spelling of shards, without question marks; None for all.
        optional_fields: the requested fields that samples may lack.
        transform_keys: the keys of a transform that is a mapping.
        feeders: the feeders on a Ray cluster; None for a local feeder.
        cache_folder: the absolute path of `cache_dir`, if any.
        storages: the storages that read the shards.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    batch_size: int = 1
    shuffle: bool | int = False
    fields: Sequence[str] | None = None
    decode: Decode = True
    transform: Transform | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    pad: bool = True
    num_workers: int | Literal["auto"] | RayFeeders = "auto"
    prefetch_batches: int = 4
    worker_init_fn: Callable[[int], Any] | None = None
    seed: int = 0
    lanes: int | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # it holds keys
    filesystem: Any = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    cache_size: int | str | None = None
    memory_budget: int | str = "auto"
    on_error: OnError = "raise"
    verify: bool = False

    shuffles: bool = field(init=False)
    shuffle_window: int = field(init=False)
    field_names: tuple[str, ...] | None = field(init=False, default=None)
    optional_fields: frozenset[str] = field(init=False, default=frozenset())
    transform_keys: tuple[str, ...] = field(init=False)
    feeders: RayFeeders | None = field(init=False)
    cache_folder: str | None = field(init=False, default=None)
    storages: Storages = field(init=False, repr=False)

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Create options from a constructor's arguments, ignoring those that are not options."""
        names = {field.name for field in fields(cls) if field.init}
        return cls(**{name: value for name, value in arguments.items() if name in names})

    def __post_init__(self) -> None:
        self.feeders = self.num_workers if isinstance(self.num_workers, RayFeeders) else None
        self._check_numbers()
        for name in ("drop_last", "pad", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.on_error not in ("raise", "skip", "replace"):
            raise ValueError(f"on_error={self.on_error!r} must be one of 'raise', 'skip', 'replace'")
        self.shuffles = self.shuffle is not False
        self.shuffle_window = DEFAULT_WINDOW if isinstance(self.shuffle, bool) else self.shuffle
        self._check_functions()
        self.transform_keys = tuple(self.transform) if isinstance(self.transform, Mapping) else ()
        if self.fields is not None:
            self._check_fields(self.fields)
        self._check_storage()
        self.storages = Storages(self.storage_options, self.filesystem)

    @property
    def workers(self) -> int:
        """Return the number of workers of each feeder, with "auto" resolved."""
        if isinstance(self.num_workers, RayFeeders):
            return self.num_workers.num_cpus
        return processors_of_rank() if self.num_workers == "auto" else self.num_workers

    def resolved_for(self, urls: Sequence[str]) -> Options:
        """Return the options for these shards: "auto" becomes 0 workers if some can be read only by this process.

        Raises:
            ValueError: only this process can read some of the shards, but workers were requested.
        """
        only_here = next(filter(self.storages.is_process_local, urls), None)
        if only_here is None or self.num_workers == 0:
            return self
        if self.num_workers == "auto":
            return replace(self, num_workers=0)
        raise ValueError(
            f"num_workers={self.num_workers}, but only this process can read {only_here!r} (in memory, or with a "
            "class of the script): use num_workers=0, put the shards on disk or in a bucket, or the class in a module"
        )

    @cached_property
    def decoders(self) -> Decode:
        """Return `decode`, with WebDataset's decoders converted to tuples."""
        if isinstance(self.decode, Mapping):
            return {key: handlers_in(decoder) or decoder for key, decoder in self.decode.items()}
        return self.decode if isinstance(self.decode, bool) else handlers_in(self.decode)

    @cached_property
    def budget_bytes(self) -> int:
        """Return the memory budget. "auto" is resolved only once, since less memory may be free later."""
        if self.memory_budget == "auto":
            return default_budget(local_ranks())
        return parse_bytes("memory_budget", self.memory_budget)

    def fetching(self) -> Fetching:
        """Return the settings for fetching shards."""
        folder, cache_bytes = self.cache_folder, 0
        if folder is not None and self.cache_size is not None:
            cache_bytes = parse_bytes("cache_size", self.cache_size)
        elif folder is not None:  # cached bytes count as free, otherwise each run would evict some
            free_bytes = shutil.disk_usage(folder).free
            cache_bytes = (free_bytes + bytes_in_cache(folder)) * 9 // 10
        return Fetching(self.storages, self.budget_bytes, folder, cache_bytes)

    def job(self, own_transforms: OwnTransforms = ()) -> Job:
        """Return the settings for making samples."""
        return Job(
            self.field_names,
            self.decoders,
            self.transform,
            self.collate_fn,
            self.worker_init_fn,
            self.on_error,
            self.seed,
            own_transforms,
            self.optional_fields,
        )

    def pickled_job(self, own_transforms: OwnTransforms = ()) -> bytes:
        """Pickle the job for the workers.

        Raises:
            TypeError: a function refers to an object that does not pickle; the message names the argument.
        """
        with Attempt() as attempt:
            return pickle_job(self.job(own_transforms))
        own = [(name, getattr(self, name)) for name in ("decode", "transform", "collate_fn", "worker_init_fn")]
        for name, value in [*own, *(("transform", transform) for _, transform in own_transforms)]:
            functions = {f"{name}=": value}
            if isinstance(value, Mapping):
                functions = {f"{name}[{key!r}]": function for key, function in value.items()}
            for shown, function in functions.items():
                try:
                    pickle_job(function)
                except Exception as error:
                    raise TypeError(
                        f"{shown} cannot be sent to the workers, because something in it does not pickle ({error}); "
                        "create that object inside the function, or use num_workers=0"
                    ) from error
        assert attempt.error is not None
        raise attempt.error

    def pipeline(self, lanes: int, sampling: Sampling | None) -> PipelineSettings:
        """Return the settings for the order and the batches."""
        return PipelineSettings(
            order=OrderOptions(
                seed=self.seed,
                shuffle=self.shuffles,
                window=self.shuffle_window,
                lanes=lanes,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                pad=self.pad,
                sampling=sampling,
            ),
            fields=self.field_names,
            verify=self.verify,
            prefetch_batches=self.prefetch_batches,
        )

    def check_fields_exist(self, existing: Sequence[str]) -> None:
        """Raise ValueError if `existing` lacks a required field or, if all fields are read, a key of `transform`."""
        for entry in self.transform_keys if self.field_names is None else self.field_names:
            if self.field_names is not None and entry in (*SAMPLE_NAMES, *self.optional_fields):
                continue
            if not any(name in existing for name in alternatives(entry)):
                problem = f"fields={self.fields!r}: no sample has {entry!r}; there are"
                if self.field_names is None:
                    problem = f"transform has a function for {entry!r}; the fields are"
                raise ValueError(f"{problem} {describe_existing(entry, existing)}")

    def _check_numbers(self) -> None:
        single = "(for single samples use streamload.TarDataset)"
        check_int("batch_size", self.batch_size, 1, single, most=_MOST_BATCH_SIZE)
        check_int("prefetch_batches", self.prefetch_batches, 1)
        check_int("seed", self.seed, 0)
        if not isinstance(self.shuffle, bool):
            check_int("shuffle", self.shuffle, 1, "(the window, in samples), or True or False", most=MAX_SAMPLES)
        if self.num_workers != "auto" and self.feeders is None:
            check_int("num_workers", self.num_workers, 0, _WORKERS_INSTEAD, most=MOST_WORKERS)
        if self.lanes is not None:
            check_int("lanes", self.lanes, 1, "or None", most=MAX_LANES)

    def _check_functions(self) -> None:
        for name in ("collate_fn", "worker_init_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} must be a function, or None")
        if self.collate_fn is not None:
            check_takes_one("collate_fn", self.collate_fn, "the list of a batch's samples")
        self._check_functions_by_field()
        if self.transform is not None and not isinstance(self.transform, Mapping):
            if not callable(self.transform):
                raise TypeError(
                    f"transform={self.transform!r} must be a function, or a mapping from fields to functions"
                )
            check_takes_one("transform", self.transform, "the sample: a tuple of its fields, or a dict if fields=None")

    def _check_functions_by_field(self) -> None:
        for name, key_kind, argument in (
            ("decode", "an extension", "its bytes"),
            ("transform", "a field", "its value"),
        ):
            functions = getattr(self, name)
            if not isinstance(functions, Mapping):
                continue
            for key, function in functions.items():
                if isinstance(key, str) and name == "decode" and handlers_in(function):
                    continue
                if not isinstance(key, str) or not callable(function):
                    raise TypeError(f"{name} must map {key_kind} to a function; it has {key!r}: {function!r}")
                check_takes_one(f"{name}[{key!r}]", function, argument)
            by_field(name, functions)
        if not isinstance(self.decode, bool | Mapping) and not handlers_in(self.decode):
            raise TypeError(
                f"decode={self.decode!r} must be True, False, a mapping from extensions to functions, or decoders of "
                'WebDataset, such as wds.imagehandler("rgb8"): functions of (extension, bytes), one or a list'
            )

    def _check_fields(self, wanted: Sequence[str]) -> None:
        advice = f'fields={wanted!r} must be a tuple of strings, such as ("jpg;png", "cls")'
        if isinstance(wanted, str) or not isinstance(wanted, Sequence):
            raise TypeError(advice)
        if not all(isinstance(entry, str) for entry in wanted):
            raise ValueError(advice)
        entries = [(";".join(alternatives(entry.removesuffix("?"))), entry.endswith("?")) for entry in wanted]
        names = [name for entry, _ in entries for name in entry.split(";")]
        if not all(names) or not names:
            raise ValueError(advice)
        for name in names:
            if name.startswith("__") and name not in SAMPLE_NAMES:
                raise ValueError(f"fields={wanted!r}: {name!r} is not a field; use {' or '.join(SAMPLE_NAMES)}")
        optional = {entry for entry, is_optional in entries if is_optional}
        twice = optional.intersection(entry for entry, is_optional in entries if not is_optional)
        wrong = next((entry for entry, _ in entries if "?" in entry or entry in twice), None)
        if wrong is not None:
            raise ValueError(
                f"fields={wanted!r}: {wrong!r} is not valid; a question mark makes a field optional, as in "
                '("jpg", "txt?"), and follows the last alternative: "jpg;png?"'
            )
        if not optional.isdisjoint(SAMPLE_NAMES):
            raise ValueError(f"fields={wanted!r}: every sample has {' and '.join(SAMPLE_NAMES)}; leave out the ?")
        for name in (name for key in self.transform_keys for name in alternatives(key)):
            if name in SAMPLE_NAMES:
                raise ValueError(f"transform has a function for {name!r}; only a whole-sample function can change it")
            if name not in names:
                raise ValueError(
                    f"transform has a function for {name!r}, which is not in fields={wanted!r}"
                    f"{did_you_mean(name, names)}"
                )
        self.field_names, self.optional_fields = tuple(entry for entry, _ in entries), frozenset(optional)

    def _check_storage(self) -> None:
        if self.memory_budget != "auto":
            parse_bytes("memory_budget", self.memory_budget)
        if self.cache_size is not None:
            parse_bytes("cache_size", self.cache_size)
            if self.cache_dir is None:
                raise ValueError(
                    f"cache_size={self.cache_size!r} has no effect without cache_dir, the folder of the cache"
                )
        if self.cache_dir is None:
            return
        if not isinstance(self.cache_dir, str | os.PathLike):
            raise TypeError(f"cache_dir={self.cache_dir!r} must be the path of a folder, or None")
        refuse_url("cache_dir", self.cache_dir)
        self.cache_folder = os.path.abspath(os.path.expanduser(os.fspath(self.cache_dir)))
        _check_cache_folder(self.cache_folder)


def _check_cache_folder(folder: str) -> None:
    """Create the cache's folder if it is missing, and raise ValueError unless it can be used."""
    if (foreign := why_not_private(shards_folder(folder))) is not None:
        raise ValueError(
            f"cache_dir={folder!r} cannot be used: {foreign}, so others may have written there; name one of your own"
        )
    try:
        os.makedirs(folder, exist_ok=True)
        os.scandir(folder).close()
    except OSError as error:
        raise ValueError(
            f"cache_dir={folder!r} cannot be used: {error.strerror} ({error.filename!r}); name a writable folder"
        ) from None


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: the arguments, else torch.distributed's, else RANK and WORLD_SIZE, else 0 and 1.

    Raises:
        TypeError, ValueError: only one argument is given, or they are invalid.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank!r} and world_size={world_size!r} go together; give both or neither")
    if rank is None or world_size is None:
        rank, world_size = detected_rank() or (0, 1)
    check_int("world_size", world_size, 1, most=MAX_LANES)
    check_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank={rank} must be below world_size={world_size}; ranks are counted from 0")
    return rank, world_size


@dataclass(frozen=True)
class RayFeeders:
    """Run a loader's feeders as actors of a Ray cluster that includes the trainer's machine.

    Attributes:
        number: the number of feeders.
        num_cpus: the processors that each feeder claims, and the number of its workers.
        resources: other resources that each feeder claims, by Ray's names, such as `{"cpu_node": 1}`.
        memory: the memory that each feeder claims, as a number of bytes or "8GB"; None claims none.
        address: `HOST:PORT` of the cluster's head; "auto" uses RAY_ADDRESS, or else this machine's cluster.
        runtime_env: the actors' runtime environment, as for `ray.init`.
        start_timeout: seconds within which all feeders must start and answer; otherwise ClusterError is raised.

    Raises:
        ImportError: Ray is not installed.
        TypeError, ValueError: a value is invalid.
    """

    number: int
    _: KW_ONLY
    num_cpus: int = 1
    resources: Mapping[str, float] | None = None
    memory: int | str | None = None
    address: str = "auto"
    runtime_env: Mapping[str, Any] | None = field(default=None, repr=False)  # it may hold keys
    start_timeout: float = 60.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ImportError('RayFeeders needs Ray, which is not installed: pip install "streamload[ray]"')
        check_int("number", self.number, 1, most=_MOST_FEEDERS)
        check_int("num_cpus", self.num_cpus, 1, most=MOST_WORKERS)
        timeout = self.start_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not (timeout > 0 and isfinite(timeout)):
            raise ValueError(f"start_timeout={timeout!r} must be a finite number of seconds above 0")
        if not isinstance(self.address, str) or not self.address:
            raise TypeError(f'address={self.address!r} must be the address of a Ray cluster, or "auto"')
        if self.address != "auto" and ("://" in self.address or not is_host_and_port(self.address)):
            raise ValueError(
                f"address={self.address!r}: the trainer's machine must be a node of the cluster (`ray start "
                '--address=HOST:PORT`), so give HOST:PORT of its head, or "auto"'
            )
        for name in ("resources", "runtime_env"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a mapping, or None")
        if self.memory is not None:
            parse_bytes("memory", self.memory)

    @property
    def demands(self) -> dict[str, float]:
        """Return the resources that each feeder claims, by Ray's names."""
        memory = {} if self.memory is None else {"memory": float(parse_bytes("memory", self.memory))}
        return {"CPU": float(self.num_cpus), **memory, **(self.resources or {})}


def is_host_and_port(address: str) -> bool:
    """Return True if a text has the form `HOST:PORT`."""
    host, colon, port = address.rpartition(":")
    return bool(host and colon) and port.isdecimal()
