"""What frameworks and people ask a loader for, as they would ask torch's DataLoader."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from streamload.arguments import no_attribute
from streamload.index.listing import Listing
from streamload.options import Options
from streamload.trainer.remote_reader import find_classes

__all__ = ["LoaderAttributes"]


class LoaderAttributes:
    """Read-only properties of a loader."""

    _options: Options
    _listing: Listing

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

    if not TYPE_CHECKING:  # type checkers would believe that there is every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Nothing more than there is: this is here for methods that other loaders have."""
            raise no_attribute(type(self), name)

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

    @cached_property
    def classes(self) -> list[str] | None:
        """The names of the classes by number, as `shardify` has written them beside the shards; None where it has not.

        It is read from `classes.json` when it is first asked for.

        Raises:
            DatasetIndexError: it is damaged, or the folders of the shards have different ones.
            StorageError: it cannot be read.
        """
        return find_classes(self._listing, self._options.storages)

    @property
    def dataset(self) -> range:
        """The numbers of all stored samples, which has the length that frameworks ask a loader's dataset for.

        It takes what `len(loader)` takes.
        """
        return range(self._samples())
