"""The position to resume from: what a saved state holds, and whether it belongs to a loader."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from streamload.errors import LoaderStateError
from streamload.order.options import MAX_LANES, MAX_SAMPLES

_KIND = "streamload"
_FORMAT = 1
_TYPES: dict[str, type] = {
    "seed": int,
    "epoch": int,
    "position": int,
    "lanes": int,
    "window": int,
    "shuffle": bool,
    "fingerprint": str,
}
_OPTIONAL: dict[str, type] = {
    "epoch_size": int,
    "weights": str,
    "sampler": str,
    "mixture": str,
    "block": int,
    "selection": str,
}
_MOST = {"lanes": MAX_LANES, **dict.fromkeys(("position", "window", "epoch_size", "block"), MAX_SAMPLES)}
_WHAT_TO_DO = "pass what state_dict() returned, unchanged, or start without a state"


@dataclass(frozen=True, slots=True)
class LoaderState:
    """How far a run has got, and the order that it reads.

    Attributes:
        seed: names the order.
        epoch: the epoch that was being read.
        position: how many samples of the epoch's order were delivered, over all ranks.
        lanes: the number of lanes of the order.
        window: the shuffle's window in samples.
        shuffle: whether the order is shuffled.
        fingerprint: of the dataset, see `fingerprint`.
        epoch_size: samples of an epoch, where the loader was given a size or weights.
        weights: which weights the samples are drawn by, if any.
        sampler: the digest of the epoch's order where a sampler has named it.
        mixture: the names and weights of the datasets, if there are several.
        block: in how many samples a mixture is exact.
        selection: a digest of which samples take part, where some do not.
    """

    seed: int
    epoch: int
    position: int
    lanes: int
    window: int
    shuffle: bool
    fingerprint: str
    epoch_size: int | None = None
    weights: str | None = None
    sampler: str | None = None
    mixture: str | None = None
    block: int | None = None
    selection: str | None = None

    def to_json(self) -> dict[str, int | bool | str]:
        """The state as a flat dictionary of JSON's plain types; what is None is left out."""
        held = {name: value for name, value in asdict(self).items() if value is not None}
        return {"kind": _KIND, "format": _FORMAT, **held}

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> LoaderState:
        """Read what `to_json` wrote; names that it does not know are skipped.

        Raises:
            LoaderStateError: it is no state, of another format, or a value is missing or cannot be right; the
                message says which.
        """
        if not isinstance(mapping, Mapping) or mapping.get("kind") != _KIND:
            raise LoaderStateError(f"this is not a state of a StreamLoader; {_WHAT_TO_DO}")
        if mapping.get("format") != _FORMAT:
            raise LoaderStateError(
                f"the state has format {mapping.get('format')!r} and this version of streamload reads format "
                f"{_FORMAT}; resume with the version that saved it, or start without a state"
            )
        found = {name: _checked(mapping, name, expected) for name, expected in _TYPES.items()}
        found |= {name: _checked(mapping, name, kind) for name, kind in _OPTIONAL.items() if name in mapping}
        for name in ("lanes", "block", "epoch_size"):
            if found.get(name) == 0:
                raise LoaderStateError(f"the state's {name!r} is 0 and must be at least 1; {_WHAT_TO_DO}")
        return cls(**found)


def _checked(mapping: Mapping[str, Any], name: str, expected: type) -> Any:
    """The value of a name, if it is there, of the expected type (a bool is no int), not negative and not absurd."""
    if name not in mapping:
        raise LoaderStateError(f"the state lacks {name!r}; {_WHAT_TO_DO}")
    value = mapping[name]
    if type(value) is not expected:
        raise LoaderStateError(
            f"the state's {name!r} is {value!r}, of type {type(value).__name__}, and must be of type "
            f"{expected.__name__}; {_WHAT_TO_DO}"
        )
    if isinstance(value, int) and value < 0:
        raise LoaderStateError(f"the state's {name!r} is {value} and cannot be negative; {_WHAT_TO_DO}")
    if isinstance(value, int) and value > _MOST.get(name, value):
        raise LoaderStateError(f"the state's {name!r} is more than {_MOST[name]:,}, which it cannot be; {_WHAT_TO_DO}")
    return value


def fingerprint(names_and_bytes: Iterable[tuple[str, int]]) -> str:
    """A short name for a dataset: the BLAKE2b digest (16 bytes, as hex) of its shards' base names and sizes.

    Args:
        names_and_bytes: for each shard, in the order of the listing, its name without folders and its size in bytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, size_bytes in names_and_bytes:
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%s:%d;" % (len(encoded), encoded, size_bytes))
    return digest.hexdigest()


def check(
    state: LoaderState,
    *,
    seed: int,
    shuffle: bool,
    window: int,
    lanes: int | None,
    fingerprint: str,
    sampling: Mapping[str, int | str] | None = None,
) -> None:
    """Make sure that a loader reads in the order that a state was saved in.

    The window is compared only where it has an effect, that is with shuffle; lanes only where the loader was given
    a number (None takes over the state's). Of `sampling`, which holds what the loader has of the state's values that
    may be None, the first word of `sampler` is compared: the rest of it is the order's digest.

    Raises:
        LoaderStateError: something differs; the message lists all that does, with both values, and what to do.
    """
    compared: list[tuple[str, object, object]] = [
        ("seed", state.seed, seed),
        ("shuffle", state.shuffle, shuffle),
    ]
    if state.shuffle or shuffle:
        compared.append(("window", state.window, window))
    if lanes is not None:
        compared.append(("lanes", state.lanes, lanes))
    for name in ("epoch_size", "weights", "mixture", "selection"):
        compared.append((name, getattr(state, name), (sampling or {}).get(name)))
    sampler = (sampling or {}).get("sampler")
    compared.append(("sampler", _first_word(state.sampler), _first_word(sampler)))
    differences = [
        f"{name} was {saved!r} and is {current!r} now" for name, saved, current in compared if saved != current
    ]
    if state.fingerprint != fingerprint:
        differences.append("the dataset had other shards, by their names, sizes or order")
    if not differences:
        return
    remedies = []
    if state.fingerprint != fingerprint:
        remedies.append("list the same shards in the same order as when the state was saved")
    if len(differences) > (state.fingerprint != fingerprint):
        remedies.append("make the StreamLoader with the saved values")
    raise LoaderStateError(
        f"the saved state belongs to another order: {'; '.join(differences)}. "
        f"To resume, {' and '.join(remedies)}; otherwise start without a state"
    )


def _first_word(value: object) -> str | None:
    return None if value is None else str(value).split(":")[0]
