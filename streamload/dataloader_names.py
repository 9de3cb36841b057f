"""Keywords and methods that people know from other loaders: each is refused with what to use here instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from streamload.numpy_scalars import as_python

__all__ = ["FOR_DATASET", "FOR_LOADER", "FOR_WRITER", "knows_other_names", "no_attribute"]

P = ParamSpec("P")
R = TypeVar("R")

_ALIKE = 0.7

_RANKS = "ranks share the samples by themselves (rank= and world_size=, or torch.distributed's), and so do workers"
_WINDOW = "shuffle=True shuffles shards, and samples within shuffle_window="
_EPOCHS = "each pass over the loader is an epoch; epoch after epoch is a loop around it"
_LENGTH = "len(loader) is counted from the shards; for shorter or longer epochs there is epoch_size="
_FIELDS = (
    "fields= names the fields as they are, with alternatives such as 'jpg;png', in your order; a function in "
    "transform= may give a dict other keys"
)
_TRANSFORM = "transform= takes one function of a sample, or a mapping from fields to functions"
_CACHE = "cache_dir= keeps shards on the disk, and cache_size= says how much, such as '200GB'"

FOR_LOADER: Mapping[str, str] = {
    # torch's DataLoader
    "dataset": "name the shards with urls=; for a Dataset of your own keep torch's DataLoader, or pack it with "
    "streamload.ShardWriter",
    "batch_sampler": "batches are cut from the order by batch_size= and drop_last=; for batches of your own choice use "
    "streamload.TarDataset with torch's DataLoader",
    "multiprocessing_context": "it is not needed: workers are neither forked nor spawned by multiprocessing, and need "
    "no main guard; executor= chooses processes or threads",
    "generator": "seed= decides on the order and on all random numbers",
    "prefetch_factor": "prefetch_batches= is the number of batches made ahead, of all workers together",
    "persistent_workers": "workers are always kept from epoch to epoch; close() or `with` ends them",
    "pin_memory_device": "pin_memory= is for CUDA",
    # WebDataset
    "shardshuffle": _WINDOW,
    "resampled": _EPOCHS + "; for drawing with replacement there is weights=",
    "repeat": _EPOCHS,
    "nodesplitter": _RANKS,
    "workersplitter": _RANKS,
    "splitter": _RANKS,
    "detshuffle": "the order is always a function of seed= and the epoch",
    "batched": "batch_size= is the number of samples in a batch",
    "batchsize": "batch_size= is the number of samples in a batch",
    "partial": "drop_last=True drops the last batch if it is not full",
    "handler": 'on_error="skip" goes on behind samples that fail; damaged shards are always errors: find them with '
    "`streamload verify`",
    "select_files": "fields= names the fields to read",
    **dict.fromkeys(("rename_files", "rename", "rename_keys", "extract_keys", "to_tuple"), _FIELDS),
    **dict.fromkeys(("map", "map_dict", "map_tuple", "compose"), _TRANSFORM),
    **dict.fromkeys(("with_epoch", "with_length", "slice"), _LENGTH),
    "select": "batches have a fixed size: leave samples out when packing, choose them by sampler=, or draw those of "
    "some classes by weights=",
    "unbatched": "it gives whole batches; samples one by one are those of streamload.TarDataset",
    "xdecode": "decode= says how fields are decoded",
    "empty_check": "a pattern that matches nothing is always an error",
    "collation_fn": "collate_fn= makes a batch of a list of samples",
    "length": _LENGTH,
    "epoch_length": _LENGTH,
    "buffer_size": "shuffle_window= is how far, in samples, a sample may move",
    "shuffle_buffer": "shuffle_window= is how far, in samples, a sample may move",
    "shuffle_buffer_size": "shuffle_window= is how far, in samples, a sample may move",
    "bufsize": "shuffle_window= is how far, in samples, a sample may move",
    "initial": "the first batch comes as soon as its samples are there, however wide shuffle_window= is",
    # LitData
    "input_dir": "urls= names the shards: a folder, a pattern, or a list of them",
    "max_cache_size": _CACHE,
    "item_loader": "decode= says how fields are decoded",
    "serializers": "decode= says how fields are decoded",
    "subsample": "name fewer shards in urls=; epoch_size= makes epochs shorter, which go through all samples in turn",
    "max_pre_download": "shards are fetched as far ahead as memory_budget= allows",
    "index_path": "index= names the folder of the index",
    "profile_batches": "statistics() says what each stage did and what limits the run",
    # other spellings
    "path": "urls= names the shards",
    "url": "urls= names the shards",
    "batch": "batch_size= is the number of samples in a batch",
    "workers": "num_workers= is the number of worker processes",
    "prefetch": "prefetch_batches= is the number of batches made ahead",
    "epoch": "set_epoch() chooses the epoch of the next pass",
    "window": "shuffle_window= is how far, in samples, a sample may move",
    "transforms": _TRANSFORM,
    "num_replicas": "world_size= is the number of ranks",
}
"""What StreamLoader has in the stead of each; a name that it has itself is never looked up here."""

_LOADS = "it belongs to torch's DataLoader, which takes this dataset"
_LOOPS = "a dataset has samples by their number; batches and epochs are those of torch's DataLoader, or of StreamLoader"
_SAMPLERS = (
    "a sampler of torch's DataLoader says which samples come, and in which order; StreamLoader does so by itself"
)

FOR_DATASET: Mapping[str, str] = {
    **dict.fromkeys(("batch_size", "shuffle", "sampler", "num_workers", "collate_fn"), _LOADS),
    **dict.fromkeys(("drop_last", "pin_memory", "batch_sampler", "generator", "prefetch_factor"), _LOADS),
    "target_transform": 'transform= takes a mapping from fields to functions: {"jpg": f, "cls": g}',
    # WebDataset
    **dict.fromkeys(("rename_files", "rename", "rename_keys", "extract_keys", "to_tuple", "select_files"), _FIELDS),
    **dict.fromkeys(("map", "map_dict", "map_tuple", "compose"), _TRANSFORM),
    **dict.fromkeys(("batched", "unbatched", "with_epoch", "with_length", "repeat"), _LOOPS),
    **dict.fromkeys(("select", "slice"), "torch.utils.data.Subset takes the numbers of the samples that you want"),
    **dict.fromkeys(("shardshuffle", "resampled", "nodesplitter", "workersplitter", "detshuffle"), _SAMPLERS),
    "handler": 'an error is raised for the sample that it is about; StreamLoader has on_error="skip"',
    # others
    "cache_dir": "it reads shards where they lie; StreamLoader has a disk cache",
    "seed": "random numbers are torch's: torch.manual_seed, or the DataLoader's generator",
    "root": "urls= names the shards",
    "input_dir": FOR_LOADER["input_dir"],
}
"""The same for TarDataset."""

_ENCODES = "fields are encoded by their extensions; for others write bytes"
_COMPRESSES = (
    "members may be compressed: `json.gz` takes what `json` takes; whole shards that are have no random access"
)
_REPRODUCIBLE = "shards hold no times and no owners, so that the same samples give the same bytes"

FOR_WRITER: Mapping[str, str] = {
    # WebDataset
    "pattern": "the folder, or a path with %06d, comes first",
    "maxcount": "max_count= is the most samples of a shard",
    "maxsize": "max_bytes= is the most bytes of a shard",
    "post": "a sample is published with its shard; go through the finished shards behind the `with` block",
    "start_shard": "shards are numbered from 0; give a prefix= or a folder of its own to what is added",
    "encoder": _ENCODES,
    "compress": _COMPRESSES,
    "mode": "shards are written anew; overwrite=True replaces those that exist",
    **dict.fromkeys(("mtime", "user", "group", "keep_meta"), _REPRODUCIBLE),
    "opener": "storage_options= or filesystem= says how a bucket is reached",
    "stream": "the folder, or a path with %06d, comes first",
    "verbose": "it says nothing while all goes well",
    # LitData and MosaicML
    "chunk_bytes": "max_bytes= is the most bytes of a shard",
    "chunk_size": "max_count= is the most samples of a shard",
    "size_limit": "max_bytes= is the most bytes of a shard",
    "out": "the folder, or a path with %06d, comes first",
    "output_dir": "the folder, or a path with %06d, comes first",
    "columns": _ENCODES,
    "compression": _COMPRESSES,
}
"""The same for ShardWriter."""


def knows_other_names(hints: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a constructor answer a keyword that it does not have by the one to use; its signature stays what it is.

    NumPy scalars reach the constructor as Python numbers.

    Args:
        hints: for keywords of others what to use instead.

    Returns:
        A decorator. What it makes raises TypeError for keywords that the function does not have.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters.keys()
        owner = function.__qualname__.partition(".")[0]
        construct: Callable[..., R] = function

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= known:
                raise TypeError(_refusal(owner, [name for name in kwargs if name not in known], known, hints))
            return construct(*map(as_python, args), **{name: as_python(value) for name, value in kwargs.items()})

        return checked

    return decorate


def no_attribute(owner: type, name: str, hints: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that an object does not have; a method of other loaders is answered as a keyword is.

    Args:
        owner: the object's class, whose constructor has keywords.
        name: the attribute's.
        hints: for names of others what to use instead.
    """
    hint = hints.get(name, "")
    if name in inspect.signature(owner).parameters:
        hint = f"it is a keyword: {owner.__name__}(urls, {name}=...)"
    said = f"{owner.__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{said} ({hint})" if hint else said)


def _refusal(owner: str, unknown: Iterable[str], known: Iterable[str], hints: Mapping[str, str]) -> str:
    told = [f"{name!r} ({_hint(name, known, hints)})" for name in unknown]
    return f"{owner} has no keyword {', and no '.join(told)}"


def _hint(name: str, known: Iterable[str], hints: Mapping[str, str]) -> str:
    if name in hints:
        return hints[name]
    public = [other for other in known if other != "self"]
    alike = difflib.get_close_matches(name.lower(), public, 1, _ALIKE)
    if alike:
        return f"did you mean {alike[0]!r}?"
    borrowed = difflib.get_close_matches(name.lower(), list(hints), 1, _ALIKE)
    return hints[borrowed[0]] if borrowed else f"there are {', '.join(public)}"
