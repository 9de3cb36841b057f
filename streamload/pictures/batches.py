"""A batch taken apart into its samples, whatever made it: the default collation, or a function of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["KEY", "samples_in"]

KEY = "__key__"
_URL = "__url__"


def samples_in(
    batch: Any, names: Sequence[str] | None, *, by_default: bool
) -> tuple[int, Iterator[tuple[str, dict[str, Any]]]]:
    """How many samples a batch has, and each of them: its key, or its number where it has none, and its values.

    What a `collate_fn` may return: columns in a dict, a tuple or a list, or a single one; or a list of samples. A
    column is a tensor, an array, or a list with an entry for each sample, or a nest of these. What has another length
    than the first of them belongs to no sample and is left out.

    Args:
        batch: as the loop gets it.
        names: of a sample's values, where samples are tuples: the loader's fields. Others are numbered.
        by_default: it was collated as by torch's `default_collate`.

    Raises:
        ValueError: nothing in it has a length.
    """
    if not by_default and _is_list_of_samples(batch, names):
        return len(batch), (_named(row, number, names) for number, row in enumerate(batch))
    count = next(_lengths(batch, by_default=by_default), None)
    if count is None:
        raise ValueError(
            f"show() can draw batches that hold tensors, arrays or lists, and this one is of {type(batch).__name__}"
        )
    row_of = _row_by_default if by_default else _row
    return count, (_named(row_of(batch, number, count), number, names) for number in range(count))


def _is_list_of_samples(batch: Any, names: Sequence[str] | None) -> bool:
    if not isinstance(batch, list) or not batch or (names is not None and len(names) == len(batch) != 1):
        return False
    if all(isinstance(each, Mapping | tuple | list) for each in batch):
        return True
    return len({len(each) if _has_rows(each) else None for each in batch}) > 1


def _has_rows(value: Any) -> bool:
    """Whether it is a tensor or an array that has entries."""
    return hasattr(value, "shape") and len(value.shape) > 0


def _lengths(batch: Any, *, by_default: bool) -> Iterator[int]:
    """The lengths of the columns in a nest; of a user's, lists within a dict or a tuple are columns."""
    if _has_rows(batch):
        yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths_below(value, by_default=by_default)
    elif isinstance(batch, tuple) and by_default and not hasattr(batch, "_fields"):
        yield len(batch)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _lengths_below(value, by_default=by_default)


def _lengths_below(value: Any, *, by_default: bool) -> Iterator[int]:
    if not by_default and isinstance(value, list | tuple):
        yield len(value)
    else:
        yield from _lengths(value, by_default=by_default)


def _row_by_default(batch: Any, number: int, count: int) -> Any:
    """What one sample has of a nest that `default_collate` makes: text in tuples, and lists of columns."""
    if isinstance(batch, Mapping):
        return {name: _row_by_default(column, number, count) for name, column in batch.items()}
    if isinstance(batch, list) or hasattr(batch, "_fields"):
        return [_row_by_default(column, number, count) for column in batch]
    return batch[number] if _has_rows(batch) or isinstance(batch, tuple) else batch


def _row(batch: Any, number: int, count: int) -> Any:
    """What one sample has of a nest that a function of the user's has made."""
    if (_has_rows(batch) or isinstance(batch, list)) and len(batch) == count:
        return batch[number]
    if isinstance(batch, Mapping):
        return {name: _row(column, number, count) for name, column in batch.items() if _belongs(column, count)}
    if isinstance(batch, tuple) and len(batch) == count and not any(_belongs(each, count) for each in batch):
        return batch[number]
    return [_row(column, number, count) for column in batch if _belongs(column, count)]


def _belongs(column: Any, count: int) -> bool:
    if _has_rows(column):
        return len(column) == count
    if isinstance(column, Mapping):
        return any(_belongs(each, count) for each in column.values())
    return isinstance(column, list | tuple) and (len(column) == count or any(_belongs(each, count) for each in column))


def _named(row: Any, number: int, names: Sequence[str] | None) -> tuple[str, dict[str, Any]]:
    if isinstance(row, Mapping):
        values = {str(name): value for name, value in row.items()}
    elif isinstance(row, list | tuple):
        known = list(names) if names is not None and len(names) == len(row) else list(map(str, range(len(row))))
        values = dict(zip(known, row, strict=True))
    else:
        values = {(names[0] if names is not None and len(names) == 1 else "value"): row}
    key = values.pop(KEY, None)
    values.pop(_URL, None)
    return (f"number {number}" if key is None else str(key)), values
