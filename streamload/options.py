"""The arguments of a loader, checked: every wrong argument is refused by name, with its value and what is right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from streamload.arguments import alternatives, by_field, parse_bytes
from streamload.decode.array_files import DECOMPRESSED_LIMIT_BYTES
from streamload.decode.decoders import may_expand
from streamload.decode.failure import Attempt
from streamload.decode.job_pickle import pickle_job
from streamload.decode.missing_field import those_there_are
from streamload.decode.tasks import SAMPLE_NAMES, Job, OnError, OwnTransforms, Transform
from streamload.decode.user_code import check_takes_one
from streamload.feeder.messages import PipelineSettings
from streamload.fetch.budget import default_budget, expansion_bytes
from streamload.fetch.cache.disk_cache import bytes_in_cache, shards_folder
from streamload.fetch.fetched_listing import Fetching
from streamload.limits import MOST_WORKERS_PER_PROCESSOR
from streamload.order.options import MAX_LANES, MAX_SAMPLES, OrderOptions
from streamload.ray_feeders import RayFeeders
from streamload.storage.local_files import refuse_url, why_not_private
from streamload.storage.storages import Storages
from streamload.text import counted
from streamload.warn_at_caller import warn_at_caller
from streamload.workers.launchers import found_rank, local_ranks, processors_of_rank

_MOST_BATCH_SIZE = 1 << 40
DEFAULT_WINDOW = 10_000
"""Samples: mixes about eleven shards of a thousand samples."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `StreamLoader`, which documents them.

    Raises:
        TypeError, ValueError: an argument makes no sense.
    """

    batch_size: int
    shuffle: bool | int
    fields: Sequence[str] | None
    decode: bool | Mapping[str, Callable[[bytes], Any]]
    transform: Transform | None
    collate_fn: Callable[[list[Any]], Any] | None
    drop_last: bool
    pad: bool
    num_workers: int | Literal["auto"] | RayFeeders
    prefetch_batches: int
    worker_init_fn: Callable[[int], Any] | None
    seed: int
    lanes: int | None
    storage_options: Mapping[str, Any] | None = field(repr=False)  # it holds keys
    filesystem: Any = field(repr=False)
    cache_dir: str | os.PathLike[str] | None
    cache_size: int | str | None
    memory_budget: int | str
    on_error: OnError
    verify: bool

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """The options among other arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_functions()
        self._check_fields()
        self._check_storage()

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has a new order."""
        return self.shuffle is not False

    @property
    def shuffle_window(self) -> int:
        """How far a sample may move within its lane, in samples."""
        return DEFAULT_WINDOW if isinstance(self.shuffle, bool) else self.shuffle

    @property
    def field_names(self) -> tuple[str, ...] | None:
        """The wanted fields, without the question marks behind optional ones and without blanks; None for all."""
        return None if self.fields is None else tuple(map(_field_name, self.fields))

    @property
    def optional_fields(self) -> frozenset[str]:
        """The wanted fields that samples may lack."""
        return frozenset(_field_name(entry) for entry in self.fields or () if entry.endswith("?"))

    @property
    def workers(self) -> int:
        """How many workers each feeder has, "auto" resolved."""
        if isinstance(self.num_workers, RayFeeders):
            return self.num_workers.num_cpus
        return processors_of_rank() if self.num_workers == "auto" else self.num_workers

    @property
    def feeders(self) -> RayFeeders | None:
        """Feeders on other nodes; None if this machine makes the batches."""
        return self.num_workers if isinstance(self.num_workers, RayFeeders) else None

    def _warn_of_workers(self) -> None:
        """Each worker takes memory, and seconds of a processor to start."""
        processors = processors_of_rank()
        if isinstance(self.num_workers, int) and self.num_workers > MOST_WORKERS_PER_PROCESSOR * processors:
            warn_at_caller(
                f"num_workers={self.num_workers}, and there {'is' if processors == 1 else 'are'} "
                f"{counted(processors, 'processor')} for this process: so many workers take long to start, and are no "
                "faster; leave num_workers out"
            )

    def resolved_for(self, urls: Sequence[str]) -> Options:
        """The options for these shards: "auto" means no workers where only this process can read them.

        Warns, at the user's line, of far more workers than processors.

        Raises:
            ValueError: there are to be workers, and only this process can read some of the shards.
        """
        self._warn_of_workers()
        only_here = [url for url in urls if self.storages.is_process_local(url)]
        if only_here and self.feeders is not None:
            raise ValueError(
                f"num_workers={self.feeders!r}, but only this process can read {only_here[0]!r}; put the shards where "
                "all nodes can read them, into a bucket or on a file system that they share"
            )
        if not only_here or self.num_workers == 0:
            return self
        if self.num_workers == "auto":
            return replace(self, num_workers=0)
        raise ValueError(
            f"num_workers={self.num_workers}, but only this process can read {only_here[0]!r}: it lies in its memory, "
            "or the filesystem's class is in the script itself; use num_workers=0, put the shards on a disk, or the "
            "class into a module"
        )

    @cached_property
    def storages(self) -> Storages:
        """Where shards lie."""
        return Storages(self.storage_options, self.filesystem)

    @cached_property
    def budget_bytes(self) -> int:
        """What shards, batches and requests may take in memory; "auto" resolved, once: later less may be free."""
        if self.memory_budget == "auto":
            return default_budget(local_ranks())
        return parse_bytes("memory_budget", self.memory_budget)

    def fetching(self, existing: Sequence[str] = ()) -> Fetching:
        """The part that concerns shards that have to be fetched, which hold the `existing` fields, if known."""
        folder = self._cache_folder
        return Fetching(
            self.storages,
            self.budget_bytes,
            folder,
            0 if folder is None else self._cache_bytes(folder),
            self._expansion_room_bytes(existing) is not None,
        )

    @property
    def _cache_folder(self) -> str | None:
        return None if self.cache_dir is None else os.path.abspath(os.path.expanduser(os.fspath(self.cache_dir)))

    def _cache_bytes(self, folder: str) -> int:
        if self.cache_size is not None:
            return parse_bytes("cache_size", self.cache_size)
        free_bytes = shutil.disk_usage(_existing_part(folder)).free
        return (free_bytes + bytes_in_cache(folder)) * 9 // 10  # else each run would evict what the last one has kept

    def job(self, own_transforms: OwnTransforms = (), existing: Sequence[str] = ()) -> Job:
        """The part that concerns what is made of a sample.

        Args:
            own_transforms: those that datasets have of their own.
            existing: the fields that samples have, if known.
        """
        return Job(
            self.field_names,
            self.decode,
            self.transform,
            self.collate_fn,
            self.worker_init_fn,
            self.on_error,
            self.seed,
            own_transforms,
            self._expansion_limit_bytes(own_transforms, existing),
            self.optional_fields,
        )

    def _expanding(self, existing: Sequence[str]) -> int:
        """How many fields of a sample may expand; one where nobody knows which fields there are."""
        if self.fields is None and not existing:
            return int(self.decode is not False)
        wanted = existing if self.field_names is None else self.field_names
        return sum(any(may_expand(name, self.decode) for name in entry.split(";")) for entry in wanted)

    def _expansion_room_bytes(self, existing: Sequence[str]) -> int | None:
        """What one worker may hold of values that have expanded; None where no field can expand."""
        return expansion_bytes(self.budget_bytes) // max(1, self.workers) if self._expanding(existing) else None

    def _expansion_limit_bytes(self, own_transforms: OwnTransforms, existing: Sequence[str]) -> int:
        """What one field may become beyond its own bytes.

        A worker holds those of its rows, and of the last one what is decompressed beside the value that it becomes.
        Where user code gets whole samples or batches, that is a batch; elsewhere values go to their batch one by one.
        """
        room_bytes = self._expansion_room_bytes(existing)
        if room_bytes is None:
            return DECOMPRESSED_LIMIT_BYTES
        transforms = (self.transform, *(own for _, own in own_transforms))
        rows = self.batch_size if self.collate_fn is not None or any(map(callable, transforms)) else 1
        return min(DECOMPRESSED_LIMIT_BYTES, room_bytes // (rows * self._expanding(existing) + 1))

    def pickled_job(self, own_transforms: OwnTransforms = (), existing: Sequence[str] = ()) -> bytes:
        """Pickle the same, see `pickle_job`.

        Raises:
            TypeError: a function holds something that cannot leave this process.
        """
        with Attempt() as attempt:
            return pickle_job(self.job(own_transforms, existing))
        given = {name: getattr(self, name) for name in ("decode", "transform", "collate_fn", "worker_init_fn")}
        for name, function in _one_by_one([*given.items(), *(("transform", own) for _, own in own_transforms)]):
            try:
                pickle_job(function)
            except Exception as error:
                raise TypeError(
                    f"{name} cannot be sent to the workers, because something in it does not pickle ({error}); "
                    "make that inside the function, or use num_workers=0"
                ) from error
        assert attempt.error is not None
        raise attempt.error

    @property
    def repeats(self) -> bool:
        """Whether the batch before comes again for one whose samples all failed; with pad=False it is left out."""
        return self.pad and self.on_error != "raise"

    def pipeline(self, lanes: int, existing: Sequence[str] = ()) -> PipelineSettings:
        """The part that concerns the order and how batches are made, of the `existing` fields, if known."""
        return PipelineSettings(
            order=OrderOptions(
                seed=self.seed,
                shuffle=self.shuffles,
                window=self.shuffle_window,
                lanes=lanes,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                pad=self.pad,
            ),
            fields=self.field_names,
            verify=self.verify,
            prefetch_batches=self.prefetch_batches,
            expansion_room_bytes=self._expansion_room_bytes(existing),
        )

    def check_fields_exist(self, existing: Sequence[str]) -> None:
        """Refuse fields that no shard has.

        Raises:
            ValueError: one of the wanted fields is not among the existing ones.
        """
        for entry in self.field_names or ():
            if entry in SAMPLE_NAMES or entry in self.optional_fields:
                continue
            if not any(name in existing for name in entry.split(";")):
                raise ValueError(
                    f"fields={self.fields!r}: no sample has {entry!r}; there are {those_there_are(entry, existing)}"
                )
        for key in self._transform_keys if self.fields is None else ():
            if not any(name in existing for name in alternatives(key)):
                raise ValueError(
                    f"transform has a function for {key!r}; the fields are {those_there_are(key, existing)}"
                )

    @property
    def _transform_keys(self) -> list[str]:
        """What `transform` has functions for, where it is a mapping."""
        return list(self.transform) if isinstance(self.transform, Mapping) else []

    def _check_numbers(self) -> None:
        single = "" if self.batch_size is not None else "(for single samples there is streamload.TarDataset)"
        _check_int("batch_size", self.batch_size, 1, single)
        if self.batch_size > _MOST_BATCH_SIZE:
            raise ValueError(
                f"batch_size={self.batch_size!r} must be at most {_MOST_BATCH_SIZE:,}: samples are counted in 64 bits, "
                "a batch of every rank at a time; any size above that of the dataset gives one batch of all of it"
            )
        _check_int("prefetch_batches", self.prefetch_batches, 1)
        _check_int("seed", self.seed, 0)
        if not isinstance(self.shuffle, bool):
            _check_int("shuffle", self.shuffle, 1, "(the window, in samples), or True or False", most=MAX_SAMPLES)
        if self.num_workers != "auto" and self.feeders is None:
            _check_int("num_workers", self.num_workers, 0, 'or "auto", or RayFeeders(...)')
        if self.lanes is not None:
            _check_int("lanes", self.lanes, 1, "or None", most=MAX_LANES)

    def _check_choices(self) -> None:
        for name in ("drop_last", "pad", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        _check_choice("on_error", self.on_error, ("raise", "skip", "replace"))

    def _check_functions(self) -> None:
        for name in ("collate_fn", "worker_init_fn"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} must be a function, or None")
        if isinstance(self.decode, Mapping):
            _check_mapping("decode", self.decode, "an extension")
            by_field("decode", self.decode)
        elif not isinstance(self.decode, bool):
            raise TypeError(f"decode={self.decode!r} must be True, False or a mapping from extensions to functions")
        if isinstance(self.transform, Mapping):
            _check_mapping("transform", self.transform, "a field")
            by_field("transform", self.transform)
        elif self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform={self.transform!r} must be a function, or a mapping from fields to functions")
        elif self.transform is not None:
            check_takes_one("transform", self.transform, "the sample: a tuple of its fields, or a dict if fields=None")
        if self.collate_fn is not None:
            check_takes_one("collate_fn", self.collate_fn, "the list of a batch's samples")

    def _check_fields(self) -> None:
        if self.fields is None:
            return
        if isinstance(self.fields, str) or not isinstance(self.fields, Sequence):
            raise TypeError(f'fields={self.fields!r} must be a tuple of strings, such as ("jpg;png", "cls")')
        names = [name for entry in self.fields if isinstance(entry, str) for name in alternatives(_field_name(entry))]
        if not self.fields or not all(isinstance(entry, str) for entry in self.fields) or not all(names):
            raise ValueError(f'fields={self.fields!r} must be a tuple of strings, such as ("jpg;png", "cls")')
        for name in names:
            if name.startswith("__") and name not in SAMPLE_NAMES:
                raise ValueError(f"fields={self.fields!r}: besides fields there are {' and '.join(SAMPLE_NAMES)} only")
        twice = self.optional_fields.intersection(_field_name(name) for name in self.fields if not name.endswith("?"))
        wrong = next((entry for entry in self.field_names or () if "?" in entry or entry in twice), None)
        if wrong is not None:
            raise ValueError(
                f"fields={self.fields!r}: {wrong!r} cannot be; one question mark behind a field makes it optional: "
                '("jpg", "txt?"), or behind all of its alternatives: "jpg;png?"'
            )
        if any(name in SAMPLE_NAMES for name in self.optional_fields):
            raise ValueError(f"fields={self.fields!r}: every sample has {' and '.join(SAMPLE_NAMES)}; leave out the ?")
        for name in (name for key in self._transform_keys for name in alternatives(key)):
            if name in SAMPLE_NAMES:
                raise ValueError(f"transform has a function for {name!r}; use one on whole samples for that")
            if name not in names:
                raise ValueError(f"transform has a function for {name!r}, which is not in fields={self.fields!r}")

    def _check_storage(self) -> None:
        if self.memory_budget != "auto":
            parse_bytes("memory_budget", self.memory_budget)
        if self.cache_size is not None:
            parse_bytes("cache_size", self.cache_size)
            if self.cache_dir is None:
                raise ValueError(
                    f"cache_size={self.cache_size!r} has no meaning without cache_dir, which names the folder"
                )
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | os.PathLike):
            raise TypeError(f"cache_dir={self.cache_dir!r} must be the path of a folder, or None")
        if self.cache_dir is not None:
            refuse_url("cache_dir", self.cache_dir)
        if self._cache_folder is not None:
            _check_can_be_used("cache_dir", self._cache_folder)


def _field_name(entry: str) -> str:
    return ";".join(alternatives(entry.removesuffix("?")))


def _check_int(name: str, value: object, least: int, alternative: str = "", *, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer of at least {least} {alternative}".rstrip())
    if value < least:
        raise ValueError(f"{name}={value!r} must be at least {least} {alternative}".rstrip())
    if most is not None and value > most:
        raise ValueError(f"{name}={value!r} must be at most {most:,} {alternative}".rstrip())


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def _check_mapping(name: str, mapping: Mapping[Any, Any], what: str) -> None:
    for key, function in mapping.items():
        if not isinstance(key, str) or not callable(function):
            raise TypeError(f"{name} must map {what} to a function; it has {key!r}: {function!r}")
        check_takes_one(f"{name}[{key!r}]", function, "its value" if name == "transform" else "its bytes")


def _one_by_one(given: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Arguments as people write them, with their values; of functions by field each of its own."""
    for name, value in given:
        if isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", function) for key, function in value.items())
        else:
            yield f"{name}=", value


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """From the arguments, else from torch.distributed, else from RANK and WORLD_SIZE; alone by default.

    Raises:
        TypeError, ValueError: only one of them is given, or they don't go together.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank!r} and world_size={world_size!r} go together; give both or neither")
    if rank is None or world_size is None:
        rank, world_size = found_rank() or (0, 1)
    _check_int("world_size", world_size, 1, most=MAX_LANES)
    _check_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank={rank} must be below world_size={world_size}; ranks are counted from 0")
    return rank, world_size


def _existing_part(folder: str) -> str:
    """The folder itself, or the nearest one above it that is there."""
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def _check_can_be_used(name: str, folder: str) -> None:
    """Refuse what is no folder, cannot be made, or holds a cache that another user has prepared.

    One that is there may be full already, and only to be read.
    """
    if (foreign := why_not_private(shards_folder(folder))) is not None:
        raise ValueError(
            f"{name}={folder!r} cannot be used: {foreign}, so it may hold what is not of this cache; name a folder of "
            "your own"
        )
    there = _existing_part(folder)
    if not os.path.isdir(there):
        why = "which is no folder"
    elif os.access(there, (os.R_OK if there == folder else os.W_OK) | os.X_OK):
        return
    else:
        why = "no permission"
    raise ValueError(f"{name}={folder!r} cannot be used: {there!r}, {why}; name a folder that can be written")
