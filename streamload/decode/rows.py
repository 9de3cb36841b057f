"""Rows from bytes: fields are read, decoded and transformed, and what comes out is values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

from numpy.typing import NDArray

from streamload.arguments import by_field
from streamload.decode.array_files import BeyondBudgetError
from streamload.decode.columns import OwnValues, PlacedBlocks, PlacedRows, Rows
from streamload.decode.failure import SystemExitError, failure_here, failure_of, in_words
from streamload.decode.field_reader import ABSENT, FieldReader, Progress, RowError, ShardReader, Values, Work, field_of
from streamload.decode.seeding import GlobalSeeds, RowRandomness
from streamload.decode.tasks import SAMPLE_NAMES, Column, Job, OwnTransforms, RowFailure, RowTable, Transform
from streamload.decode.user_code import PROGRAM_ERRORS, TransformRaisedError, UserFunction, why_not_skipped
from streamload.errors import without_secrets
from streamload.tar.table import MISSING

_SHARE_OF_BUDGET = (
    "The limit is a share of memory_budget: a larger memory_budget, fewer workers or a smaller batch_size raise it"
)


class Transforms(NamedTuple):
    """The transforms of one dataset.

    Attributes:
        by_field: functions of fields.
        on_sample: a function of whole samples, or None.
    """

    by_field: Mapping[str, UserFunction]
    on_sample: UserFunction | None

    @classmethod
    def of(cls, transform: Transform | None) -> Transforms:
        """From the user's argument."""
        if isinstance(transform, Mapping):
            functions = {key: UserFunction(function) for key, function in transform.items()}
            return cls(by_field("transform", functions), None)
        return cls({}, None if transform is None else UserFunction(transform))

    def of_column(self, alternatives: Sequence[str]) -> dict[str, UserFunction]:
        """The functions of the fields that a column may hold, by field."""
        return {field: self.by_field[field] for field in alternatives if field in self.by_field}


class DatasetTransforms:
    """The transforms of all datasets.

    Args:
        transform: of the datasets that have none of their own.
        own: for each dataset of a mixture, in the order of the listing, its first shard, and its own transform or
            None; empty for a single dataset.
    """

    def __init__(self, transform: Transform | None, own: OwnTransforms) -> None:
        general = Transforms.of(transform)
        self.all = [general] if not own else [general if mine is None else Transforms.of(mine) for _, mine in own]
        self._first_shards = [first for first, _ in own]

    @property
    def functions(self) -> list[UserFunction]:
        """All functions."""
        by_field = [function for transforms in self.all for function in transforms.by_field.values()]
        return by_field + [transforms.on_sample for transforms in self.all if transforms.on_sample is not None]

    @property
    def any_on_sample(self) -> bool:
        """Whether some function takes whole samples."""
        return any(transforms.on_sample is not None for transforms in self.all)

    def datasets(self, shards: list[int]) -> list[int]:
        """For each shard the number of its dataset, as in `all`."""
        if len(self.all) == 1:
            return [0] * len(shards)
        return [bisect_right(self._first_shards, shard) - 1 for shard in shards]


@dataclass(slots=True, eq=False)
class _Transformed:
    """A column that the user's functions transform.

    Attributes:
        column: where its bytes are.
        functions: for each dataset, by field.
        values: one for each row, to be filled in.
        places: for each row an array for its value, where a function may make it.
        decode_s, transform_s: what it has taken so far.
    """

    column: Column
    functions: list[dict[str, UserFunction]]
    values: Values
    places: list[NDArray[Any]] | None
    decode_s: float = 0.0
    transform_s: float = 0.0

    @property
    def every_function(self) -> list[UserFunction]:
        """The functions of all datasets."""
        return [function for functions in self.functions for function in functions.values()]


# Smaller values of decoders are copied to their batch together, which takes less time for each.
_COPIED_TOGETHER_BYTES = 4 << 10

Places = Callable[[int | str], list[NDArray[Any]] | None]
"""For a value that rows are made of (its number in a tuple, its key in a dict) the memory of each batch, writable, with
an entry for each row.

Values are copied there, or made there by functions that write to memory given to them. None where it cannot be said."""


def _rows_in(blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
    return [row for block in blocks for row in block]


@dataclass(frozen=True, slots=True, eq=False)
class MadeRows:
    """Rows as the user's functions have left them, before they are collated.

    Attributes:
        rows: the values; those of a row that failed mean nothing.
        failures: what went wrong, by row.
        decode_s: seconds spent on decoding.
        transform_s: seconds spent in the user's functions.
        named_s: seconds of both, by what took them.
        payload_bytes: of the fields, as they are stored.
    """

    rows: Rows
    failures: dict[int, RowFailure]
    decode_s: float
    transform_s: float
    named_s: dict[str, float]
    payload_bytes: int


class RowMaker:
    """Makes rows from bytes, in any process on any machine: it knows neither batches nor slots.

    Args:
        job: what the user wants of a sample.
        in_callers_process: exceptions that end the pass stay what they are, with their tracebacks, and the global
            generators are left as they were (by `seeds.whole_task`).
        one_by_one: each row goes to the user as it is. Then fields are what their decoders return, a transform may
            return None, and the global generators are not touched.

    Attributes:
        seeds: of the global generators, set for each row; whoever collates the rows runs user code within the same
            `whole_task`.
    """

    def __init__(self, job: Job, *, in_callers_process: bool = False, one_by_one: bool = False) -> None:
        self._job = job
        self._transforms = DatasetTransforms(job.transform, job.own_transforms)
        self._single = one_by_one or self._transforms.any_on_sample or job.collate_fn is not None
        self._reader = FieldReader(
            job.decode,
            optional=None if job.fields is None else job.optional_fields,
            limit_bytes=job.expansion_limit_bytes,
            single=self._single,
        )
        functions = self._transforms.functions
        self.seeds = GlobalSeeds(
            needed=not one_by_one
            and (job.collate_fn is not None or any(function.uses_global_generators for function in functions)),
            restore=in_callers_process,
        )
        self._may_be_none = one_by_one or job.collate_fn is not None  # many collate functions leave such samples out
        self._in_callers_process = in_callers_process

    @property
    def resizes_images(self) -> bool:
        """Whether some function starts from encoded images, as those do that resize."""
        return any(f.starts_from_encoded for transforms in self._transforms.all for f in transforms.by_field.values())

    def make(
        self,
        table: RowTable,
        shards: ShardReader,
        random: RowRandomness,
        *,
        keys: Sequence[str] | None = None,
        untried: Mapping[int, str] = MappingProxyType({}),
        progress: Progress | None = None,
        places: Places | None = None,
        may_stay_stored: bool = True,
    ) -> MadeRows:
        """Read, decode and transform rows. What fails is in the answer.

        Only interrupts are raised, and in the caller's process exits.

        Args:
            table: the rows, and where their fields lie.
            shards: reads the bytes.
            random: called once for each row whose transform needs it, in the order of the rows.
            keys: the rows' keys, where samples hold them.
            untried: rows that are not tried and count as failed, and why.
            progress: is set to the number of the current row, and to -1 at the end.
            places: where values may be made; without it, in memory of their own.
            may_stay_stored: columns of bytes may be `StoredBytes`, which are read later.
        """
        work = Work(table, shards, random, keys, [-1] if progress is None else progress)
        for row, reason in untried.items():
            work.failures[row] = self._row_failure(work, row, "SampleError", reason)
        rows = self._rows(work, places, may_stay_stored=may_stay_stored)
        work.progress[0] = -1
        payload_bytes = sum(int(column.sizes.clip(0).sum()) for column in work.columns)
        return MadeRows(rows, work.failures, work.decode_s, work.transform_s, work.named_s, payload_bytes)

    def _rows(self, work: Work, places: Places | None, *, may_stay_stored: bool) -> Rows:
        columns: list[Any] = []
        transformed: list[_Transformed] = []
        for number, column in enumerate(work.columns):
            functions = [each.of_column(column.alternatives) for each in self._transforms.all]
            if any(functions):
                found = self._places(work, number, places)
                each = None if found is None else _rows_in(found)
                columns.append(self._values(work.count) if each is None else PlacedRows(each))
                transformed.append(_Transformed(column, functions, columns[-1], each))
                continue
            started = perf_counter()
            stored = self._reader.stored_bytes(work, column) if may_stay_stored else None
            target = partial(self._target, work, number, places)
            columns.append(stored or self._reader.read(work, column, self._failed(work, column), target))
            work.decoded(column.name, perf_counter() - started)
        if transformed:
            self._transform_fields(work, transformed)
        rows = self._as_samples(work, columns)
        return self._transform_samples(work, rows) if self._transforms.any_on_sample else rows

    def _transform_fields(self, work: Work, transformed: list[_Transformed]) -> None:
        """Decode and transform some fields, row by row: the functions of one row draw from one generator in turn."""
        random = work.random
        takes_rng = any(function.takes_rng for field in transformed for function in field.every_function)
        names = _names(work.table)
        datasets = self._transforms.datasets(work.row_shards)
        current = transformed[0]

        def make(rows: Iterator[int]) -> None:
            nonlocal current
            for row in rows:
                self.seeds.seed(random, *names[row])
                rng = random.generator(*names[row]) if takes_rng else None
                for current in transformed:
                    functions = current.functions[datasets[row]]
                    current.values[row] = self._transformed_value(work, current, functions, row, rng)

        def failed(row: int, error: Exception) -> RowFailure:
            return self._failed(work, current.column)(row, error)

        work.each_row(make, failed)
        for field in transformed:
            name = field.column.name
            work.decoded(name, field.decode_s)
            work.transformed(f"{name}: {_shown(field.every_function)}", field.transform_s)

    def _target(self, work: Work, number: int, places: Places | None) -> Values:
        """What takes the values of a column as they are made."""
        blocks = self._places(work, number, places)
        if blocks is None:
            return self._values(work.count)
        if blocks[0].nbytes < _COPIED_TOGETHER_BYTES * len(blocks[0]):
            return PlacedBlocks(blocks)
        return PlacedRows(_rows_in(blocks))

    def _values(self, count: int) -> list[Any]:
        """What takes values that have no place yet; samples that go to the user are not copied."""
        return [None] * count if self._single else OwnValues([None] * count)

    def _places(self, work: Work, number: int, places: Places | None) -> list[NDArray[Any]] | None:
        """Where the values of a column are wanted; see `Places`."""
        if places is None or self._transforms.any_on_sample:
            return None
        fields = self._job.fields
        if fields is None:
            return places(work.columns[number].name)
        stored = [child for child, name in enumerate(fields) if name not in SAMPLE_NAMES]
        return places(stored[number])

    def _transformed_value(
        self, work: Work, field: _Transformed, functions: dict[str, UserFunction], row: int, rng: Any
    ) -> Any:
        column = field.column
        if self._reader.is_absent(column, row):
            return self._reader.absent
        out = None if field.places is None else field.places[row]
        started = perf_counter()
        name = field_of(column, row)
        data = self._reader.encoded(work, column, row, name)
        function = functions.get(name)
        if function is None:
            return self._reader.decoder(name)(data)
        if function.starts_from_encoded and self._reader.keeps_nothing(name):
            value = self._checked(function.from_encoded(memoryview(data), rng, out))
            field.decode_s += perf_counter() - started
            return value
        value = self._reader.decoder(name)(data)
        decoded = perf_counter()
        field.decode_s += decoded - started
        value = self._checked(function(value, rng, out))
        field.transform_s += perf_counter() - decoded
        return value

    def _checked(self, value: Any) -> Any:
        if value is None and not self._may_be_none:
            raise TransformRaisedError(TypeError("it returned None; is a `return` missing?"))
        return value

    def _transform_samples(self, work: Work, rows: Rows) -> Rows:
        random = work.random
        names = _names(work.table)
        functions = [transforms.on_sample for transforms in self._transforms.all]
        datasets = self._transforms.datasets(work.row_shards)
        values: list[Any] = [None] * work.count

        def make(numbers: Iterator[int]) -> None:
            for row in numbers:
                function = functions[datasets[row]]
                if function is None:
                    values[row] = rows.row(row)
                    continue
                self.seeds.seed(random, *names[row])
                rng = random.generator(*names[row]) if function.takes_rng else None
                values[row] = self._checked(function(rows.row(row), rng))

        started = perf_counter()
        work.each_row(make, self._failed(work, None))
        work.transformed(_shown(filter(None, functions)), perf_counter() - started)
        return Rows(work.count, values=values)

    def _as_samples(self, work: Work, columns: list[Any]) -> Rows:
        fields = self._job.fields
        if fields is not None:
            rest = iter(columns)
            ordered = [self._sample_name(work, name) if name in SAMPLE_NAMES else next(rest) for name in fields]
            optional = frozenset(place for place, name in enumerate(fields) if name in self._job.optional_fields)
            return Rows(work.count, columns=ordered, optional=optional)
        names = (*SAMPLE_NAMES, *(column.name for column in work.columns))
        complete = [*(self._sample_name(work, name) for name in SAMPLE_NAMES), *columns]
        if not any((column.offsets == MISSING).any() for column in work.columns):
            return Rows(work.count, columns=complete, kind=dict, keys=names)
        rows = zip(*complete, strict=True)
        return Rows(
            work.count,
            values=[{k: v for k, v in zip(names, row, strict=True) if v is not ABSENT} for row in rows],
        )

    def _sample_name(self, work: Work, name: str) -> list[str]:
        if name == "__key__":
            assert work.keys is not None
            return list(work.keys)
        urls = {shard: without_secrets(work.shards.url(shard)) for shard in dict.fromkeys(work.row_shards)}
        return [urls[shard] for shard in work.row_shards]

    def _failed(self, work: Work, column: Column | None) -> Callable[[int, Exception], RowFailure]:
        name = "" if column is None else f" of field {column.name!r}"

        def failed(row: int, error: Exception) -> RowFailure:
            cause = error.cause if isinstance(error, TransformRaisedError) else error
            if self._in_callers_process and isinstance(cause, SystemExitError):
                raise cause.raised
            if isinstance(error, RowError):
                return self._row_failure(work, row, error.kind, error.message, column=column)
            if isinstance(error, TransformRaisedError):
                message = f"the transform{name} raised {in_words(cause)}"
                return self._row_failure(work, row, "TransformError", message, cause=cause, column=column)
            message = f"cannot decode the bytes{name}: {in_words(error)}"
            return self._row_failure(work, row, "DecodeError", message, cause=error, column=column)

        return failed

    def _row_failure(
        self,
        work: Work,
        row: int,
        kind: str,
        message: str,
        *,
        cause: Exception | None = None,
        column: Column | None = None,
    ) -> RowFailure:
        where = column or (work.columns[0] if work.columns else None)
        in_program = kind == "TransformError" or (column is not None and not self._reader.is_built_in(column))
        changed = kind == "ShardChangedError"
        fatal = changed or isinstance(cause, PROGRAM_ERRORS if in_program else ImportError)
        if isinstance(cause, BeyondBudgetError):
            fatal = True  # else which samples are left out would depend on the budget and the workers
            message = f"{message}. {_SHARE_OF_BUDGET}"
        if fatal and in_program and cause is not None and self._job.on_error != "raise":
            message = f"{message}; {why_not_skipped(cause, self._job.on_error)}"
        # Errors that are only counted are not kept with their frames, which would hold memory.
        is_raised = fatal or self._job.on_error == "raise"
        make_failure = failure_here if self._in_callers_process and is_raised else failure_of
        return RowFailure(
            kind=kind,
            message=message,
            field=column.name if column else None,
            fatal=fatal,
            cause=None if cause is None else make_failure(cause),
            shard=work.row_shards[row],
            sample=int(work.table.samples[row]),
            offset=MISSING if where is None else int(where.offsets[row]),
            missing_field=column is not None and int(column.offsets[row]) == MISSING,
            sidecar=None if where is None or where.shards is None else int(where.shards[row]),
        )


def _shown(functions: Iterable[UserFunction]) -> str:
    """The names of functions, for people."""
    return " or ".join(dict.fromkeys(function.name for function in functions))


def _names(table: RowTable) -> list[tuple[int, int, int]]:
    """What keys each row's randomness: its shard, its sample, and how often that occurred before in the epoch."""
    return list(zip(table.shards.tolist(), table.samples.tolist(), table.repeats.tolist(), strict=True))
