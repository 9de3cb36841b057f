"""`pack`: samples from a function of the user's to shards, with what `shardify` promises."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from importlib.metadata import version
from types import CellType, CodeType
from typing import Any, ParamSpec

import cloudpickle
import numpy as np

from streamload.arguments import parse_bytes
from streamload.errors import StreamloadError
from streamload.pack.failures import UsageError
from streamload.pack.packing import PackOptions, pack_calls, pack_shards
from streamload.pack.publishing import ANY_NAMES, NAMES, Part
from streamload.pack.ray_pool import open_pool, pickled_by_value
from streamload.pack.remote_staging import RemoteStaging
from streamload.pack.sources.listing import Listing
from streamload.pack.staging import Run, Staging, is_being_published, open_staging
from streamload.pack.targets import Place, Start, check_destination, refuse_shards
from streamload.storage.storages import Storages
from streamload.workers.launchers import available_processors

_SWITCH = re.compile(r"--(resume|overwrite|sidecar)\b")
_NUMBER = re.compile(r"--(max-bytes|max-count|workers)\b")

_Arguments = ParamSpec("_Arguments")
Packing = Callable[[bytes, Sequence[bytes], Listing, PackOptions, Staging], Part]


def naming_arguments(call: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """A function whose errors name arguments where those of the command that it stands for name options.

    A command calls what is wrapped (`inspect.unwrap`).
    """

    @wraps(call)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except UsageError as exc:
            raise ValueError(_in_python(str(exc), call.__name__)) from exc
        except BaseException as exc:
            if isinstance(exc, StreamloadError):
                exc.message = _in_python(exc.message, call.__name__)
            if hasattr(exc, "__notes__"):
                exc.__notes__ = [_in_python(note, call.__name__) for note in exc.__notes__]
            raise

    return called


@naming_arguments
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
    sync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    ray: str | None = None,
) -> None:
    """Pack the samples that a function makes of each input into shards with an index, in the order of the inputs.

    Nothing is published unless everything could be packed. Equal samples give equal bytes, whatever `workers` is. After
    a kill, the same call with `resume=True` goes on and gives the same bytes, if the function gives the same samples
    again. It is refused if the function's own code, the inputs, or the size or time of an input that is the path of
    a file have changed; what the function calls or reads otherwise is not compared.

    Args:
        function: takes an input; gives a sample as `ShardWriter.write` takes it, or yields samples, or gives None.
            Workers get it pickled, also from `__main__`.
        inputs: whatever pickles: paths, rows of a table, numbers. They are listed in memory before packing.
        destination: a folder or a url.
        workers: processes; None is one per core.
        max_bytes: no shard is larger; a number of bytes, or "256MB".
        max_count: no shard has more samples.
        resume: go on with an interrupted run.
        overwrite: replace the shards that are there, or discard an interrupted run.
        sync: flush everything to the disk.
        storage_options: as for `StreamLoader`.
        ray: pack on the nodes of a Ray cluster: its address, or "auto" for that of this machine. The inputs and the
            destination (for a bucket, the folder for temporary files, `TMPDIR`) lie on a file system that all nodes
            have at the same path. `workers` is then how many tasks Ray gets at once.

    Raises:
        StreamloadError: the function fails or gives a wrong sample, with the number of the input; or a process died.
        ClusterError: there is no such cluster, or a node differs from this machine.
        ValueError: there is no sample, two have one key, one is too large, or the destination cannot be used.
        OSError: something cannot be written.
    """
    listed = list(inputs)
    pickled = [pickle.dumps(given) for given in listed]
    pack_inputs(
        function,
        pickled,
        _listing(listed, pickled),
        destination,
        workers=workers,
        max_bytes=max_bytes,
        max_count=max_count,
        resume=resume,
        overwrite=overwrite,
        sync=sync,
        storages=Storages(storage_options),
        ray=ray,
    )


def pack_inputs(
    function: Callable[[Any], Any],
    inputs: Sequence[bytes],
    listing: Listing,
    destination: str | os.PathLike[str],
    *,
    workers: int | None,
    max_bytes: int | str,
    max_count: int | None,
    resume: bool,
    overwrite: bool,
    sync: bool,
    storages: Storages,
    ray: str | None = None,
    names: Sequence[str] | None = None,
    may_be_empty: bool = False,
) -> None:
    """`pack` with inputs that are pickled and listed already; what a later run compares is in the listing.

    Shards are cut by `max_bytes` and `max_count`, unless there are `names`, one for the shard of each input, which may
    be of any size, and where it `may_be_empty` is written without a sample too. All else is as for `pack`.

    Raises:
        UsageError, ValueError, StreamloadError, OSError: as `pack`, in the words of a command.
    """
    check_counts(workers=workers, max_count=max_count)
    dest = os.fspath(destination)
    options = PackOptions(
        max_bytes=parse_bytes("max_bytes", max_bytes),
        max_count=max_count,
        shuffle=False,
        seed=0,
        fractions=None,
        skip_bad=False,
        resizing=None,
        workers=workers or available_processors(),
        sync=sync,
    )
    remembered: dict[str, Any] = {"function": _code_of(function), "streamload": version("streamload")}
    packing: Packing
    if names is None:
        remembered |= {"max_bytes": options.max_bytes, "max_count": max_count}
        packing, naming = pack_calls, NAMES
    else:
        remembered |= {"shards": "one for each, also empty" if may_be_empty else "one for each"}
        packing, naming = partial(pack_shards, names=names, may_be_empty=may_be_empty), ANY_NAMES
    if storages.is_local(dest):
        place = Place(dest, None, None, naming)
    else:
        place = Place(dest.rstrip("/"), storages, None, naming)
    run = Run(place.dest, remembered, listing, resume, overwrite, sync, naming)
    pickled = cloudpickle.dumps(function) if ray is None else pickled_by_value(function)
    with open_pool(ray, workers) as pool:
        _run(partial(packing, pickled, inputs), len(inputs), replace(options, pool=pool), place, run)


def check_counts(**numbers: int | None) -> None:
    """Raises ValueError for a number that is given and is no integer of at least 1."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r} must be an integer of at least 1, or None")


def _run(
    packing: Callable[[Listing, PackOptions, Staging], Part], inputs: int, options: PackOptions, place: Place, run: Run
) -> None:
    start = Start(overwrite=run.overwrite, resume=run.resume)
    if not check_destination(place, [""], start, run.options):
        return
    folder = place.staging_folder()
    staging = Staging(folder, run) if place.storages is None else RemoteStaging(folder, run, place.storages, [""])
    with open_staging(staging):
        if place.storage is None and not is_being_published(place.dest):  # another may have published meanwhile
            refuse_shards(place, [""], start)
        parts = staging.half_published()
        if parts is None:
            parts = [packing(run.listing, options, staging)]
            if not parts[0].shards:
                staging.abandon()
                raise ValueError(f"the function gave no sample of {inputs:,} inputs, so nothing was published")
        staging.publish(parts, None)


def _listing(inputs: Sequence[object], pickled: Sequence[bytes]) -> Listing:
    """The inputs as a run remembers them; files with their sizes and times, so that a changed one is noticed."""
    found = np.full((len(inputs), 2), -1, np.int64)
    paths = []
    for number, given in enumerate(inputs):
        path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
        is_path = isinstance(path, str) and "\0" not in path
        paths.append(str(path) if is_path else f"input {number}")
        if is_path and path is not None and os.path.isfile(path):
            status = os.stat(path)
            found[number] = status.st_size, status.st_mtime_ns
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in pickled))
    return Listing(paths, found[:, 0].copy(), found[:, 1].copy(), digest.digest())


def _code_of(function: Callable[..., Any]) -> str:
    """A digest of a function's name, code and fixed values; the bytes of a pickle differ between processes."""
    fixed = ""
    while isinstance(function, partial):
        fixed += _value_text((function.args, function.keywords))
        function = function.func
    plain: Any = inspect.unwrap(function)
    if not inspect.isroutine(plain):
        plain = type(plain).__call__
    code = getattr(plain, "__code__", None)
    text = _text_of(code) if isinstance(code, CodeType) else ""
    held = [cell.cell_contents for cell in getattr(plain, "__closure__", None) or () if _is_set(cell)]
    fixed += _value_text((getattr(plain, "__defaults__", None), getattr(plain, "__kwdefaults__", None), held))
    return hashlib.sha256(f"{plain.__qualname__}{fixed}{text}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _value_text(value: object) -> str:
    """A value that a function works with, as far as it says the same in another process; no credentials."""
    if callable(value):
        return _code_of(value)
    if isinstance(value, Mapping):
        return repr([(name, _value_text(value[name])) for name in sorted(value, key=repr) if name != "storage_options"])
    if isinstance(value, tuple | list):
        return repr([_value_text(each) for each in value])
    return repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__qualname__


def _is_set(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _text_of(code: CodeType) -> str:
    """What a code does, without the lines where it stands; sets in one order."""
    values = [
        _text_of(value)
        if isinstance(value, CodeType)
        else repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, values))


def _in_python(text: str, name: str) -> str:
    """A message of a command in the words of a call of this function."""
    text = text.replace("run the same command with --resume", f"call {name} again with resume=True")
    text = text.replace("run the same command again, with or without --resume", f"call {name} again")
    text = re.sub(r"\bDEST\b", "destination", text)
    return _SWITCH.sub(r"\1=True", _NUMBER.sub(lambda found: found[1].replace("-", "_"), text))
