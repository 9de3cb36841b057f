"""`pack`: samples from a function of the user's to shards, with what `shardify` promises."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import cloudpickle

from streamload.arguments import parse_bytes
from streamload.pack.planning import Span, estimated_spans, measured_positions
from streamload.pack.ray_pool import pickled_by_value
from streamload.pack.run import Pool, Start, pack_into
from streamload.pack.tasks import PackCalls, Record, Target, Task, digest_of, measure, shard_name
from streamload.storage.storages import Storages


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

    Every reader refuses the destination until everything is packed. Equal samples give equal bytes, whatever `workers`
    is. After a kill, the same call with `resume=True` goes on and gives the same bytes, if the function gives the same
    samples again: shards are kept whose inputs, and the function's own source, are as they were. What the function
    calls, holds or reads otherwise is not compared.

    Some inputs (one in sixteen, 128 at most) are packed once more at the start, to see how many fill a shard.

    Args:
        function: takes an input; gives a sample as `ShardWriter.write` takes it, or yields samples, or gives None.
            Workers get it pickled, also from `__main__`.
        inputs: whatever pickles: paths, rows of a table, numbers. They are listed in memory before packing.
        destination: a folder or a url.
        workers: processes; None is one per core.
        max_bytes: no shard is larger; a number of bytes, or "256MB".
        max_count: no shard has more samples.
        resume: go on with an interrupted run.
        overwrite: remove the shards that are there, or an interrupted run, first.
        storage_options: as for `StreamLoader`.
        filesystem: an fsspec filesystem to write with, as for `StreamLoader`.
        ray: pack on the nodes of a Ray cluster: its address, or "auto" for that of this machine. The inputs, and the
            destination if it is a folder, lie on a file system that all nodes have at the same path. `workers` is then
            how many tasks Ray gets at once.

    Raises:
        StreamloadError: the function fails or gives a wrong sample, with the number of the input; or a process died.
        ClusterError: there is no such cluster, or a node differs from this machine.
        ValueError: there is no sample, two have one key, one is too large, or the destination cannot be used.
        OSError: something cannot be written.
    """
    check_counts(workers=workers, max_count=max_count)
    listed = list(inputs)
    pickled = [pickle.dumps(value) for value in listed]
    files = [_file_of(value) for value in listed]
    most_bytes = parse_bytes("max_bytes", max_bytes)
    storages = Storages(storage_options, filesystem)
    target = Target(os.fspath(destination).rstrip("/") or "/", storages, max_bytes=most_bytes, max_count=max_count)
    code = digest_of(code_of(function), version("streamload"), most_bytes, max_count)
    function_bytes = pickled_by_value(function) if ray is not None else cloudpickle.dumps(function)

    def plan(pool: Pool) -> list[Task]:
        some = [PackCalls(function_bytes, (pickled[n],), n) for n in measured_positions(len(listed))]
        measured = list(pool.results(partial(measure, work, most_bytes) for work in some))
        spans = estimated_spans(len(listed), measured, most_bytes, max_count)
        names = [shard_name(number) for number in range(len(spans))]
        return call_tasks(function_bytes, code, pickled, files, names=names, spans=spans)

    check = partial(check_samples, len(listed))
    start = Start(resume, overwrite, workers, ray)
    pack_into(target, start, plan, check, label="packing", unit="inputs")


def call_tasks(
    function: bytes,
    code: str,
    inputs: Sequence[bytes],
    versions: Sequence[object],
    *,
    names: Sequence[str],
    spans: Sequence[Span],
    may_be_empty: bool = False,
) -> list[Task]:
    """Return a task for each span of inputs.

    Args:
        function: pickled.
        code: a digest of the function and the options.
        inputs: each pickled.
        versions: what else tells each input from what it was.
        names: of the shard of each span.
        spans: consecutive inputs.
        may_be_empty: make a shard also of a span without samples.
    """
    tasks = []
    for name, (start, end) in zip(names, spans, strict=True):
        work = PackCalls(function, tuple(inputs[start:end]), start)
        digest = digest_of(name, code, inputs[start:end], versions[start:end])
        tasks.append(Task("", name, digest, end - start, work, may_be_empty))
    return tasks


def check_counts(**numbers: int | None) -> None:
    """Raise ValueError for a number that is given and is no integer of at least 1."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be an integer of at least 1, or None")


def check_samples(inputs: int, records: Sequence[Record], *, is_unique: bool = True) -> None:
    """Raise ValueError if there is no shard, or two samples have one key."""
    seen: set[str] = set()
    tables = [shard.table for record in records for shard in record.shards]
    for table in tables if is_unique else ():
        for key in table.keys():  # noqa: SIM118
            if key in seen:
                raise ValueError(f"two samples have the key {key!r}; give each one of its own")
            seen.add(key)
    if not tables:
        raise ValueError(f"the function gave no sample of {inputs:,} inputs")


def _file_of(value: object) -> tuple[str, int, int] | None:
    """Return path, size and time of modification of an input that is the path of a file, so a change is noticed."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path or not os.path.isfile(path):
        return None
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def code_of(function: Callable[..., Any]) -> str:
    """A digest of a function's name and source, if that can be read, and of the arguments that `partial` gives it."""
    given = []
    while isinstance(function, partial):
        given.append((function.args, sorted(function.keywords.items())))
        function = function.func
    plain: Any = function if inspect.isroutine(function) else type(function)
    try:
        source = inspect.getsource(plain)
    except (OSError, TypeError):
        source = ""
    return digest_of(plain.__qualname__, given, source)
