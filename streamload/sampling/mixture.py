"""A mixture: several datasets read as one, in fixed shares."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamload.arguments import as_python
from streamload.errors import without_secrets
from streamload.sampling.selection import Selection, Where
from streamload.storage.urls import Urls


@dataclass(frozen=True, slots=True)
class Portion:
    """One dataset of a mixture.

    Attributes:
        urls: its shards, as `StreamLoader` takes them.
        weight: its share of the samples, relative to the others'; above 0.
        transform: for its samples, instead of the loader's `transform`.
        index: a folder with its index, if that is not beside the shards.
        where: which of its samples take part, as for `StreamLoader`.
        join: its sidecars, as for `StreamLoader`.

    Raises:
        TypeError, ValueError: the weight is not a number above 0, or `where` makes no sense.
    """

    urls: Urls = field(repr=False)  # both may hold a login or a signature
    weight: float
    transform: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    index: str | os.PathLike[str] | None = field(default=None, repr=False)
    where: Where | None = field(default=None, repr=False)
    join: Urls | None = field(default=None, repr=False)
    selection: Selection = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "selection", Selection(self.where))
        object.__setattr__(self, "weight", as_python(self.weight))
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float):
            given = without_secrets(repr(self.weight))  # urls and weight the wrong way round
            raise TypeError(f"weight={given} must be a number above 0")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight={self.weight!r} must be a number above 0; leave out what is not to be read")

    @property
    def sidecars(self) -> Sequence[Urls]:
        """The datasets that `join` names."""
        if self.join is None:
            return ()
        return (self.join,) if isinstance(self.join, str | os.PathLike) else tuple(self.join)


class Mixture:
    """Several datasets, each with a share of the samples, for `urls` of a loader.

        mixture = Mixture({"photos": ("s3://b/photos", 0.7), "drawings": ("s3://b/drawings", 0.3)})
        loader = StreamLoader(mixture, 64, shuffle=True)

    In every global batch each dataset has its share to less than one sample (in blocks of the global batch with which a
    run was started). Passes over a dataset continue from epoch to epoch: a small one is repeated, and a large one is
    read to its end over several epochs. An epoch has as many samples as all datasets together, or `epoch_size`.

    Args:
        datasets: for each name a pair of urls and weight, or a `Portion`. Weights need not have the sum 1.

    Attributes:
        portions: the datasets by name, in the order given.

    Raises:
        TypeError, ValueError: there is no dataset, or its arguments make no sense.
    """

    def __init__(self, datasets: Mapping[str, tuple[Urls, float] | Portion]) -> None:
        if not isinstance(datasets, Mapping) or not datasets:
            given = without_secrets(repr(datasets))
            raise TypeError(f"a Mixture is made of a mapping from names to (urls, weight), not of {given}")
        self.portions: dict[str, Portion] = {}
        for name, value in datasets.items():
            shown = without_secrets(repr(name))  # a url where someone takes the name for one
            if not isinstance(name, str):
                raise TypeError(f"the name {shown} of a dataset must be a string")
            if not isinstance(value, tuple | list | Portion):
                given = without_secrets(repr(value))
                raise TypeError(f"dataset {shown} must be (urls, weight) or a Portion, not {given}")
            try:
                self.portions[name] = value if isinstance(value, Portion) else Portion(*value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"dataset {shown} must be (urls, weight) or a Portion: {error}") from None

    def __repr__(self) -> str:
        shares = ", ".join(f"{name}: {share:.3g}" for name, share in self.shares.items())
        return f"<Mixture of {without_secrets(shares)}>"

    @property
    def shares(self) -> dict[str, float]:
        """Each dataset's part of the samples; the sum is 1."""
        total = math.fsum(portion.weight for portion in self.portions.values())
        return {name: portion.weight / total for name, portion in self.portions.items()}


def portions_of(
    urls: Urls | Mixture, index: str | os.PathLike[str] | None, *, where: Where | None = None, join: Urls | None = None
) -> dict[str, Portion]:
    """Return the datasets of a loader's `urls`: those of a mixture, or one without a name.

    Raises:
        ValueError: an argument is given for a whole mixture.
    """
    if not isinstance(urls, Mixture):
        return {"": Portion(urls, 1.0, index=index, where=where, join=join)}
    for name, value in (("index", index), ("where", where), ("join", join)):
        if value is not None:
            raise ValueError(
                f"{name}= and a Mixture don't go together; give each dataset its own: Portion(..., {name}=)"
            )
    return urls.portions
