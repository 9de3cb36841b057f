"""When each shard is needed next, from the order of this epoch and the following; names of cached files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from streamload.errors import without_secrets
from streamload.order.lanes import lane_bounds
from streamload.order.options import OrderOptions, samples_of_epoch
from streamload.order.runs import runs_of_epoch

_KEY_BYTES = 8
_DIGEST_BYTES = 16
_TAIL_LETTERS = 48
FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-.*")
"""The files of a cache, temporary ones included; all others in its folder are the user's."""


def url_key(url: str) -> str:
    """Return a digest of a URL, 16 hexadecimal digits, which is the same for all versions and signatures.

    It says which file may be evicted first, not what a file holds.
    """
    place = without_secrets(url).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(place, digest_size=_KEY_BYTES).hexdigest()


def key_in_name(name: str) -> str:
    """Return the `url_key` that a cached file's name begins with."""
    return name.partition("-")[0]


@dataclass(frozen=True)
class ShardIdentity:
    """One version of one shard.

    Attributes:
        url: where it is.
        etag: the storage's name for this version.
        bytes: its size.
    """

    url: str
    etag: str
    bytes: int

    @cached_property
    def file_name(self) -> str:
        """The name of its file in a cache: the URL's key, a digest of all three, and for people the shard's name.

        Only the last component of the URL's path is readable, because queries may hold secrets. The signature is not in
        the digest: if it chooses among objects, the ETag tells them apart.
        """
        identity = repr((without_secrets(self.url), self.etag, self.bytes)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).hexdigest()
        last = urlsplit(self.url).path.rpartition("/")[2]
        tail = re.sub(r"[^A-Za-z0-9._]", "_", last)[-_TAIL_LETTERS:]
        return f"{url_key(self.url)}-{digest}-{tail}"


_EPOCHS_AHEAD = 16


def numbers_by_key(urls: Iterable[str]) -> dict[str, int]:
    """Return the number in the listing of each shard, by its `url_key`."""
    return {url_key(url): number for number, url in enumerate(urls)}


class OrderNextUse:
    """The next uses that follow from the order of one epoch and of the next 16.

    A use is counted in outputs of its lane, since all lanes move on at one rate. A shard on the border of lanes has a
    use in each of them. Unknown counts are taken for the mean of the known ones.

    Args:
        numbers: the shards' numbers in the listing, see `numbers_by_key`.
        options: of the order.
        counts: int64[n_shards], the samples of each shard, -1 where unknown.
        epoch: the present one.
        start: the epoch's position to start from, over all lanes, as a state holds it.
    """

    def __init__(
        self,
        numbers: Mapping[str, int],
        options: OrderOptions,
        counts: NDArray[np.int64],
        epoch: int,
        *,
        start: int = 0,
    ) -> None:
        self._numbers = numbers
        filled = _filled(counts)
        edges, uses = _uses(options, filled, epoch)
        self._edges: list[int] = edges.tolist()
        self._uses: list[float] = uses.tolist()
        self._later: list[float] = _uses_in_later_epochs(options, filled, epoch).tolist()
        self._begun: set[int] = set()
        self._passed = start / options.lanes

    def advance(self, position: int | float) -> None:
        """Note that every lane has come to this number of its outputs: uses before it are past."""
        self._passed = max(self._passed, position)

    def begin(self, name: str, /) -> None:
        """Begin the use of a shard that is nearest to the present position."""
        shard = self._numbers.get(key_in_name(name))
        if shard is None:
            return
        waiting = [use for use in range(self._edges[shard], self._edges[shard + 1]) if use not in self._begun]
        if waiting:
            self._begun.add(min(waiting, key=lambda use: abs(self._uses[use] - self._passed)))

    def position(self, name: str, /) -> float:
        """Return how many outputs of a lane, from this epoch's start, come before the shard is needed next."""
        shard = self._numbers.get(key_in_name(name))
        if shard is None:
            return float("inf")
        for use in range(self._edges[shard], self._edges[shard + 1]):
            if self._uses[use] >= self._passed and use not in self._begun:
                return self._uses[use]
        return self._later[shard]


def _filled(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    known = counts >= 0
    mean = max(1, round(float(counts[known].mean()))) if known.any() else 1
    return np.where(known, counts, mean)


def _uses(
    options: OrderOptions, counts: NDArray[np.int64], epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return edges and uses of an epoch, ascending for each shard: shard s has those of `edges[s]:edges[s + 1]`."""
    lines = runs_of_epoch(options, counts, epoch)
    total = sum(int(lengths.sum()) for _, lengths in lines)
    nothing = np.empty(0, np.int64), np.empty(0, np.float64)
    uses = [nothing, *(_uses_of_sequence(options, order, lengths, total) for order, lengths in lines)]
    shards, numbers = (np.concatenate(column) for column in zip(*uses, strict=True))
    by_shard = np.lexsort((numbers, shards))
    edges = np.searchsorted(shards[by_shard], np.arange(len(counts) + 1))
    return edges, numbers[by_shard]


def _uses_of_sequence(
    options: OrderOptions,
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    total: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return shards and their uses on one line of an epoch, in outputs of the epoch's lanes."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    bounds = lane_bounds(int(lengths.sum()), options.lanes)
    first = np.searchsorted(bounds, starts, side="right") - 1
    n_lanes = np.where(ends > starts, np.searchsorted(bounds, ends, side="left") - first, 0)
    shards = np.repeat(order, n_lanes)
    lane = np.repeat(first, n_lanes) + _counted_up(n_lanes)
    numbers = _first_output_index(np.maximum(np.repeat(starts, n_lanes) - bounds[lane], 0), options.radius)
    return shards, numbers * (total / max(1, int(lengths.sum())))


def _counted_up(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, ... anew for each of the lengths."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) - np.repeat(ends - lengths, lengths)


def _first_output_index(positions: NDArray[np.int64], window: int) -> NDArray[np.float64]:
    """Return about how many outputs of a lane come before the samples from each position on."""
    exact = positions.astype(np.float64)
    if not window:
        return exact
    # Of the positions below x, about x**2 / 2w have a key below x while x < w, and x - w/2 from there on.
    return np.where(exact < window, exact**2 / (2 * window), exact - window / 2)


def _uses_in_later_epochs(options: OrderOptions, counts: NDArray[np.int64], epoch: int) -> NDArray[np.float64]:
    """Return the first use of each shard after this epoch, float64[n_shards]; infinity if there is none in sight."""
    lane_length = -int(-samples_of_epoch(options, int(counts.sum())) // options.lanes)
    found = np.full(len(counts), np.inf)
    for ahead in range(1, _EPOCHS_AHEAD + 1):
        first = _first_uses(*_uses(options, counts, epoch + ahead)) + ahead * lane_length
        found = np.minimum(found, first)
        if np.isfinite(found[counts > 0]).all():
            break
    return found


def _first_uses(edges: NDArray[np.int64], uses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the first use of each shard; infinity if it has none."""
    padded = np.append(uses, np.inf)
    return np.where(edges[1:] > edges[:-1], padded[edges[:-1]], np.inf)
