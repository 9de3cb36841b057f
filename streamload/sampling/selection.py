"""Selection: which samples of a dataset take part, by a condition on columns or by keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from streamload.index.columns import KEY, KEY_HASH, LABEL, unknown_class
from streamload.order.sampling import mixed_words
from streamload.sampling.expression import CLASS_NAME, FRACTION, Expression
from streamload.text import counted, listed

Where = str | Callable[["ColumnsOf"], Any] | os.PathLike[str] | Iterable[str]

_SHOWN_KEYS = 3

ReadColumns = Callable[[Sequence[str]], Mapping[str, NDArray[Any]]]
ReadNames = Callable[[], Sequence[str] | None]


class ColumnsOf:
    """The columns of a dataset, read as they are looked up by name, into `found`."""

    def __init__(self, read: ReadColumns, class_names: ReadNames) -> None:
        self._read = read
        self._class_names = cache(class_names)
        self.found: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.fetch([name])
        return self.found[name]

    def __iter__(self) -> NoReturn:
        raise TypeError("columns are looked up by name, such as columns['label']; they cannot be iterated over")

    def fetch(self, names: Iterable[str]) -> None:
        """Read several columns at once."""
        made_of = dict.fromkeys(names, LABEL)
        for name in made_of:
            if name != CLASS_NAME:
                made_of[name] = KEY_HASH if name.partition(".")[0] == FRACTION else name
        missing = [stored for stored in dict.fromkeys(made_of.values()) if stored not in self.found]
        if missing:
            self.found.update(self._read(missing))
        for name, stored in made_of.items():
            if name == CLASS_NAME:
                self.found[name] = self._named(self.found[LABEL])
            elif stored == KEY_HASH != name:
                self.found[name] = _fractions(self.found[KEY_HASH], int(name.partition(".")[2] or 0))

    def check_classes(self, names: Iterable[str]) -> None:
        """Raise ValueError for a class that is not in `classes.json`, with similar names."""
        for name in names:
            known = self._class_names() or ()
            if name not in known:
                raise ValueError(f"where= compares class_name with {unknown_class(name, known)}")

    def _named(self, labels: NDArray[np.int64]) -> NDArray[Any]:
        names = self._class_names()
        if names is None:
            raise ValueError(
                "where= has class_name, and beside the shards there is no classes.json (shardify writes it); use label"
            )
        existing, number = np.unique(labels, return_inverse=True)
        unnamed = [label for label in existing.tolist() if not 0 <= label < len(names)]
        if unnamed:
            raise ValueError(f"where= has class_name, and classes.json has no name for label {unnamed[0]}; use label")
        return np.array([names[label] for label in existing.tolist()], dtype=np.str_)[number]


class Selection:
    """Which samples take part.

    Attributes:
        where: as for `StreamLoader`; None selects all samples.

    Raises:
        TypeError, ValueError: it makes no sense.
    """

    def __init__(self, where: Where | None = None) -> None:
        self.where = where
        self._condition = Expression(where) if isinstance(where, str) else None
        self._keys = frozenset() if where is None or isinstance(where, str) or callable(where) else _keys_of(where)

    def select(self, columns: ColumnsOf, count: Callable[[], int]) -> NDArray[np.bool_]:
        """Return which samples take part, bool[N], in the order of the listing.

        Raises:
            TypeError, ValueError: none does, keys do not exist, or the condition does not fit the columns.
            StreamloadError: a column cannot be read.
        """
        if self._condition is not None:
            columns.fetch(self._condition.names)
            columns.check_classes(self._condition.class_names)
            selected = self._condition.select({name: columns[name] for name in self._condition.names})
        elif callable(self.where):
            selected = np.asarray(self.where(columns))
            samples = len(next(iter(columns.found.values()), ())) or count()
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
                    "its name in the shard up to the first dot, with folders"
                )
        if not selected.any():
            raise ValueError(f"where={self.where!r} selects none of {counted(len(selected), 'sample')}")
        return selected


def _keys_of(where: os.PathLike[str] | Iterable[str]) -> frozenset[str]:
    """Return keys that are given themselves, or in a file."""
    if isinstance(where, os.PathLike):
        try:
            with open(where, encoding="utf-8") as file:
                keys = frozenset(line for line in map(str.strip, file) if line)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"where={where!r} names a file with one key a line, which cannot be read: {error}"
            ) from error
    elif isinstance(where, Iterable):
        given = list(where)
        wrong = next((key for key in given if not isinstance(key, str)), None)
        if wrong is not None:
            raise TypeError(f"where= has {wrong!r} among its keys; keys are strings")
        keys = frozenset(given)
    else:
        raise TypeError(f"where={where!r} must be a condition such as 'size.jpg < 1_000_000', a function, or keys")
    if not keys:
        raise ValueError("where= has no keys; leave it out for all samples")
    return keys


def _fractions(key_hashes: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each key, decided by it alone, so a split stays when samples are added."""
    words = mixed_words(mixed_words(key_hashes) + np.uint64(seed % (1 << 64)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
