"""Save and check the position to resume from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from streamload.errors import LoaderStateError
from streamload.order.options import MAX_LANES, MAX_SAMPLES

_KIND = "streamload"
_FORMAT = 1
_TYPES: dict[str, type] = {"int": int, "bool": bool, "str": str}
_LEAST = dict.fromkeys(("lanes", "block", "epoch_size"), 1)
_MOST = {"lanes": MAX_LANES, **dict.fromkeys(("position", "window", "epoch_size", "block"), MAX_SAMPLES)}
_REMEDY = "pass what state_dict() returned, unchanged, or start without a state"


@dataclass(frozen=True, slots=True)
class LoaderState:
    """A run's position, and the order that it reads. `from_json` checks values against the annotations.

    Attributes:
        position: the number of delivered samples of the epoch's order, over all ranks.
        window: the shuffle's window in samples.
        fingerprint: the dataset's digest, from `fingerprint`.
        epoch_size: samples per epoch, if the loader has an `epoch_size`, weights, or a mixture with a selection.
        weights: a name or digest of the weights.
        sampler: "order:" and the digest of a sampler's order, or that it is not drawn yet.
        mixture: the names and shares of its datasets.
        block: samples per block of a mixture.
        selection: a digest of the selected samples.
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
        """Return the state as a flat dictionary of JSON types; None is left out."""
        held = {name: value for name, value in asdict(self).items() if value is not None}
        return {"kind": _KIND, "format": _FORMAT, **held}

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> LoaderState:
        """Create a state from a dictionary that `to_json` returned; unknown names are ignored.

        Raises:
            LoaderStateError: `mapping` is not a state, its format differs, or a value is missing or invalid.
        """
        if not isinstance(mapping, Mapping) or mapping.get("kind") != _KIND:
            raise LoaderStateError(f"this is not a state of a StreamLoader; {_REMEDY}")
        if mapping.get("format") != _FORMAT:
            raise LoaderStateError(
                f"the state has format {mapping.get('format')!r}, but this version of streamload reads format "
                f"{_FORMAT}; resume with the version that saved it, or start without a state"
            )
        values = {}
        for field in fields(cls):
            kind, _, optional = str(field.type).partition(" | ")
            if field.name in mapping or not optional:
                values[field.name] = _checked(mapping, field.name, _TYPES[kind])
        return cls(**values)


def _checked(mapping: Mapping[str, Any], name: str, expected: type) -> Any:
    if name not in mapping:
        raise LoaderStateError(f"the state lacks {name!r}; {_REMEDY}")
    value = mapping[name]
    if type(value) is not expected:
        raise LoaderStateError(
            f"the state's {name!r} is {value!r}, of type {type(value).__name__}, but must be of type "
            f"{expected.__name__}; {_REMEDY}"
        )
    if isinstance(value, int) and not _LEAST.get(name, 0) <= value <= _MOST.get(name, value):
        limits = f"at least {_LEAST.get(name, 0)}" + (f" and at most {_MOST[name]:,}" if name in _MOST else "")
        raise LoaderStateError(f"the state's {name!r} must be {limits}; {_REMEDY}")
    return value


def fingerprint(names_and_bytes: Iterable[tuple[str, int]]) -> str:
    """Return a digest of a dataset: BLAKE2b (16 bytes, as hex) of its shards' names without folders, and their sizes.

    The shards are in the order of the listing.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, size_bytes in names_and_bytes:
        encoded = name.encode("utf-8", "surrogateescape")
        digest.update(b"%d:%s:%d;" % (len(encoded), encoded, size_bytes))
    return digest.hexdigest()


def check(saved: LoaderState, now: LoaderState, *, lanes: int | None) -> None:
    """Raise an error unless a loader reads the same order as a saved state.

    Args:
        saved: the state to resume from.
        now: the loader's state. Windows are compared only if one state shuffles. Both states must have a sampler, or
            neither; a sampler's order is compared later.
        lanes: the loader's argument; None accepts any number.

    Raises:
        LoaderStateError: the orders differ; the message lists all differences, and what to do.
    """
    names = ["seed", "shuffle", "window", "epoch_size", "weights", "mixture", "selection"]
    if not (saved.shuffle or now.shuffle):
        names.remove("window")
    compared = [(name, getattr(saved, name), getattr(now, name)) for name in names]
    kinds = [state.sampler and state.sampler.split(":")[0] for state in (saved, now)]
    compared.append(("sampler", kinds[0], kinds[1]))
    if lanes is not None:
        compared.append(("lanes", saved.lanes, lanes))
    differences = [f"{name} was {before!r} and is {after!r} now" for name, before, after in compared if before != after]
    remedies = ["make the StreamLoader with the saved values"] if differences else []
    if saved.fingerprint != now.fingerprint:
        differences.append("the dataset's shards had other names, sizes or order")
        remedies.insert(0, "list the same shards in the same order as when the state was saved")
    if differences:
        raise LoaderStateError(
            f"the saved state belongs to another order: {'; '.join(differences)}. "
            f"To resume, {' and '.join(remedies)}; otherwise start without a state"
        )
