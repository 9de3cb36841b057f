"""What frameworks and people ask a loader for, as they would ask torch's DataLoader."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

from streamload.options import Options

__all__ = ["LoaderAttributes"]


class LoaderAttributes:
    """Read-only properties of a loader."""

    _options: Options

    @abstractmethod
    def _samples(self) -> int:
        """All stored samples."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a StreamLoader stands for processes and a place in an epoch, so it cannot be copied or pickled"
        )

    def __getitem__(self, index: Any) -> NoReturn:
        """Batches have no numbers; this is here to say so to those who wrap the loader in a DataLoader."""
        raise TypeError(
            "a StreamLoader is the loader itself and takes the place of DataLoader: iterate over it (for batch in "
            "loader), or put a streamload.TarDataset, whose samples have numbers, into a DataLoader"
        )

    @property
    def batch_size(self) -> int:
        """Samples in a batch of this rank."""
        return self._options.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether the samples are dropped that fill no batch on every rank."""
        return self._options.drop_last

    @property
    def num_workers(self) -> int:
        """Worker processes; what "auto" came to."""
        return self._options.workers

    @property
    def dataset(self) -> range:
        """The numbers of all stored samples, which has the length that frameworks ask a loader's dataset for.

        It takes what `len(loader)` takes.
        """
        return range(self._samples())
