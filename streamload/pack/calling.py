"""`pack`: samples from a user's function to shards."""

from __future__ import annotations

import inspect
import os
import pickle
import reprlib
import tokenize
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import cloudpickle

from streamload.arguments import parse_bytes
from streamload.errors import StorageError, StreamloadError
from streamload.pack.planning import Span, estimated_spans
from streamload.pack.processes import Pool
from streamload.pack.ray_pool import pickled_by_value
from streamload.pack.run import pack_into
from streamload.pack.tasks import Append, Fault, Record, Target, Task, digest_of, shard_name
from streamload.storage.storages import Storages
from streamload.write.shard_writer import check_counts, checked_key, label_of, sample_members

_SHOWN = reprlib.Repr()
_SHOWN.maxother = 200


def pack(
    function: Callable[[Any], Any],
    inputs: Iterable[Any],
    destination: str | os.PathLike[str],
    *,
    workers: int | None = None,
    max_bytes: int | str = 256_000_000,
    max_count: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    ray: str | None = None,
) -> None:
    """Pack the samples that a function makes of each input into shards with an index, in the order of the inputs.

    Every reader refuses the destination until everything is packed. Equal samples give equal bytes for any number of
    workers. After a kill, the same call with `resume=True` goes on to the same bytes: shards are kept if their inputs
    and the function's own source are unchanged; anything else that the function uses is not compared.

    Some inputs (one in sixteen, at most 128) are packed twice, to estimate how many fill a shard.

    Args:
        function: takes an input; returns a sample as for `ShardWriter.write`, yields samples, or returns None. It is
            pickled for the workers, also from `__main__`.
        inputs: anything that can be pickled: paths, rows of a table, numbers. They are listed in memory.
        destination: a folder or a url.
        workers: number of processes; None is one per core.
        max_bytes: maximum size of a shard; a number of bytes, or "256MB".
        max_count: maximum number of samples in a shard.
        resume: go on with an interrupted run.
        overwrite: first remove existing shards, or an interrupted run.
        storage_options: as for `StreamLoader`.
        filesystem: an fsspec filesystem to write with, as for `StreamLoader`.
        ray: the address of a Ray cluster to pack on, or "auto" for that of this machine. Inputs, and a local
            destination, must be on a file system that all nodes share. `workers` is the number of tasks in flight.

    Raises:
        StreamloadError: the function fails or returns a wrong sample, with the number of the input; or a process died.
        ClusterError: there is no such cluster, or a node differs from this machine.
        ValueError: there is no sample, two have the same key, one is too large, or the destination cannot be used.
        OSError: something cannot be written.
    """
    check_counts(workers=workers, max_count=max_count)
    target = Target(
        os.fspath(destination).rstrip("/") or "/",
        Storages(storage_options, filesystem),
        max_bytes=parse_bytes("max_bytes", max_bytes),
        max_count=max_count,
        resume=resume,
        overwrite=overwrite,
        workers=workers,
        ray=ray,
    )
    pack_calls(function, list(inputs), target, code=code_of(function))


def pack_calls(
    function: Callable[[Any], Any],
    inputs: Sequence[Any],
    target: Target,
    *,
    code: object,
    cut: Sequence[tuple[Span, str]] | None = None,
    may_be_empty: bool = False,
    are_keys_unique: bool = True,
    label: str = "packing",
    unit: str = "inputs",
) -> None:
    """Pack the samples that a function makes of each input.

    Args:
        function: as for `pack`.
        inputs: as for `pack`.
        target: where and how shards are written.
        code: identifies the function and its options.
        cut: the inputs of each task, and the name of its shard; None to estimate and number them.
        may_be_empty: make a shard also of a span without samples.
        are_keys_unique: refuse keys that repeat in another shard.
        label: the activity, for the progress.
        unit: the inputs, for the progress.
    """
    pickled = [pickle.dumps(value) for value in inputs]
    function_bytes = pickled_by_value(function) if target.ray is not None else cloudpickle.dumps(function)
    code = digest_of(code, version("streamload"), target.max_bytes, target.max_count)

    def work_on(first: int, end: int) -> PackCalls:
        return PackCalls(function_bytes, tuple(pickled[first:end]), first)

    def plan(pool: Pool) -> list[Task]:
        named = cut
        if named is None:
            spans = estimated_spans(
                pool, len(pickled), lambda number: work_on(number, number + 1), target.max_bytes, target.max_count
            )
            named = [(span, shard_name(number)) for number, span in enumerate(spans)]
        tasks = []
        for (first, end), name in named:
            digest = digest_of(name, code, pickled[first:end], list(map(_file_of, inputs[first:end])))
            tasks.append(Task("", name, digest, end - first, work_on(first, end), may_be_empty))
        return tasks

    def check(records: Sequence[Record]) -> None:
        tables = [shard.table for record in records for shard in record.shards]
        if not tables:
            raise ValueError(f"the function gave no sample of {len(pickled):,} inputs")
        seen: set[str] = set()
        for table in tables if are_keys_unique else ():
            for key in table.keys():  # noqa: SIM118
                if key in seen:
                    raise ValueError(f"two samples have the key {key!r}; give each one of its own")
                seen.add(key)

    pack_into(target, plan, check, label=label, unit=unit)


@dataclass(frozen=True, slots=True)
class PackCalls:
    """The work of packing the samples that a user's function makes of inputs; all are pickled."""

    function: bytes
    inputs: tuple[bytes, ...]
    first: int

    def __call__(self, append: Append) -> Sequence[Fault]:
        """See `Work`. Raises StreamloadError, with the input, if the function fails or a sample is wrong."""
        try:
            function = cloudpickle.loads(self.function)
        except ImportError as exc:  # on another machine
            raise StreamloadError(f"the function needs what cannot be imported here ({exc}); install it") from exc
        for number, pickled in enumerate(self.inputs, start=self.first):
            value = pickle.loads(pickled)
            try:
                for sample in samples_in(function(value)):
                    key = checked_key(sample)
                    members = sample_members(key, sample)
                    append(key, members, label_of(members))
            except StorageError:
                raise
            except Exception as exc:  # whatever the user's function raises
                raise _failed_input(number, value, exc) from exc
        return ()


def samples_in(result: Any) -> Iterable[Mapping[str, object]]:
    """Return the samples in the result of a user's function: None, one sample, or samples. Raises TypeError."""
    if result is None:
        return ()
    if isinstance(result, Mapping):
        return (result,)
    if not isinstance(result, Iterable) or isinstance(result, str | bytes):
        raise TypeError(f"it gave a value of type {type(result).__name__}; give a dict, yield dicts, or give None")
    return result


def _failed_input(number: int, value: object, exc: Exception) -> StreamloadError:
    notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
    ours = os.path.dirname(os.path.dirname(__file__))
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if not frame.filename.startswith(ours)]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return StreamloadError(
        f"input {number} ({_SHOWN.repr(value)}) cannot be packed: {type(exc).__name__}: {exc}{notes}{where}; correct "
        "the function or the input, or give None for inputs to leave out"
    )


def _file_of(value: object) -> tuple[str, int, int] | None:
    """Return path, size and time of modification of an input that is the path of a file."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path or not os.path.isfile(path):
        return None
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def code_of(function: Callable[..., Any]) -> str:
    """Return a digest of a function's name, its source if that can be read, and arguments bound by `partial`."""
    bound = []
    while isinstance(function, partial):
        bound.append((function.args, sorted(function.keywords.items())))
        function = function.func
    plain: Any = function if inspect.isroutine(function) else type(function)
    try:
        source = inspect.getsource(plain)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the last two of a file edited since
        source = ""
    return digest_of(plain.__qualname__, bound, source)
