"""Making rows: a task's bytes are decoded, transformed, and collated into their slots.

A `RowMaker` does not know where it runs: in a worker process, or in the caller's thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from streamload.decode.collating import PieceCollator
from streamload.decode.columns import Rows
from streamload.decode.failure import failure_here, failure_of, in_words
from streamload.decode.field_reader import ABSENT, FieldReader, Progress, RowError, ShardMemory, Work, field_of
from streamload.decode.row_table import Column, RowTable
from streamload.decode.seeding import GlobalSeeds, RowRandomness
from streamload.decode.tasks import (
    SAMPLE_NAMES,
    Job,
    OwnTransforms,
    RowFailure,
    RowsDone,
    RowTask,
    Transform,
    WorkSeconds,
)
from streamload.decode.user_code import PROGRAM_ERRORS, TransformRaisedError, UserFunction, why_not_skipped
from streamload.errors import without_credentials
from streamload.memory.slots import SlotMemory
from streamload.order.randomness import SampleRandomness
from streamload.tar.table import MISSING

__all__ = ["RowMaker"]


@dataclass(frozen=True, slots=True)
class Transforms:
    """What happens to the samples of one dataset.

    Attributes:
        by_field: functions of fields.
        on_sample: a function of whole samples, or None.
    """

    by_field: Mapping[str, UserFunction]
    on_sample: UserFunction | None

    @classmethod
    def of(cls, transform: Transform | None) -> Transforms:
        """From what the user gave."""
        if isinstance(transform, Mapping):
            return cls({name: UserFunction(function) for name, function in transform.items()}, None)
        return cls({}, None if transform is None else UserFunction(transform))

    def of_column(self, name: str, alternatives: tuple[str, ...]) -> dict[str, UserFunction]:
        """For each field that a column may hold the function that transforms it, where there is one."""
        if name in self.by_field:
            return dict.fromkeys(alternatives, self.by_field[name])
        return {field: self.by_field[field] for field in alternatives if field in self.by_field}


class DatasetTransforms:
    """The transforms of all datasets.

    Args:
        transform: of those that have none of their own.
        own: for each dataset, in the order of the listing, its first shard, and its own transform or None; empty where
            there is one dataset.
    """

    def __init__(self, transform: Transform | None, own: OwnTransforms) -> None:
        general = Transforms.of(transform)
        self.all = [general] if not own else [general if mine is None else Transforms.of(mine) for _, mine in own]
        self._first_shards = [first for first, _ in own]

    @property
    def functions(self) -> list[UserFunction]:
        """Every function that there is."""
        by_field = [function for transforms in self.all for function in transforms.by_field.values()]
        return by_field + [transforms.on_sample for transforms in self.all if transforms.on_sample is not None]

    @property
    def any_on_sample(self) -> bool:
        """Whether some function is one of whole samples."""
        return any(transforms.on_sample is not None for transforms in self.all)

    def datasets(self, shards: list[int]) -> list[int]:
        """For each shard the number of its dataset, as in `all`."""
        if len(self.all) == 1:
            return [0] * len(shards)
        return [bisect_right(self._first_shards, shard) - 1 for shard in shards]


@dataclass(frozen=True, slots=True, eq=False)
class _Transformed:
    """A column that goes through functions of the user's.

    Attributes:
        column: where its bytes are.
        functions: for each dataset, by the name of the field that a row has.
        values: one for each row, to be filled in.
        places: for each row where it will lie in its slot, if a function can write there by itself.
    """

    column: Column
    functions: list[dict[str, UserFunction]]
    values: list[Any]
    places: list[NDArray[Any]] | None

    @property
    def every_function(self) -> list[UserFunction]:
        """Those of all datasets."""
        return [function for functions in self.functions for function in functions.values()]


class RowMaker:
    """Makes the rows of tasks, one task at a time.

    Args:
        job: what the user wants of a sample.
        slots: where to write.
        restore_random_state: leave the global generators as they were, because the process is the user's own. There,
            and with `for_samples`, exceptions that end the pass stay what they are, with their tracebacks.
        for_samples: rows are asked for with `samples` only. Then fields are what their decoders return, a transform
            may return None, and the global generators are not touched.
    """

    def __init__(
        self,
        job: Job,
        slots: SlotMemory,
        *,
        restore_random_state: bool = False,
        for_samples: bool = False,
    ) -> None:
        self._job = job
        self._transforms = DatasetTransforms(job.transform, job.own_transforms)
        single = for_samples or self._transforms.any_on_sample or job.collate_fn is not None
        self._reader = FieldReader(
            job.decode, optional=job.fields is None, limit_bytes=job.expansion_limit_bytes, single=single
        )
        functions = self._transforms.functions
        self._seeds = GlobalSeeds(
            needed=not for_samples
            and (job.collate_fn is not None or any(function.uses_global_generators for function in functions)),
            restore=restore_random_state,
        )
        # A collate_fn may leave such samples out, as many do.
        self._none_is_fine = for_samples or job.collate_fn is not None
        self._randomness: tuple[int, SampleRandomness] | None = None
        self._in_callers_process = restore_random_state or for_samples
        self._collator = PieceCollator(job, slots, self._seeds, in_callers_process=self._in_callers_process)

    @property
    def resizes_images(self) -> bool:
        """Whether some function starts from encoded images, as those do that resize."""
        return any(f.starts_from_encoded for transforms in self._transforms.all for f in transforms.by_field.values())

    def fix_layout(self, layout: bytes) -> None:
        """The layout of all batches of rows from now on, as a probe found it."""
        self._collator.fix_layout(layout)

    def run(self, task: RowTask, shards: ShardMemory, progress: Progress, waited_s: float = 0.0) -> RowsDone:
        """Do one task. What fails is in the answer; only exits and interrupts are raised."""
        work = Work(task, task.table.columns(), shards, progress, self._random(task.epoch), task.table.shards.tolist())
        for row, reason in task.untried.items():
            work.failures[row] = self._row_failure(work, row, "SampleError", reason)
        with self._seeds.whole_task():
            rows = self._rows(work)
            progress[0] = -1
            started = perf_counter()
            pieces = self._collator.collate(task, rows, work.failures, work.random)
        seconds = WorkSeconds(work.decode_s, work.transform_s, perf_counter() - started, 0.0, waited_s)
        payload_bytes = sum(int(column.sizes.clip(0).sum()) for column in work.columns)
        return RowsDone(task.number, pieces, work.count, payload_bytes, seconds, unseeded=self._seeds.missed_torch)

    def samples(
        self, task: RowTask, shards: ShardMemory, random: RowRandomness
    ) -> tuple[list[Any], dict[int, RowFailure]]:
        """The rows of a task one by one, as a function of the user's would see them, and what failed, by row.

        Args:
            task: the rows; batches and slots don't matter.
            shards: where the bytes are.
            random: asked once for each row whose transform takes an `rng`, in the order of the rows.
        """
        work = Work(task, task.table.columns(), shards, [-1], random, task.table.shards.tolist())
        return self._rows(work).as_list(), work.failures

    def _rows(self, work: Work) -> Rows:
        columns: list[Any] = []
        transformed: list[_Transformed] = []
        for number, column in enumerate(work.columns):
            functions = [each.of_column(column.name, column.alternatives) for each in self._transforms.all]
            if any(functions):
                columns.append([None] * work.count)
                transformed.append(_Transformed(column, functions, columns[-1], self._places(work, number, functions)))
                continue
            started = perf_counter()
            columns.append(self._reader.read(work, column, self._failed(work, column)))
            work.decode_s += perf_counter() - started
        if transformed:
            self._transform_fields(work, transformed)
        rows = self._as_samples(work, columns)
        return self._transform_samples(work, rows) if self._transforms.any_on_sample else rows

    def _transform_fields(self, work: Work, transformed: list[_Transformed]) -> None:
        """Decode and transform some fields, sample by sample: a sample's functions draw from one generator in turn."""
        random = work.random
        takes_rng = any(function.takes_rng for field in transformed for function in field.every_function)
        names = _names(work.task.table)
        datasets = self._transforms.datasets(work.task.table.shards.tolist())
        current = transformed[0]

        def make(row: int) -> None:
            nonlocal current
            self._seeds.seed(random, *names[row])
            rng = random.generator(*names[row]) if takes_rng else None
            for current in transformed:
                functions = current.functions[datasets[row]]
                current.values[row] = self._transformed_value(work, current, functions, row, rng)

        def failed(row: int, error: Exception) -> RowFailure:
            return self._failed(work, current.column)(row, error)

        work.each_row(make, failed)

    def _places(self, work: Work, number: int, functions: list[dict[str, UserFunction]]) -> list[NDArray[Any]] | None:
        """Where the rows of a column will lie in their slots, for functions that write there by themselves."""
        takes_out = any(function.takes_out for each in functions for function in each.values())
        if not takes_out or self._transforms.any_on_sample:
            return None
        fields = self._job.fields
        if fields is None:
            return self._collator.places(work.task, work.columns[number].name)
        stored = [child for child, name in enumerate(fields) if name not in SAMPLE_NAMES]
        return self._collator.places(work.task, stored[number])

    def _transformed_value(
        self, work: Work, field: _Transformed, functions: dict[str, UserFunction], row: int, rng: Any
    ) -> Any:
        column = field.column
        if self._reader.is_absent(column, row):
            return ABSENT
        out = None if field.places is None else field.places[row]
        started = perf_counter()
        name = field_of(column, row)
        data = self._reader.encoded(work, column, row, name)
        function = functions.get(name)
        if function is None:
            return self._reader.decoder(name)(data)
        if function.starts_from_encoded and self._reader.keeps_nothing(name):
            value = self._checked(function.from_encoded(memoryview(data), rng, out))
            work.decode_s += perf_counter() - started
            return value
        value = self._reader.decoder(name)(data)
        decoded = perf_counter()
        work.decode_s += decoded - started
        value = self._checked(function(value, rng, out))
        work.transform_s += perf_counter() - decoded
        return value

    def _checked(self, value: Any) -> Any:
        if value is None and not self._none_is_fine:
            raise TransformRaisedError(TypeError("it returned None; is a `return` missing?"))
        return value

    def _transform_samples(self, work: Work, rows: Rows) -> Rows:
        random = work.random
        names = _names(work.task.table)
        functions = [transforms.on_sample for transforms in self._transforms.all]
        datasets = self._transforms.datasets(work.task.table.shards.tolist())
        values: list[Any] = [None] * work.count

        def make(row: int) -> None:
            function = functions[datasets[row]]
            if function is None:
                values[row] = rows.row(row)
                return
            self._seeds.seed(random, *names[row])
            rng = random.generator(*names[row]) if function.takes_rng else None
            values[row] = self._checked(function(rows.row(row), rng))

        started = perf_counter()
        work.each_row(make, self._failed(work, None))
        work.transform_s += perf_counter() - started
        return Rows(work.count, values=values)

    def _random(self, epoch: int) -> SampleRandomness:
        if self._randomness is None or self._randomness[0] != epoch:
            self._randomness = epoch, SampleRandomness(self._job.seed, epoch)
        return self._randomness[1]

    def _as_samples(self, work: Work, columns: list[Any]) -> Rows:
        fields = self._job.fields
        if fields is not None:
            rest = iter(columns)
            ordered = [self._sample_name(work, name) if name in SAMPLE_NAMES else next(rest) for name in fields]
            return Rows(work.count, columns=ordered)
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
            assert work.task.keys is not None
            return list(work.task.keys)
        shards = work.task.table.shards.tolist()
        shown = {number: without_credentials(work.shards.url(number)) for number in dict.fromkeys(shards)}
        return [shown[number] for number in shards]

    def _failed(self, work: Work, column: Column | None) -> Callable[[int, Exception], RowFailure]:
        def failed(row: int, error: Exception) -> RowFailure:
            if isinstance(error, RowError):
                return self._row_failure(work, row, error.kind, error.message, column=column)
            if isinstance(error, TransformRaisedError):
                message = f"the transform raised {in_words(error.cause)}"
                return self._row_failure(work, row, "TransformError", message, cause=error.cause, column=column)
            name = "" if column is None else f" of field {column.name!r}"
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
        if fatal and in_program and cause is not None and self._job.on_error != "raise":
            message = f"{message}; {why_not_skipped(cause, self._job.on_error)}"
        # Of errors that are counted the frames would pile up, with all that is in them.
        told = failure_here if self._in_callers_process and (fatal or self._job.on_error == "raise") else failure_of
        return RowFailure(
            row=row,
            kind=kind,
            message=message,
            field=column.name if column else None,
            fatal=fatal,
            cause=None if cause is None else told(cause),
            shard=int(work.task.table.shards[row]),
            sample=int(work.task.table.samples[row]),
            offset=MISSING if where is None else int(where.offsets[row]),
            missing_field=column is not None and int(column.offsets[row]) == MISSING,
        )


def _names(table: RowTable) -> list[tuple[int, int, int]]:
    """What names each row's randomness: its shard, its sample, and how often that came before in the epoch."""
    return list(zip(table.shards.tolist(), table.samples.tolist(), table.copies.tolist(), strict=True))
