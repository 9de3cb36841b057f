"""The name under which the ranks of a machine find the feeder of one loader.

On its own because it counts the loaders of the process, and the generations of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from streamload.environment.launchers import launch_name
from streamload.environment.rendezvous import rendezvous_name

__all__ = ["SharedFeeder"]

_loaders: Counter[str] = Counter()
"""How many loaders of a dataset this process has made: each rank makes them in the same order."""


class SharedFeeder:
    """The feeder of a loader that every rank of this machine makes.

    Args:
        places: everything that the dataset's arguments name.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._dataset = "\0".join(places)
        self._number = _loaders[self._dataset]
        _loaders[self._dataset] += 1
        self._generation = 0
        self._alike: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """See `rendezvous_name`."""
        return rendezvous_name(launch_name(), self._dataset, str(self._number), str(self._generation))

    def change(self, alike: Mapping[str, str]) -> None:
        """The feeder is to do this; if it is something else than before, it is another feeder, for all ranks."""
        if self._alike is not None and self._alike != alike:
            self._generation += 1
        self._alike = alike
