"""Check and resolve `weights`, `sampler`, `epoch_size` and mixtures: the arguments that decide an epoch's samples."""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import as_python, check_int
from streamload.errors import LoaderStateError, without_secrets
from streamload.index.dataset import Labels
from streamload.order.options import MAX_SAMPLES, OrderOptions, full_batches_and_last_rows
from streamload.order.sampling import Mixed, Sampled, Sampling, Stretched, Weighted, group_sizes
from streamload.order.share import EpochStart
from streamload.order.state import LoaderState
from streamload.sampling.expression import Selection, Where
from streamload.storage.storages import Urls
from streamload.text import counted

Weights = Literal["balanced"] | Mapping[int, float] | Sequence[float] | NDArray[Any]
_Checked = str | dict[int, float] | NDArray[np.float64]

_WEIGHTS_FORMS = '"balanced", a mapping from labels to weights, or one number for each sample'
_ALL_ZERO = "weights are all zero, so nothing can be drawn; give a weight above zero"
_LABELS_SHOWN = 20
_UNDRAWN = "order: not drawn yet"


@dataclass(frozen=True, slots=True)
class Portion:
    """One dataset of a mixture.

    Attributes:
        urls: the dataset's shards, as for `StreamLoader`.
        weight: the dataset's share of the samples, relative to the other weights; above 0.
        transform: used for the dataset's samples instead of the loader's `transform`.
        index: a folder with the dataset's index, if that is not beside the shards.
        where: the samples to use, as for `StreamLoader`.
        join: the dataset's sidecars, as for `StreamLoader`.

    Raises:
        TypeError, ValueError: the weight is not a finite number above 0, or `where` is invalid.
    """

    urls: Urls = field(repr=False)  # urls may hold a login or a signature; so may `index` and `join`
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
            shown = without_secrets(repr(self.weight))  # a url, if urls and weight were exchanged
            raise TypeError(f"weight={shown} must be a number above 0")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight={self.weight!r} must be finite and above 0; for 0 leave the dataset out")

    @property
    def sidecars(self) -> Sequence[Urls]:
        """Return `join` as a sequence of sidecars."""
        if self.join is None:
            return ()
        return (self.join,) if isinstance(self.join, str | os.PathLike) else tuple(self.join)


class Mixture:
    """Several datasets, each with a share of the samples, as the `urls` of a loader.

        mixture = Mixture({"photos": ("s3://b/photos", 0.7), "drawings": ("s3://b/drawings", 0.3)})
        loader = StreamLoader(mixture, 64, shuffle=True)

    Every global batch holds each dataset's share to within one sample. After a resume with another global batch size,
    shares hold for batches of the original size. Passes over a dataset continue from epoch to epoch: a small dataset is
    repeated, a large one is read over several epochs. An epoch has as many samples as all datasets together, or
    `epoch_size`.

    Args:
        datasets: by name, a pair of urls and weight, or a `Portion`. Weights need not sum to 1.

    Attributes:
        portions: the datasets by name, in the order given.

    Raises:
        TypeError, ValueError: there is no dataset, or a dataset's arguments are invalid.
    """

    def __init__(self, datasets: Mapping[str, tuple[Urls, float] | Portion]) -> None:
        if not isinstance(datasets, Mapping) or not datasets:
            shown = without_secrets(repr(datasets))
            raise TypeError(f"a Mixture takes a mapping from names to (urls, weight), not {shown}")
        self.portions: dict[str, Portion] = {}
        for name, value in datasets.items():
            shown = without_secrets(repr(name))  # the name may be a url by mistake
            if not isinstance(name, str):
                raise TypeError(f"the name {shown} of a dataset must be a string")
            if not isinstance(value, tuple | list | Portion):
                wrong = without_secrets(repr(value))
                raise TypeError(f"dataset {shown} must be (urls, weight) or a Portion, not {wrong}")
            try:
                self.portions[name] = value if isinstance(value, Portion) else Portion(*value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"dataset {shown} must be (urls, weight) or a Portion: {error}") from None

    def __repr__(self) -> str:
        shares = ", ".join(f"{name}: {share:.3g}" for name, share in self.shares.items())
        return f"<Mixture of {without_secrets(shares)}>"

    @property
    def shares(self) -> dict[str, float]:
        """Return each dataset's share of the samples; the shares sum to 1."""
        total = math.fsum(portion.weight for portion in self.portions.values())
        return {name: portion.weight / total for name, portion in self.portions.items()}


def portions_of(
    urls: Urls | Mixture, index: str | os.PathLike[str] | None, *, where: Where | None = None, join: Urls | None = None
) -> dict[str, Portion]:
    """Return the datasets in a loader's `urls` by name: those of a mixture, or a single one with an empty name.

    Raises:
        ValueError: `index`, `where` or `join` is given with a mixture, whose datasets have their own.
    """
    if not isinstance(urls, Mixture):
        return {"": Portion(urls, 1.0, index=index, where=where, join=join)}
    for name, value in (("index", index), ("where", where), ("join", join)):
        if value is not None:
            raise ValueError(
                f"{name}= and a Mixture don't go together; give each dataset its own: Portion(..., {name}=)"
            )
    return urls.portions


class SamplingOptions:
    """Turn a loader's `weights`, `sampler`, `epoch_size` and mixture into the sampling of its order.

    Call `resolve` once the dataset is listed, and `start` for each pass.

    Attributes:
        lanes: the order's number of lanes, unless a loaded state has another.
        sampling: the order's sampling; None before `resolve`, or if every sample comes once.
        n_selected: the number of samples that `where` selects; None for all.
        needs_counts: True if the number of samples must be known before a pass begins.

    Raises:
        TypeError, ValueError: an argument is invalid, or two exclude each other.
    """

    def __init__(
        self,
        weights: Weights | None,
        sampler: Iterable[int] | None,
        epoch_size: int | None,
        *,
        mixture: Mixture | None,
        shuffle: bool | int,
        batch_size: int,
        lanes: int | None,
        rank: int,
        world_size: int,
    ) -> None:
        if epoch_size is not None:
            check_int("epoch_size", epoch_size, 1, "or None", most=MAX_SAMPLES)
        others = {"weights": weights, "epoch_size": epoch_size, "lanes": lanes, "shuffle": shuffle or None}
        excluded = [name for name, value in others.items() if value is not None and sampler is not None]
        if excluded:
            raise ValueError(
                f"{excluded[0]} and sampler don't go together: a sampler gives an epoch's samples and "
                f"their order; leave {excluded[0]} out"
            )
        if weights is not None and not shuffle:
            raise ValueError(
                "weights needs shuffle=True: samples are drawn more than once, and without it the repeats of a sample "
                "would follow each other"
            )
        if mixture is not None and (weights is not None or sampler is not None):
            raise ValueError(
                "a Mixture has weights of its own, so it takes neither weights= nor sampler=; leave them out"
            )
        self.lanes = 1 if sampler is not None else lanes or world_size
        self.sampling: Sampling | None = None
        self.n_selected: int | None = None
        self._mixture = mixture
        self._block = batch_size * world_size
        self._epoch_size = epoch_size
        self._weights = _checked_weights(weights)
        self._weights_name: str | None = None
        self._passes = count(1)
        self._sampler = None if sampler is None else SamplerDraws(sampler)
        self._place = rank, world_size
        self.needs_counts = sampler is not None or mixture is not None or isinstance(self._weights, np.ndarray)
        self._selected: NDArray[np.bool_] | None = None

    @property
    def epoch_samples(self) -> int | None:
        """Return how many samples an epoch has, over all ranks; None for all listed samples.

        Raises:
            TypeError: the sampler has no length.
        """
        if self._sampler is not None:
            return len(self._sampler)
        return self.sampling.epoch_size if isinstance(self.sampling, Weighted | Stretched | Mixed) else None

    def samples_of(self, start: EpochStart, counts: tuple[int, ...] | None) -> int | None:
        """Return how many samples a pass's whole epoch has, over all ranks; None if `counts` are needed."""
        samples = self.epoch_samples if start.numbers is None else len(start.numbers)
        return sum(counts) if samples is None and counts is not None else samples

    def last_position(self, start: EpochStart, counts: tuple[int, ...] | None, order: OrderOptions) -> float:
        """Return the position after a pass's last batch on this rank; infinite if `counts` are needed.

        Raises:
            LoaderStateError: the pass begins after the epoch's end.
        """
        samples = self.samples_of(start, counts)
        if samples is None:
            return math.inf
        full, last_rows = full_batches_and_last_rows(order, samples, start.rank, start.world_size, start.position)
        return samples if last_rows else start.position + full * order.batch_size * start.world_size

    def resolve(
        self, edges: tuple[int, ...], selected: NDArray[np.bool_] | None, find_labels: Callable[[], Labels]
    ) -> None:
        """Set `sampling` and `n_selected` for a listed dataset.

        Args:
            edges: the shards of dataset d are `edges[d]:edges[d + 1]` of the listing.
            selected: bool[N], the samples to use; None for all.
            find_labels: returns the labels of all samples; called only if weights need them.

        Raises:
            ValueError: the weights do not fit the dataset's labels or its number of samples.
        """
        self._selected = selected
        self.n_selected = None if selected is None else int(selected.sum())
        weights = self._weights
        if weights is not None:
            self._weights_name = _name_of(weights)
        epoch_size = self._epoch_size or self.n_selected
        if self._mixture is not None:
            self.sampling = Mixed(edges, tuple(self._mixture.shares.values()), self._block, epoch_size, selected)
        elif self._sampler is not None:
            self.sampling = Sampled()
        elif isinstance(weights, np.ndarray):
            if selected is not None:
                self._check_length(len(selected))
                if not weights[selected].any():
                    raise ValueError("weights of all selected samples are zero, so nothing can be drawn")
            weight, group = np.unique(weights, return_inverse=True)
            self.sampling = Weighted.among(selected, group, weight, epoch_size or len(group))
        elif weights is not None:
            labels = find_labels()
            among = labels if selected is None else labels.of(selected)
            weight = _label_weights(weights, among, labels.values)
            size = self._epoch_size or len(among.number)
            self.sampling = Weighted.among(selected, labels.numbers_in(among), weight, size)
        elif epoch_size is not None:
            self.sampling = Stretched(epoch_size, selected)

    def check_counts(self, counts: Sequence[int]) -> None:
        """Raise ValueError if weights by sample are too few or too many, or a dataset of a mixture has no samples."""
        if self._mixture is not None and isinstance(self.sampling, Mixed):
            for name, (first, end) in zip(self._mixture.portions, pairwise(self.sampling.edges), strict=True):
                if not any(counts[first:end]):
                    raise ValueError(f"dataset {name!r} of the Mixture has no samples; leave it out")
        self._check_length(sum(counts))

    def _check_length(self, n_samples: int) -> None:
        if isinstance(self._weights, np.ndarray) and len(self._weights) != n_samples:
            raise ValueError(
                f"weights has {counted(len(self._weights), 'number')}, but the dataset has "
                f"{counted(n_samples, 'sample')}; give one for each, in the order of the listing"
            )

    def start(self, epoch: int, position: int, n_samples: int) -> EpochStart:
        """Return the start of a pass; `n_samples` is used only with a sampler. Raises as `SamplerDraws.draw`.

        A sampler's numbers count selected samples; they are converted to numbers in the whole listing.
        """
        numbers = None if self._sampler is None else self._sampler.draw(epoch, position, self.n_selected or n_samples)
        if numbers is not None and self._selected is not None:
            numbers = np.flatnonzero(self._selected)[numbers]
        return EpochStart(epoch, position, *self._place, numbers, next(self._passes))

    def resume(self, state: LoaderState) -> bool:
        """Continue from a loaded state of the same sampling. Return True if the state changes `sampling`."""
        if self._sampler is not None:
            self._sampler.expect(state.sampler)
        if not isinstance(self.sampling, Mixed) or state.block in (None, self.sampling.block):
            return False
        self.sampling = replace(self.sampling, block=state.block or 1)
        return True

    def state(self, epoch: int) -> dict[str, Any]:
        """Return the entries that describe the sampling in a state of `epoch`."""
        entries: dict[str, Any] = {}
        sampling = self.sampling
        if isinstance(sampling, Weighted | Mixed) or (isinstance(sampling, Stretched) and self._epoch_size):
            entries["epoch_size"] = sampling.epoch_size
        if self._mixture is not None and isinstance(sampling, Mixed):
            entries["mixture"] = ", ".join(f"{name}: {share!r}" for name, share in self._mixture.shares.items())
            entries["block"] = sampling.block
        if self._weights_name is not None:
            entries["weights"] = self._weights_name
        if self._sampler is not None:
            entries["sampler"] = self._sampler.state(epoch)
        if self._selected is not None:
            entries["selection"] = _digest("samples", np.packbits(self._selected).tobytes())
        return entries


class SamplerDraws:
    """Draw a user's sampler once per epoch, and check its order against a loaded state.

    Raises:
        TypeError, ValueError: the sampler cannot be iterated repeatedly, or divides the samples among ranks.
    """

    def __init__(self, sampler: Iterable[int]) -> None:
        if not isinstance(sampler, Iterable):
            raise TypeError(f"sampler={sampler!r} must be an iterable of sample numbers, such as a torch Sampler")
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"sampler={sampler!r} can be iterated only once, but each epoch needs a new order; give a torch "
                "Sampler, a list, or an object whose __iter__ starts over"
            )
        if getattr(sampler, "num_replicas", 1) != 1:
            raise ValueError(
                f"sampler={sampler!r} names the samples of one rank, but the loader itself divides the samples "
                "among ranks; make the sampler with num_replicas=1 and rank=0, or leave it out"
            )
        self._sampler = sampler
        self._numbers: NDArray[np.int64] | None = None
        self._name: str | None = None  # digest of `_numbers`, once a state needs it
        self._epoch = -1
        self._expected: str | None = None

    def __len__(self) -> int:
        """Return how many samples an epoch has. Raises TypeError if the sampler has no length."""
        if not isinstance(self._sampler, Sized):
            raise TypeError(
                "the sampler has no len(), so the number of batches is not known before an epoch; give it a __len__"
            )
        return len(self._sampler)

    def expect(self, state: str | None) -> None:
        """Require a resumed epoch to have the order that a loaded state names."""
        self._numbers = None
        self._expected = state

    def draw(self, epoch: int, position: int, n_samples: int) -> NDArray[np.int64]:
        """Return an epoch's sample numbers, int64[M]. A continued epoch is not drawn again.

        Raises:
            TypeError, ValueError: the sampler yields something other than sample numbers.
            LoaderStateError: the sampler's order differs from that of the loaded state.
        """
        if position and self._numbers is not None and self._epoch == epoch:
            return self._numbers
        expected = self._expected if position and self._expected != _UNDRAWN else None
        for _ in range(1 if expected is None else epoch + 1):  # each draw may advance the sampler's generator
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            try:
                numbers = np.fromiter(map(operator.index, self._sampler), np.int64)
            except TypeError as error:
                raise TypeError(
                    f"the sampler gave something other than sample numbers ({error}); instead of a batch sampler "
                    "give its sampler, and batch_size"
                ) from error
            if expected is None or expected == _digest("order", numbers.data):
                break
        else:
            raise LoaderStateError(
                "the sampler's order differs from that of the saved state: give it a generator with a fixed seed "
                "(torch.Generator().manual_seed(...)), or use shuffle=True or weights=, which can be resumed anywhere"
            )
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= n_samples):
            wrong = numbers[(numbers < 0) | (numbers >= n_samples)][0]
            raise ValueError(f"the sampler gave {wrong}, but the dataset has samples 0 to {n_samples - 1}")
        self._numbers, self._epoch, self._name, self._expected = numbers, epoch, None, None
        return numbers

    def state(self, epoch: int) -> str:
        """Return a name by which a state recognizes the epoch's order."""
        if self._numbers is None or self._epoch != epoch:
            return self._expected or _UNDRAWN
        self._name = self._name or _digest("order", self._numbers.data)
        return self._name


def _checked_weights(weights: Weights | None) -> _Checked | None:
    if weights is None or (isinstance(weights, str) and weights == "balanced"):
        return weights
    if isinstance(weights, str):
        raise ValueError(f"weights={weights!r} must be {_WEIGHTS_FORMS}")
    checked: _Checked
    if isinstance(weights, Mapping):
        for label, weight in weights.items():
            if isinstance(label, bool) or not isinstance(label, int | np.integer):
                raise TypeError(
                    f"weights has {label!r}; give labels, which are whole numbers: the class's index in loader.classes"
                )
            if isinstance(weight, bool) or not isinstance(weight, int | float | np.number):
                raise TypeError(f"weights has {weight!r} for {label!r}; it must be a number")
        checked = {int(label): float(weight) for label, weight in weights.items()}
        values = np.array(list(checked.values()))
    else:
        try:
            checked = values = np.asarray(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"weights is of type {type(weights).__name__}, but must be {_WEIGHTS_FORMS}") from error
        if values.ndim != 1:
            raise ValueError(f"weights has the shape {values.shape}, but must be {_WEIGHTS_FORMS}")
    wrong = values[~np.isfinite(values) | (values < 0)]
    if len(wrong):
        raise ValueError(f"weights has {wrong[0]}; weights must be finite and not negative")
    if not values.any():
        raise ValueError(_ALL_ZERO)
    return checked


def _label_weights(weights: str | Mapping[int, float], labels: Labels, existing: Sequence[int]) -> NDArray[np.float64]:
    """Return the weight of a sample, float64[K], for each label that the selection has.

    A mapping can also have weights for `existing` labels of the dataset that no selected sample has.
    """
    counts = group_sizes(labels.number, len(labels.values))
    if len(counts) == 0:
        raise ValueError("weights by label: the dataset has no samples")
    if isinstance(weights, str):
        return 1.0 / counts
    shown = ", ".join(map(str, existing[:_LABELS_SHOWN])) + (", ..." if len(existing) > _LABELS_SHOWN else "")
    for label in weights:
        if label not in existing:
            raise ValueError(f"weights has the label {label}, which no sample has; the labels are {shown}")
    for label in labels.values:
        if label not in weights:
            raise ValueError(f"weights lacks the label {label}; give a weight, or 0, for each of the labels {shown}")
    of_labels = np.array([weights[label] for label in labels.values])
    if not of_labels.any():
        raise ValueError(_ALL_ZERO)
    return of_labels


def _name_of(weights: _Checked) -> str:
    """Return a short name by which a state recognizes weights."""
    if isinstance(weights, str):
        return weights
    if isinstance(weights, Mapping):
        return _digest("labels", repr(sorted(weights.items())).encode())
    return _digest("samples", weights.astype("<f8").tobytes())


def _digest(kind: str, content: bytes | memoryview) -> str:
    return f"{kind}:{hashlib.blake2b(content, digest_size=16).hexdigest()}"
