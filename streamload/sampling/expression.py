"""Conditions on the columns of a dataset, as text: `aesthetic > 5 and "txt"`. Parsed by `ast`; nothing is executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamload.index.columns import PRESENT, SIZE

FRACTION = "fraction"
"""The column of numbers in [0, 1) that keys alone decide; `fraction(7)` are others."""
CLASS_NAME = "class_name"

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_MOST_INT64 = (1 << 63) - 1
_EQUALITIES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_GRAMMAR = (
    'it is made of columns (`aesthetic`), `key`, `label`, `class_name`, `fraction`, `size.jpg`, "txt" for samples that '
    "have the field txt, numbers, strings, + - * / // %, < <= > >= == != in, and, or, not"
)


class Expression:
    """A condition on columns.

    Args:
        text: as a user writes it.

    Attributes:
        names: the columns that it needs.
        class_names: those that `class_name` is to be, or not to be.

    Raises:
        ValueError: it is no such condition.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"where={text!r} cannot be understood ({error}); {_GRAMMAR}") from None
        self.names: dict[str, None] = {}
        self._check_condition(self._tree)
        if not self.names:
            raise ValueError(f"where={text!r} names no column (what is compared in quotes is a string); {_GRAMMAR}")
        self.class_names = list(_class_names(self._tree))

    def select(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Which samples meet the condition, bool[N].

        Args:
            columns: those of `names`, one value for each sample.

        Raises:
            TypeError, ValueError: values cannot be compared as the condition does.
        """
        count = len(next(iter(columns.values())))
        try:
            with np.errstate(invalid="ignore", divide="ignore"):
                met, _ = self._condition(self._tree, columns)
        except (TypeError, ValueError) as error:
            raise type(error)(f"where={self._text!r} does not fit the columns: {error}") from None
        return np.broadcast_to(np.asarray(met, np.bool_), (count,)).copy()

    # -- what is allowed -------------------------------------------------------------------------------------------

    def _check_condition(self, node: ast.expr) -> None:
        match node:
            case ast.BoolOp(values=values):
                for each in values:
                    self._check_condition(each)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._check_condition(operand)
            case ast.Constant(value=str(field)):
                self.names[f"{PRESENT}{field}"] = None
            case ast.Compare(left=left, ops=ops, comparators=others):
                self._check_value(left)
                for operation, other in zip(ops, others, strict=True):
                    self._check_comparison(operation, other)
            case ast.Name() | ast.Attribute():
                self._check_value(node)  # a column of truth values
            case _:
                self._refuse(node, "is no condition")

    def _check_comparison(self, operation: ast.cmpop, other: ast.expr) -> None:
        if isinstance(operation, ast.In | ast.NotIn):
            if not isinstance(other, ast.Tuple | ast.List | ast.Set):
                self._refuse(other, "is no list; write `in (1, 2)`")
            for each in other.elts:
                _constant(each) if _is_constant(each) else self._refuse(each, "is no number or string")
        elif type(operation) in _COMPARISONS:
            self._check_value(other)
        else:
            self._refuse(other, "is compared in a way that is not known")

    def _check_value(self, node: ast.expr) -> None:
        match node:
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
                self._check_value(left)
                self._check_value(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self._check_value(operand)
            case ast.Constant(value=bool() | int() | float() | str()):
                pass
            case _ if (name := _name(node)) is not None:
                self.names[name] = None
            case _:
                self._refuse(node, "is not known here")

    def _refuse(self, node: ast.expr, why: str) -> NoReturn:
        raise ValueError(f"where={self._text!r}: `{ast.unparse(node)}` {why}; {_GRAMMAR}")

    # -- values ----------------------------------------------------------------------------------------------------

    def _condition(self, node: ast.expr, columns: Mapping[str, NDArray[Any]]) -> tuple[Any, Any]:
        """Return where a condition is true, and where it is false; it is neither for a missing number."""
        match node:
            case ast.BoolOp(op=operation, values=values):
                true, false = zip(*(self._condition(each, columns) for each in values), strict=True)
                if isinstance(operation, ast.And):
                    return reduce(operator.and_, true), reduce(operator.or_, false)
                return reduce(operator.or_, true), reduce(operator.and_, false)
            case ast.UnaryOp(operand=operand):
                return self._condition(operand, columns)[::-1]
            case ast.Constant(value=str(field)):
                present = columns[f"{PRESENT}{field}"]
                return present, ~present
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._compared(left, ops, others, columns)
        values = self._value(node, columns)
        if values.dtype != np.bool_:
            raise TypeError(f"`{ast.unparse(node)}` is no condition, since it has numbers or strings; compare it")
        return values, ~values

    def _compared(
        self, left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr], columns: Mapping[str, NDArray[Any]]
    ) -> tuple[Any, Any]:
        true: Any = True
        false: Any = False
        value = self._value(left, columns)
        for operation, other in zip(ops, others, strict=True):
            if isinstance(operation, ast.In | ast.NotIn):
                assert isinstance(other, ast.Tuple | ast.List | ast.Set)
                listed = [_constant(each) for each in other.elts]
                self._check_alike(other, value, *listed)
                met = np.isin(value, listed, invert=isinstance(operation, ast.NotIn))
                missing, following = _is_missing(value), value
            else:
                following = self._value(other, columns)
                self._check_alike(other, value, following)
                met = _COMPARISONS[type(operation)](value, following)
                missing = _is_missing(value) | _is_missing(following)
            true, false = true & met & ~missing, false | (~met & ~missing)
            value = following
        return true, false

    @staticmethod
    def _check_alike(node: ast.expr, value: Any, *others: Any) -> None:
        if any(_is_text(value) != _is_text(other) for other in others):
            raise TypeError(f"`{ast.unparse(node)}`: strings and numbers are compared")

    def _value(self, node: ast.expr, columns: Mapping[str, NDArray[Any]]) -> Any:
        match node:
            case ast.BinOp(left=left, op=operation, right=right):
                return _ARITHMETIC[type(operation)](self._value(left, columns), self._value(right, columns))
            case ast.UnaryOp(operand=operand):
                return -self._value(operand, columns)
            case ast.Constant(value=value):
                assert isinstance(value, int | float | str), "it was checked"
                return np.asarray(_storable(value))
        name = _name(node)
        assert name is not None
        return columns[name]


def _name(node: ast.expr) -> str | None:
    """The column that a node stands for."""
    match node:
        case ast.Name(id=name) if name + "." not in (SIZE, PRESENT):
            return name
        case ast.Call(func=ast.Name(id="fraction"), args=[ast.Constant(value=int(seed))], keywords=[]):
            return f"{FRACTION}.{seed}"
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


def _is_constant(node: ast.expr) -> bool:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inside = node.operand if isinstance(node, ast.UnaryOp) and negative else node
    return isinstance(inside, ast.Constant) and isinstance(inside.value, int | float | str)


def _constant(node: ast.expr) -> float | str:
    value: float | str = ast.literal_eval(node)
    return _storable(value)


def _storable(value: float | str) -> float | str:
    """Return a constant as an array can hold it: an integer beyond 64 bits as the nearest float."""
    if not isinstance(value, int) or -_MOST_INT64 <= value <= _MOST_INT64:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_missing(value: Any) -> Any:
    """Return where a number is missing, for which a comparison is neither true nor false."""
    array = np.asarray(value)
    return np.isnan(array) if array.dtype.kind == "f" else np.zeros(array.shape, np.bool_)


def _is_text(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "UO"
