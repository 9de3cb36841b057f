"""Select samples by keys, a function, or a condition (`aesthetic > 5 and "txt"`; parsed by `ast`, never executed)."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamload.index.dataset import KEY, KEY_HASH, LABEL, PRESENT, SIZE, unknown_class
from streamload.order.sampling import mixed_words
from streamload.text import counted, listed

Where = str | Callable[["ColumnsOf"], Any] | os.PathLike[str] | Iterable[str]
ReadColumns = Callable[[Sequence[str]], Mapping[str, NDArray[Any]]]
ReadNames = Callable[[], Sequence[str] | None]
_Columns = Mapping[str, NDArray[Any]]

# The column of numbers in [0, 1) derived from keys; `fraction(7)` derives other numbers, with seed 7.
FRACTION = "fraction"
CLASS_NAME = "class_name"

_SHOWN_KEYS = 3

_MOST_INT64, _HUGE = (1 << 63) - 1, 10**308

_EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_GRAMMAR = (
    "a condition is made of numbers, strings, columns (`aesthetic`), `key`, `label`, `class_name`, `fraction`, "
    '`size.jpg`, "txt" (the sample has that field), + - * / // %, < <= > >= == (not =) != in, and, or, not'
)


class Selection:
    """Parse `where=` on creation; `select` applies it to a dataset's columns.

    Attributes:
        where: as for `StreamLoader`; None for all samples.

    Raises:
        TypeError, ValueError: `where` is invalid.
    """

    def __init__(self, where: Where | None = None) -> None:
        self.where = where
        self._condition = Expression(where) if isinstance(where, str) else None
        self._keys = frozenset() if where is None or isinstance(where, str) or callable(where) else _keys_of(where)

    def select(self, columns: ColumnsOf, count: Callable[[], int]) -> NDArray[np.bool_]:
        """Return a mask of the selected samples, bool[N], in the order of the listing.

        Args:
            columns: the dataset's columns.
            count: returns the number of samples; called if a `where` function looks up no column.

        Raises:
            TypeError, ValueError: no sample is selected, keys do not exist, or `where` does not fit the columns.
            StreamloadError: a column cannot be read.
        """
        if self._condition is not None:
            columns.fetch(self._condition.names)
            columns.check_classes(self._condition.class_names)
            selected = self._condition.select({name: columns[name] for name in self._condition.names})
        elif callable(self.where):
            selected = np.asarray(self.where(columns))
            samples = len(next(iter(columns.columns.values()), ())) or count()
            if selected.dtype != np.bool_ or selected.shape != (samples,):
                raise TypeError(
                    f"where= returned {selected.dtype}{list(selected.shape)}; it must return one truth value for each "
                    f"of {counted(samples, 'sample')}, such as columns['label'] == 3"
                )
        else:
            keys = columns[KEY]
            selected = np.fromiter((key in self._keys for key in keys), np.bool_, len(keys))
            if missing := self._keys.difference(keys[selected]):
                shown = listed(sorted(missing)[:_SHOWN_KEYS])
                raise ValueError(
                    f"where= has {counted(len(missing), 'key')} that no sample has, such as {shown}; a sample's key is "
                    "the name of its files up to the first dot, with folders"
                )
        if not selected.any():
            raise ValueError(f"where={self.where!r} selects none of {counted(len(selected), 'sample')}")
        return selected


def _keys_of(where: os.PathLike[str] | Iterable[str]) -> frozenset[str]:
    if isinstance(where, os.PathLike):
        try:
            with open(where, encoding="utf-8") as file:
                keys = frozenset(line for line in map(str.strip, file) if line)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"where={where!r} must name a file of keys, one per line, but it cannot be read: {error}"
            ) from error
    elif isinstance(where, Iterable):
        entries = list(where)
        wrong = next((key for key in entries if not isinstance(key, str)), None)
        if wrong is not None:
            raise TypeError(f"where= has {wrong!r} among its keys; keys are strings")
        keys = frozenset(entries)
    else:
        raise TypeError(f"where={where!r} must be a condition such as 'size.jpg < 1_000_000', a function, or keys")
    if not keys:
        raise ValueError("where= has no keys; leave it out to select all samples")
    return keys


class ColumnsOf:
    """Read a dataset's columns when they are first looked up by name. Passed to functions given as `where=`.

    Args:
        read: returns columns of the index by their names.
        class_names: returns the names in `classes.json`; None if there is no such file.

    Attributes:
        columns: the columns read so far.
    """

    def __init__(self, read: ReadColumns, class_names: ReadNames) -> None:
        self._read = read
        self._class_names = cache(class_names)
        self.columns: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.fetch([name])
        return self.columns[name]

    def __iter__(self) -> NoReturn:
        raise TypeError("columns are looked up by name, such as columns['label']; they cannot be iterated over")

    def fetch(self, names: Iterable[str]) -> None:
        """Read several columns at once."""
        sources = dict.fromkeys(names, LABEL)  # `class_name` is derived from `label`
        for name in sources:
            if name != CLASS_NAME:
                sources[name] = KEY_HASH if name.partition(".")[0] == FRACTION else name
        missing = [stored for stored in dict.fromkeys(sources.values()) if stored not in self.columns]
        if missing:
            self.columns.update(self._read(missing))
        for name, stored in sources.items():
            if name == CLASS_NAME:
                self.columns[name] = self._named(self.columns[LABEL])
            elif stored == KEY_HASH != name:
                self.columns[name] = _fractions(self.columns[KEY_HASH], int(name.partition(".")[2] or 0))

    def check_classes(self, names: Iterable[str]) -> None:
        """Raise ValueError for a class missing in `classes.json`; the message suggests similar names."""
        for name in names:
            known = self._class_names() or ()
            if name not in known:
                raise ValueError(f"where= compares class_name with {unknown_class(name, known)}")

    def _named(self, labels: NDArray[np.int64]) -> NDArray[Any]:
        names = self._class_names()
        if names is None:
            raise ValueError(
                'where= has class_name, which needs a classes.json beside the shards: {"classes": ["cat", ...]}'
            )
        existing, number = np.unique(labels, return_inverse=True)
        unnamed = [label for label in existing.tolist() if not 0 <= label < len(names)]
        if unnamed:
            raise ValueError(f"where= has class_name, but classes.json has no name for label {unnamed[0]}; use label")
        return np.array([names[label] for label in existing.tolist()], dtype=np.str_)[number]


def _fractions(key_hashes: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each key, from key and seed alone: adding samples does not change a split."""
    words = mixed_words(mixed_words(key_hashes) + np.uint64(seed % (1 << 64)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Expression:
    """A condition on columns.

    Attributes:
        names: the columns that the condition needs.
        class_names: the strings that `class_name` is compared with.

    Raises:
        TypeError, ValueError: the text is not a valid condition.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.msg if isinstance(error, SyntaxError) else error
            raise ValueError(f"where={text!r} cannot be understood ({why}); {_GRAMMAR}") from None
        self._tree = tree
        self._columns: _Columns = {}
        recorder = _Recorder()
        try:
            self._evaluate(recorder)  # on empty columns, to check the grammar and to record names
        except TypeError:
            # A condition without any column gets the clearer error below.
            if any(isinstance(node, ast.BoolOp | ast.Name) for node in ast.walk(tree)):
                raise
        self.names = list(recorder)
        if not self.names:
            raise ValueError(f"where={text!r} names no column (quotes make a string); {_GRAMMAR}")
        self.class_names = list(_class_names(tree))

    def select(self, columns: _Columns) -> NDArray[np.bool_]:
        """Return a mask of the samples that meet the condition, bool[N], given the columns in `names`.

        Raises:
            TypeError, ValueError: the condition compares values that cannot be compared.
        """
        count = len(next(iter(columns.values())))
        return np.broadcast_to(np.asarray(self._evaluate(columns), np.bool_), (count,)).copy()

    def _evaluate(self, columns: _Columns) -> Any:
        self._columns = columns
        try:
            with np.errstate(invalid="ignore", divide="ignore"):
                return self._condition(self._tree)[0]
        except TypeError as error:
            raise TypeError(f"where={self._text!r} does not fit the columns: {error}") from None

    def _refused(self, node: ast.expr, why: str) -> ValueError:
        return ValueError(f"where={self._text!r}: `{ast.unparse(node)}` {why}; {_GRAMMAR}")

    def _condition(self, node: ast.expr) -> tuple[Any, Any]:
        """Return two masks: rows that meet a condition, and rows that fail it; missing numbers put a row in neither."""
        match node:
            case ast.BoolOp(op=operation, values=values):
                true, false = zip(*map(self._condition, values), strict=True)
                if isinstance(operation, ast.Or):
                    return reduce(operator.or_, true), reduce(operator.and_, false)
                return reduce(operator.and_, true), reduce(operator.or_, false)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._condition(operand)[::-1]
            case ast.Constant(value=str(field)):
                present = self._columns[f"{PRESENT}{field}"]
                return present, ~present
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._comparison(left, zip(ops, others, strict=True))
            case ast.Name() | ast.Attribute():
                values = self._value(node)
                if len(values) and values.dtype != np.bool_:
                    raise TypeError(
                        f"`{ast.unparse(node)}` is not a condition, since it has numbers or strings; compare it"
                    )
                return values, ~values
        raise self._refused(node, "is not a condition")

    def _comparison(self, left: ast.expr, others: Iterable[tuple[ast.cmpop, ast.expr]]) -> tuple[Any, Any]:
        true: Any = True
        false: Any = False
        value = self._value(left)
        for operation, node in others:
            missing, following = _is_missing(value), value
            if isinstance(operation, ast.In | ast.NotIn):
                if not isinstance(node, ast.Tuple | ast.List | ast.Set):
                    raise self._refused(node, "is not a list; write `in (1, 2)`")
                constants = [self._value(each) for each in node.elts]
                if any(np.ndim(each) for each in constants):
                    raise self._refused(node, "contains columns; a list may contain only numbers and strings")
                _check_alike(node, value, *constants)
                met = np.isin(value, constants, invert=isinstance(operation, ast.NotIn))
            elif type(operation) in _COMPARISONS:
                following = self._value(node)
                _check_alike(node, value, following)
                met = _COMPARISONS[type(operation)](value, following)
                missing = missing | _is_missing(following)
            else:
                raise self._refused(node, "is compared by an unsupported operator")
            true, false = true & met & ~missing, false | (~met & ~missing)
            value = following
        return true, false

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
                return _ARITHMETIC[type(operation)](self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.Constant(value=bool() | int() | float() | str() as constant):
                if isinstance(constant, int) and abs(constant) > _MOST_INT64:
                    constant = float(min(constant, _HUGE))  # float64 can hold this
                return np.asarray(constant)
        name = _name(node)
        if name is None:
            raise self._refused(node, "is not supported")
        return self._columns[name]


class _Recorder(dict[str, NDArray[Any]]):
    """Create empty columns on demand, to record the names that a condition looks up."""

    def __missing__(self, name: str) -> NDArray[Any]:
        self[name] = np.empty(0, object)
        return self[name]


def _check_alike(node: ast.expr, value: Any, *others: Any) -> None:
    kinds = {np.asarray(each).dtype.kind in "UO" for each in (value, *others) if np.size(each)}
    if len(kinds) > 1:
        raise TypeError(f"`{ast.unparse(node)}`: strings cannot be compared with numbers")


def _name(node: ast.expr) -> str | None:
    """Return the name of the column that a node stands for, or None."""
    match node:
        case ast.Name(id=name) if name + "." not in (SIZE, PRESENT):
            return name
        case ast.Call(func=ast.Name(id="fraction"), args=[ast.Constant(value=int(seed))], keywords=[]):
            return f"{FRACTION}.{int(seed)}"
        case ast.Attribute():
            dotted = ast.unparse(node)
            return dotted if all(part.isidentifier() for part in dotted.split(".")) else None
    return None


def _class_names(tree: ast.expr) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and all(isinstance(each, _EQUALITIES) for each in node.ops):
            sides = [node.left, *node.comparators]
            if CLASS_NAME in map(_name, sides):
                constants = [each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)]
                yield from (value for value in constants if isinstance(value, str))


def _is_missing(value: Any) -> Any:
    """Return a mask of missing numbers, for which a comparison is neither true nor false."""
    array = np.asarray(value)
    return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, np.bool_)
