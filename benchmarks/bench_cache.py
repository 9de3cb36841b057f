"""How often does the disk cache hit? Room for half of the data, and a new permutation of the shards each epoch.

Four columns for each set of shards: streamload's cache, by simulation; an LRU cache of the same size; the bound that
no cache of this size can exceed, which knows the whole future (Belady's rule with bypass, where a cache may also hold
any part of a shard); and streamload's cache itself, on a disk. Rates are of bytes, from the second epoch on: the first
has nothing to hit.

Where one machine reads all shards, each is used once an epoch, so no cache can hit more bytes than it has room for at
the epoch's start: the bound is the share of the data that fits.
Run it with

    python benchmarks/bench_cache.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from streamload.fetch.disk_cache import DiskCache, ShardIdentity, cached_bytes
from streamload.order.options import OrderOptions
from streamload.order.runs import shards_in_order

ORDER = OrderOptions(seed=0, shuffle=True, window=0, lanes=1, batch_size=1, drop_last=False, pad=False)


@dataclass(frozen=True)
class Shards:
    """Shards to read: a name for the table, and the size of each in bytes."""

    name: str
    sizes: tuple[int, ...]

    @property
    def room(self) -> int:
        """Half of the data, but room for the largest."""
        return max(sum(self.sizes) // 2, *self.sizes)

    def order(self, epoch: int) -> list[int]:
        """The shards in the order of an epoch."""
        return shards_in_order(ORDER, len(self.sizes), epoch).tolist()

    def identity(self, shard: int) -> ShardIdentity:
        return ShardIdentity(f"s3://bucket/{shard:06d}.tar", "etag", self.sizes[shard])


def equal(number: int, size: int) -> Shards:
    return Shards(f"{number} equal", (size,) * number)


def uneven(number: int, size: int, seed: int = 1) -> Shards:
    """Sizes spread log-normally: of the shards, the largest is some twenty times the smallest."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 0.6, number)
    return Shards(f"{number} uneven", tuple(int(size * value) + 1 for value in drawn))


def simulate_kept(shards: Shards, n_epochs: int) -> Iterator[int]:
    """streamload's cache, which keeps what it has taken: the bytes hit in each epoch."""
    kept: set[int] = set()
    free = shards.room
    for epoch in range(n_epochs):
        hit = 0
        for shard in shards.order(epoch):
            if shard in kept:
                hit += shards.sizes[shard]
            elif shards.sizes[shard] <= free:
                kept.add(shard)
                free -= shards.sizes[shard]
        yield hit


def simulate_lru(shards: Shards, n_epochs: int) -> Iterator[int]:
    """A cache that takes everything in and drops what was used least recently: the bytes hit in each epoch."""
    kept: OrderedDict[int, int] = OrderedDict()
    free = shards.room
    for epoch in range(n_epochs):
        hit = 0
        for shard in shards.order(epoch):
            if shard in kept:
                hit += kept[shard]
                kept.move_to_end(shard)
                continue
            kept[shard] = shards.sizes[shard]
            free -= shards.sizes[shard]
            while free < 0:
                free += kept.popitem(last=False)[1]
        yield hit


def offline_bound(shards: Shards, n_epochs: int) -> Iterator[int]:
    """What no cache of this size can exceed: the bytes hit in each epoch.

    A cache of whole shards is also a cache of bytes, all bytes of a shard being used one after the other. For bytes,
    which are all of one size, keeping those that are needed soonest is the optimum over the whole future, and what is
    kept of a shard may then be any part of it.
    """
    kept: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in shards.sizes]
    orders = [shards.order(epoch) for epoch in range(n_epochs)]
    for place, shard in enumerate(itertools.chain.from_iterable(orders)):
        uses[shard].append(place)
    upcoming = [iter([*places, math.inf]) for places in uses]
    next_use = [next(places) for places in upcoming]
    for order in orders:
        hit = 0
        for shard in order:
            hit += kept.get(shard, 0)
            next_use[shard] = next(upcoming[shard])
            kept[shard] = shards.sizes[shard]
            over = sum(kept.values()) - shards.room
            for furthest in sorted(kept, key=next_use.__getitem__, reverse=True):
                dropped = min(kept[furthest], max(over, 0))
                kept[furthest] -= dropped
                over -= dropped
        yield hit


def measure(shards: Shards, n_epochs: int) -> Iterator[int]:
    """The same read through a real cache in a folder of its own: the bytes hit in each epoch."""
    part_bytes = 64 << 10
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as folder:
        checksums = sum(cached_bytes(size, part_bytes) - size for size in shards.sizes)  # not simulated
        urls = [shards.identity(shard).url for shard in range(len(shards.sizes))]
        cache = DiskCache(folder, shards.room + checksums, part_bytes=part_bytes, urls=urls)
        for epoch in range(n_epochs):
            yield sum(_read(cache, shards.identity(shard), part_bytes) for shard in shards.order(epoch))


def _read(cache: DiskCache, identity: ShardIdentity, part_bytes: int) -> int:
    """Read a shard, filling the cache; gives the bytes that were there. Its bytes are its number, over and over."""
    data = (int(identity.url[-10:-4]).to_bytes(4, "big") * (identity.bytes // 4 + 1))[: identity.bytes]
    file = cache.open(identity)
    if file is None:
        return 0
    hit = 0 if file.missing else identity.bytes
    if file.missing:
        for start in range(0, identity.bytes, part_bytes):
            cache.write(file, start, [data[start : start + part_bytes]])
    if os.pread(file.descriptor, identity.bytes, 0) != data:
        raise ValueError(f"{identity.url}: wrong bytes")
    file.close()
    return hit


Cache = Callable[[Shards, int], Iterator[int]]
CACHES: dict[str, Cache] = {
    "streamload, simulated": simulate_kept,
    "LRU": simulate_lru,
    "offline bound": offline_bound,
    "streamload, on disk": measure,
}


def hit_rate(cache: Cache, shards: Shards, n_epochs: int) -> float:
    """The share of bytes hit in all epochs but the first."""
    read = sum(shards.sizes[shard] for epoch in range(1, n_epochs) for shard in shards.order(epoch))
    return sum(list(cache(shards, n_epochs))[1:]) / read


def table(kinds: list[Shards], n_epochs: int, *, on_disk: frozenset[str]) -> str:
    lines = [f"| shards | {' | '.join(CACHES)} |", "|---" * (1 + len(CACHES)) + "|"]
    for shards in kinds:
        cells = [
            f"{hit_rate(cache, shards, n_epochs):.1%}" if cache is not measure or shards.name in on_disk else "-"
            for cache in CACHES.values()
        ]
        lines.append(f"| {shards.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    n_epochs = parser.parse_args().epochs
    small = [equal(64, 256 << 10), uneven(64, 256 << 10)]
    kinds = [equal(200, 1 << 20), uneven(200, 1 << 20), *small]
    print(table(kinds, n_epochs, on_disk=frozenset(shards.name for shards in small)))


if __name__ == "__main__":
    main()
