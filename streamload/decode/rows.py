"""Make rows from bytes: read and decode fields, call the user's functions with seeds, and run their coroutines."""

from __future__ import annotations

import os
import random
import sys
import weakref
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy import random as numpy_random  # otherwise each worker would load it at its first use
from numpy.typing import NDArray

from streamload.arguments import by_field
from streamload.decode.collate import PlacedRows, Rows
from streamload.decode.failure import Attempt, SystemExitError, failure_here, failure_of, in_words
from streamload.decode.field_reader import FieldReader, Progress, RowError, ShardReader, Work, field_of
from streamload.decode.tasks import SAMPLE_NAMES, Column, Job, RowFailure, RowTable, Transform
from streamload.errors import without_secrets
from streamload.images.operations import Compose, ToTensor, is_ours, steps_of
from streamload.images.placing import takes
from streamload.order.randomness import SampleRandomness
from streamload.tar.scan import MISSING

T = TypeVar("T")

PROGRAM_ERRORS = (
    *(NameError, AttributeError, TypeError, ImportError, SyntaxError, NotImplementedError, MemoryError),
    SystemExitError,
)
"""Exceptions of user code that indicate a bug, an exit or lack of memory, not bad data; `on_error` does not apply."""

# Built-in functions that cannot draw random numbers. Others, such as `sum`, `list` and `bytes`, may call or iterate
# over an argument that draws.
_DRAW_NOTHING: tuple[object, ...] = (
    *(abs, bool, complex, float, int, len, memoryview, str, type),
    *(ascii, bin, chr, format, hash, hex, id, oct, ord, repr),
)

# The global random generators, as names for `pkgutil.resolve_name`.
_GENERATORS = (
    "random:_inst",
    "numpy.random.mtrand:_rand",
    "numpy.random.mtrand:_rand._bit_generator",
    "torch:default_generator",
)

# Torchvision's transforms that accept arrays, and containers of transforms.
_TAKE_ARRAYS = {"ToImage", "ToPILImage", "ToTensor", "Lambda", "Identity"}
_CHAINS = {"Compose", "Sequential", "RandomApply", "RandomChoice", "RandomOrder"}


class RowMaker:
    """Make rows from bytes, independently of batches and slots.

    Args:
        in_callers_process: exceptions that end the pass keep their tracebacks, and the global generators are restored.
        one_by_one: the user gets single rows: fields stay as the decoders return them, a transform may return None,
            and the global generators are not touched.

    Attributes:
        seeds: seeds the global generators; callers wrap `make` and the collate function in its `whole_task`.
        resizes_images: a function can start from encoded images.
    """

    def __init__(self, job: Job, *, in_callers_process: bool = False, one_by_one: bool = False) -> None:
        self._job = job
        transforms = [job.transform if own is None else own for _, own in job.own_transforms] or [job.transform]
        self._transforms = [Transforms.of(each) for each in transforms]
        functions = [each.values() if isinstance(each, Mapping) else (each,) for each in (job.decode, *transforms)]
        calls = [call for each in chain.from_iterable(functions) for call in (each, type(each).__call__)]
        self._loop = EventLoop() if any(map(iscoroutinefunction, calls)) else None
        of_fields = [function for each in self._transforms for function in each.by_field.values()]
        on_samples = [each.on_sample for each in self._transforms if each.on_sample is not None]
        self._on_samples = on_samples
        self._reader = FieldReader(job, single=one_by_one or bool(on_samples) or job.collate_fn is not None)
        self._takes_rng = any(function.takes_rng for function in of_fields + on_samples)
        may_draw = any(function.uses_global_generators for function in of_fields + on_samples)
        needed = not one_by_one and (job.collate_fn is not None or may_draw)
        self.seeds = GlobalSeeds(needed=needed, restore=in_callers_process)
        self.resizes_images = any(function.starts_from_encoded for function in of_fields)
        self._may_be_none = one_by_one or job.collate_fn is not None  # many collate functions leave out None
        self._in_callers_process = in_callers_process

    def make(
        self,
        table: RowTable,
        shards: ShardReader,
        random: SampleRandomness,
        *,
        keys: Sequence[str] | None = None,
        untried: Mapping[int, str] | None = None,
        progress: Progress | None = None,
        blocks: Mapping[int, list[NDArray[Any]]] | None = None,
    ) -> Work:
        """Read, decode and transform rows. Raises only KeyboardInterrupt and, in the caller's process, SystemExit.

        Args:
            table: the rows, and the places of their fields.
            shards: reads the bytes.
            random: makes the generator and the seeds of each row.
            keys: the rows' keys, if samples hold them.
            untried: rows to fail without trying, with the reason.
            progress: set to the current row's number; to -1 at the end, and while rows are made concurrently.
            blocks: by a value's position in the row, an array for each batch, with an entry per row. Values are
                copied there, or written by functions that take `out`.
        """
        work = Work(table, shards, random, keys, [-1] if progress is None else progress)
        for row, reason in (untried or {}).items():
            work.failures[row] = self._failed(work, None, False, row, RowError("SampleError", reason))
        columns: list[Any] = []
        transformed: list[_Transformed] = []
        fields = self._job.fields
        is_regular = not self._on_samples and (fields is not None or not work.any_missing)
        places = [place for place, name in enumerate(fields or ()) if name not in SAMPLE_NAMES]
        for number, column in enumerate(work.columns):
            place = number + len(SAMPLE_NAMES) if fields is None else places[number]
            of_column = blocks.get(place) if blocks and is_regular else None
            has_function = any(name in each.by_field for each in self._transforms for name in column.alternatives)
            if has_function or (self._loop is not None and not self._reader.is_built_in(column)):
                columns.append(PlacedRows(work.count, of_column))
                transformed.append(_Transformed(column, columns[-1]))
                continue
            started = perf_counter()
            failed = partial(self._failed, work, column, False)
            columns.append(self._reader.read(work, column, failed, of_column))
            work.record(f"decode_s/{column.name}", perf_counter() - started)
        work.rows = self._as_samples(work, columns)
        if transformed or self._on_samples:
            self._transform(work, transformed)
        elif fields is None and work.any_missing:
            work.rows = Rows(work.count, values=work.rows.as_list())
        work.progress[0] = -1
        return work

    def close(self) -> None:
        """Close the event loop of user functions, if there is one. Idempotent."""
        if self._loop is not None:
            self._loop.close()

    def _transform(self, work: Work, transformed: list[_Transformed]) -> None:
        """Decode and transform row by row: fields, then the sample; all functions share the row's generator."""
        rows, random, loop, started = work.rows, work.random, self._loop, perf_counter()
        row_ids = work.table.values[:, :3].tolist()  # shard, sample and repeat
        first_shards = [first for first, _ in self._job.own_transforms]
        datasets = [bisect_right(first_shards, shard) - 1 for shard in work.row_shards] if first_shards else None
        making: dict[int, tuple[Column | None, bool]] = {}  # by row, the current column, and True in a transform
        samples: list[Any] = [None] * work.count

        async def make(numbers: Iterable[int]) -> None:
            for row in numbers:
                functions = self._transforms[datasets[row] if datasets else 0]
                rng = random.generator(*row_ids[row]) if self._takes_rng else None
                if loop is not None:
                    rng = deepcopy(rng)  # the next row resets the shared one
                self.seeds.seed(random, *row_ids[row])
                for field in transformed:
                    making[row] = field.column, False
                    value, function, decoded = self._decoded(work, field, functions.by_field, row, rng)
                    if loop is not None and isawaitable(value):
                        value = await value
                        self.seeds.seed(random, *row_ids[row])  # other rows may have run, and drawn
                    if function is not None:
                        making[row] = field.column, True
                        value = function(value, rng, field.values.places[row])
                        value = self._checked(await value if loop is not None and isawaitable(value) else value)
                        field.transform_s += perf_counter() - decoded
                    field.values[row] = value
                    if loop is not None:
                        self.seeds.seed(random, *row_ids[row])
                making[row] = None, True
                if self._on_samples:
                    value = rows.row(row)
                    if functions.on_sample is not None:
                        value = functions.on_sample(value, rng)
                        value = self._checked(await value if loop is not None and isawaitable(value) else value)
                    samples[row] = value

        self._run(work, make, lambda row, error: self._failed(work, *making[row], row, error))
        self._record(work, transformed, perf_counter() - started)
        if self._on_samples or (rows.keys is not None and work.any_missing):
            work.rows = Rows(work.count, values=samples if self._on_samples else rows.as_list())

    def _run(
        self,
        work: Work,
        make: Callable[[Iterable[int]], Coroutine[Any, Any, None]],
        failed: Callable[[int, Exception], RowFailure],
    ) -> None:
        """Make rows one after the other, or concurrently if a user function is a coroutine function."""

        async def attempted(row: int) -> Exception | None:
            with Attempt(exits=True) as attempt:
                await make((row,))
            try:
                return attempt.error
            finally:
                attempt.error = None  # its traceback refers to this frame; the cycle would keep the event loop alive

        def make_at_once(numbers: Iterator[int]) -> None:
            with suppress(StopIteration):  # `make` never suspends here
                make(numbers).send(None)

        if self._loop is None:
            work.each_row(make_at_once, failed)
            return
        work.progress[0] = -1
        left = [row for row in range(work.count) if row not in work.failures]
        for row, error in zip(left, self._loop.gather(map(attempted, left)), strict=True):
            if error is not None:
                work.failures[row] = failed(row, error)

    def _record(self, work: Work, transformed: list[_Transformed], seconds: float) -> None:
        """Record the seconds of each field, and the rest for the sample functions; with an event loop, only the sum."""
        names = [function.name for function in self._on_samples]
        for field in transformed:
            column = field.column
            of_field = (each.by_field.get(name) for each in self._transforms for name in column.alternatives)
            functions = " or ".join(dict.fromkeys(function.name for function in of_field if function is not None))
            if self._loop is not None:
                names.append(f"{column.name}: {functions}".removesuffix(": "))
                continue
            work.record(f"decode_s/{column.name}", field.decode_s)
            work.record(f"transform_s/{column.name}: {functions}", field.transform_s)
            seconds -= field.decode_s + field.transform_s
        if names:
            work.record(f"transform_s/{' or '.join(dict.fromkeys(names))}", seconds)

    def _decoded(
        self, work: Work, field: _Transformed, functions: Mapping[str, UserFunction], row: int, rng: Any
    ) -> tuple[Any, UserFunction | None, float]:
        """Return a field's decoded value, the transform to call with it, and when decoding ended."""
        column, started = field.column, perf_counter()
        if self._reader.is_absent(column, row):
            return self._reader.absent, None, started
        name = field_of(column, row)
        decoder, kind = self._reader.decoding(name)
        data = self._reader.encoded(work, column, row, kind)
        function = functions.get(name)
        if function is not None and function.starts_from_encoded and kind is memoryview:
            value = function.from_encoded(memoryview(data), rng, field.values.places[row])
            function = function.rest
        else:
            value = decoder(data)
        decoded = perf_counter()
        field.decode_s += decoded - started
        return value, function, decoded

    def _checked(self, value: Any) -> Any:
        if value is None and not self._may_be_none:
            raise TypeError("it returned None; is a `return` missing?")
        return value

    def _as_samples(self, work: Work, columns: list[Any]) -> Rows:
        fields = self._job.fields
        if fields is not None:
            rest = iter(columns)
            ordered = [self._sample_name(work, name) if name in SAMPLE_NAMES else next(rest) for name in fields]
            optional = frozenset(place for place, name in enumerate(fields) if name in self._job.optional_fields)
            return Rows(work.count, columns=ordered, optional=optional)
        names = (*SAMPLE_NAMES, *(column.name for column in work.columns))
        columns = [*(self._sample_name(work, name) for name in SAMPLE_NAMES), *columns]
        return Rows(work.count, columns=columns, keys=names)

    def _sample_name(self, work: Work, name: str) -> list[str]:
        if name == "__key__":
            assert work.keys is not None
            return list(work.keys)
        urls = {shard: without_secrets(work.shards.listed(shard)[0]) for shard in dict.fromkeys(work.row_shards)}
        return [urls[shard] for shard in work.row_shards]

    def _failed(self, work: Work, column: Column | None, in_transform: bool, row: int, error: Exception) -> RowFailure:
        """Return a row's failure in a column or the whole sample. In the caller's process, raise a SystemExit again."""
        of_field = "" if column is None else f" of field {column.name!r}"
        if error.args == ("coroutine raised StopIteration",) and isinstance(error.__cause__, StopIteration):
            error = error.__cause__  # the user's function raised it, and the coroutine `make` converted it
        cause: Exception | None = error
        in_program = in_transform or (column is not None and not self._reader.is_built_in(column))
        if isinstance(error, RowError):
            kind, message, cause = error.kind, error.message, None
        elif in_transform:
            kind, message = "TransformError", f"the transform{of_field} raised {in_words(error)}"
            if column is None and work.columns and isinstance(error, TypeError | AttributeError):
                message += (
                    f"; transform= gets the whole sample: for one field, give {{{work.columns[0].name!r}: function}}"
                )
        else:
            kind, message = "DecodeError", f"cannot decode the bytes{of_field}: {in_words(error)}"
        if self._in_callers_process and isinstance(cause, SystemExitError):
            raise cause.raised
        fatal = kind == "ShardChangedError" or isinstance(cause, PROGRAM_ERRORS if in_program else ImportError)
        if fatal and in_program and cause is not None and self._job.on_error != "raise":
            message += (
                f"; on_error={self._job.on_error!r} is for samples with bad data, but {type(cause).__name__} counts as "
                "a mistake in the program: raise ValueError for samples to leave out"
            )
        # Errors that are only counted lose their frames, which would keep memory alive.
        is_raised = fatal or self._job.on_error == "raise"
        make_failure = failure_here if self._in_callers_process and is_raised else failure_of
        place = column or (work.columns[0] if work.columns else None)
        return RowFailure(
            kind=kind,
            message=message,
            field=column.name if column else None,
            fatal=fatal,
            cause=None if cause is None else make_failure(cause),
            shard=work.row_shards[row],
            sample=int(work.table.values[row, 1]),
            offset=MISSING if place is None else int(place.offsets[row]),
            stored_in=work.row_shards[row] if place is None else int(place.shards[row]),
            missing_field=column is not None and int(column.offsets[row]) == MISSING,
        )


class _Transformed:
    """A column that is made row by row with the user's functions, and the seconds that this takes."""

    def __init__(self, column: Column, values: PlacedRows) -> None:
        self.column, self.values = column, values
        self.decode_s = self.transform_s = 0.0


class Transforms(NamedTuple):
    """The transforms of one dataset: functions of fields, and a function of whole samples or None."""

    by_field: Mapping[str, UserFunction]
    on_sample: UserFunction | None

    @classmethod
    def of(cls, transform: Transform | None) -> Transforms:
        """Wrap the functions of a `transform=`."""
        if isinstance(transform, Mapping):
            functions = {key: UserFunction(function) for key, function in transform.items()}
            return cls(by_field("transform", functions), None)
        return cls({}, None if transform is None else UserFunction(transform))


class UserFunction:
    """A user's transform, called with the arguments that it takes.

    Attributes:
        name: for statistics and messages.
        takes_rng: the function has a parameter `rng`, for a `numpy.random.Generator`.
        uses_global_generators: the function may draw from `random`, `numpy.random` or torch. Its attribute of this name
            decides; without one, False for functions with `rng` and some built-in functions.
        starts_from_encoded: the first operation can decode by itself.
        rest: the operations after the first one, if the first decodes and is not the only one.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        self.name: str = getattr(inner, "__name__", None) or type(inner).__name__
        # Only the first operation of a chain can decode; the user's own functions may follow.
        first, *rest = steps_of(function) or (function,)
        self._from_encoded: Callable[..., Any] | None = getattr(first, "from_encoded", None)
        self.starts_from_encoded = self._from_encoded is not None
        self.rest = UserFunction(Compose(rest)) if rest and self.starts_from_encoded else None
        self.takes_rng = takes(function, "rng")
        may_draw = not self.takes_rng and not any(function is each for each in _DRAW_NOTHING)
        self.uses_global_generators = bool(getattr(function, "uses_global_generators", may_draw))
        self._takes_out = takes(function, "out")
        self._advice = _torchvision_advice(function)

    def __call__(self, value: Any, rng: Any, out: Any = None) -> Any:
        """Call the function for a field or sample; the result may be `out` itself.

        Raises:
            TypeError: the function is a torchvision transform that ignores arrays.
        """
        if self._advice is not None and _has_arrays_but_no_images(value):
            raise TypeError(self._advice)
        options = {"rng": rng} if self.takes_rng else {}
        if out is not None and self._takes_out:
            options["out"] = out
        return self._function(value, **options)

    def from_encoded(self, data: memoryview, rng: Any, out: Any = None) -> Any:
        """Decode a field's bytes and apply the first operation; the caller applies `rest`."""
        assert self._from_encoded is not None
        return self._from_encoded(data, rng, **({"out": out} if self._takes_out and self.rest is None else {}))


def _torchvision_advice(function: object) -> str | None:
    """Return advice if the first transform of a field or sample is a torchvision `v2` transform that needs tensors.

    It would silently ignore arrays, so a model would be trained without it.
    """
    module, name = type(function).__module__, type(function).__name__
    if is_ours(function):  # streamload's operations return arrays for arrays, except ToTensor
        steps = getattr(function, "operations", ())
        first = next((step for step in steps if not is_ours(step) or type(step) is ToTensor), None)
        return None if first is None else _torchvision_advice(first)
    if name in _CHAINS and module.startswith(("torchvision.transforms.", "torch.nn.modules.container")):
        steps = getattr(function, "transforms", function)
        return _torchvision_advice(next(iter(steps), None) if isinstance(steps, Iterable) else steps)
    if name in _TAKE_ARRAYS or not module.startswith("torchvision.transforms.v2"):
        return None
    return (
        f"torchvision's v2.{name} ignores NumPy arrays, which images are decoded to, and would do nothing; begin with "
        "v2.ToImage(), as in v2.Compose([v2.ToImage(), ...])"
    )


def _has_arrays_but_no_images(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value
    parts = list(items) if isinstance(value, Mapping | tuple | list) else [value]
    packages = {type(part).__module__.partition(".")[0] for part in parts}
    return any(isinstance(part, np.ndarray) for part in parts) and packages.isdisjoint(("torch", "torchvision", "PIL"))


class GlobalSeeds:
    """Seed Python's, NumPy's and (if loaded) torch's generator by sample, so that workers do not affect augmentation.

    Args:
        needed: a function may draw from the generators; otherwise they are never touched.
        restore: restore the generators after a task, because the process belongs to the user.
    """

    def __init__(self, *, needed: bool, restore: bool) -> None:
        self._needed = needed
        self._restore = restore

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Wrap all user code of a task.

        Raises:
            UnseededError: the code imported torch for the first time in this process.
        """
        if not self._needed:
            yield
            return
        torch_generator = _torch_generator()
        had_torch = torch_generator is not None
        if self._restore:
            for_python, for_numpy = random.getstate(), numpy_random.get_state()
            for_torch = torch_generator.get_state() if had_torch else None
        try:
            yield
        finally:
            if self._restore:
                random.setstate(for_python)
                numpy_random.set_state(for_numpy)
                if had_torch:
                    torch_generator.set_state(for_torch)
        if not had_torch and _torch_generator() is not None:
            raise UnseededError

    def seed(self, randomness: SampleRandomness, shard: int, sample: int, repeat: int = 0) -> None:
        """Seed the generators for one sample."""
        if not self._needed:
            return
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample, repeat)
        random.seed(for_python)
        numpy_random.seed(for_numpy)  # most augmentation libraries draw from the legacy generator
        if (generator := _torch_generator()) is not None:
            generator.manual_seed(for_torch)


class UnseededError(Exception):
    """Raised if a task may have drawn from torch's generator before it was seeded; the task must be repeated."""


def names_of_generators() -> dict[int, str]:
    """Return the global generators' names for `pkgutil.resolve_name`, by the generators' `id` in this process."""
    names = {}
    for name in _GENERATORS:
        module, _, path = name.partition(":")
        generator: Any = sys.modules.get(module)
        for attribute in path.split("."):
            generator = getattr(generator, attribute, None)
        if generator is not None:
            names[id(generator)] = name
    return names


def _torch_generator() -> Any:
    """Return torch's default generator; None if torch is not loaded, or still being imported by a thread."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


class EventLoop:
    """Run coroutines of user functions, always in one event loop, so that they can keep connections open.

    A fork gets a loop of its own. While the caller's loop runs, as in a notebook, a thread runs this loop.
    """

    def __init__(self) -> None:
        self._process = 0
        self._close: Callable[[], object] = lambda: None

    def close(self) -> None:
        """Close the loop, and cancel its running tasks; later coroutines get another loop. Idempotent."""
        self._process = 0
        self._close()

    def gather(self, coroutines: Iterable[Awaitable[T]]) -> list[T]:
        """Run coroutines concurrently; return their results."""
        import asyncio  # here, since few jobs need it
        from selectors import PollSelector

        async def all_of_them() -> list[T]:
            return await asyncio.gather(*coroutines)

        if self._process != os.getpid():
            self._process = os.getpid()
            # Not epoll: a fork that closes its copy of the loop would break the parent's.
            self._runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(PollSelector()))
            self._close = weakref.finalize(self, _close, self._process, self._runner.close)
        return _outside_of_loops(lambda: self._runner.run(all_of_them()))


def _close(process: int, close: Callable[[], None]) -> None:
    if process != os.getpid():  # a fork's copy shares the pipe that wakes the original
        return
    with suppress(RuntimeError):  # no thread can be started while the program ends
        _outside_of_loops(close)


def _outside_of_loops(call: Callable[[], T]) -> T:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
