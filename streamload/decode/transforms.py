"""Which of the user's functions apply to a sample: the same for all, or those of the sample's dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from streamload.decode.tasks import OwnTransforms, Transform
from streamload.decode.user_code import UserFunction

__all__ = ["DatasetTransforms", "Transforms"]


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
