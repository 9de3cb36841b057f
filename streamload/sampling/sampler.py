"""A user's sampler: any iterable of numbers of samples, drawn once per epoch."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sized

import numpy as np
from numpy.typing import NDArray

from streamload.errors import LoaderStateError

__all__ = ["SamplerDraws"]

_UNDRAWN = "order: not drawn yet"


class SamplerDraws:
    """A user's sampler: drawn once per epoch, and checked against a loaded state.

    Args:
        sampler: any iterable of numbers of samples that can be iterated repeatedly.
        rank: the loader's.
        world_size: the loader's.

    Raises:
        TypeError, ValueError: it can be iterated only once, or it divides the samples among other ranks.
    """

    def __init__(self, sampler: Iterable[int], rank: int, world_size: int) -> None:
        if not isinstance(sampler, Iterable):
            raise TypeError(f"sampler={sampler!r} must be an iterable of numbers of samples, such as a torch Sampler")
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"sampler={sampler!r} can be iterated only once, and each epoch needs a new order; give a torch "
                "Sampler, a list, or an object whose __iter__ starts over"
            )
        own = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
        self.divides = None not in own
        if self.divides and world_size > 1 and own != (rank, world_size):
            raise ValueError(
                f"the sampler is that of rank {own[0]} of {own[1]}, and the loader's is rank {rank} of {world_size}; "
                "make both with the same"
            )
        self._sampler = sampler
        self._kind = f"divided among {own[1]} ranks" if self.divides else "order"
        self._numbers: NDArray[np.int64] | None = None
        self._digest: str | None = None
        self._epoch = -1
        self._expected: str | None = None

    def __len__(self) -> int:
        """The number of samples in an epoch.

        Raises:
            TypeError: it has no length.
        """
        if not isinstance(self._sampler, Sized):
            raise TypeError(
                "the sampler has no len(), so the number of batches is not known before an epoch has begun; give it a "
                "__len__"
            )
        return len(self._sampler)

    def expect(self, state: str | None) -> None:
        """Require the epoch drawn next to be the one of a loaded state."""
        self._numbers = None
        self._expected = state

    def draw(self, epoch: int, position: int, n_samples: int) -> NDArray[np.int64]:
        """The samples of an epoch, int64[M]. A resumed epoch is not drawn again.

        Raises:
            TypeError, ValueError: it gives what is no number of a sample.
            LoaderStateError: it does not give the order in which a loaded state stands.
        """
        if position and self._numbers is not None and self._epoch == epoch:
            return self._numbers
        expected = self._expected if position else None
        numbers = self._numbers_of(epoch)
        if expected not in (None, _UNDRAWN, self._kind):
            numbers = self._replayed(numbers, epoch, str(expected))
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= n_samples):
            wrong = numbers[(numbers < 0) | (numbers >= n_samples)][0]
            raise ValueError(f"the sampler gave {wrong}, and the dataset has the samples 0 to {n_samples - 1}")
        self._numbers, self._epoch, self._digest, self._expected = numbers, epoch, None, None
        return numbers

    def state(self, epoch: int) -> str:
        """What a state records to recognize the order: its digest."""
        if self.divides:
            return self._kind
        if self._numbers is None or self._epoch != epoch:
            return self._expected or _UNDRAWN
        if self._digest is None:
            self._digest = _digest(self._numbers)
        return self._digest

    def _numbers_of(self, epoch: int) -> NDArray[np.int64]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        try:
            return np.fromiter(map(operator.index, self._sampler), np.int64)
        except TypeError as error:
            raise TypeError(
                f"the sampler gave what is no number of a sample ({error}); instead of a batch sampler give its "
                "sampler, and batch_size"
            ) from error

    def _replayed(self, numbers: NDArray[np.int64], epoch: int, expected: str) -> NDArray[np.int64]:
        """The saved order: the first that is drawn, or where a generator goes on and on, the one of the epoch."""
        for _ in range(epoch):
            if _digest(numbers) == expected:
                break
            numbers = self._numbers_of(epoch)
        if _digest(numbers) != expected:
            raise LoaderStateError(
                "the sampler gives another order than when the state was saved, so the rest of that epoch is not "
                "known; give the sampler a generator with a fixed seed (torch.Generator().manual_seed(...)), or use "
                "shuffle=True or weights= instead, which can be resumed anywhere"
            )
        return numbers


def _digest(numbers: NDArray[np.int64]) -> str:
    return "order:" + hashlib.blake2b(numbers.astype("<i8").tobytes(), digest_size=16).hexdigest()
