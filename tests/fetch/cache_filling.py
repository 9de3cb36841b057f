"""Reads shards through a disk cache as a fetcher would; run as a program, it is one process of a node.

    python cache_filling.py FOLDER CACHE_BYTES N_SHARDS SEED EPOCHS FETCH_LOG

Every part fetched is a line in the log. It exits with a message if any byte is wrong.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import zlib

import numpy as np

from streamload.fetch.cache.cached_shard import CachedShard
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.next_use import OrderNextUse, numbers_by_key
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.order.plan import OrderOptions
from streamload.order.sequence import shards_in_order

PART_BYTES = 4096
FILE_NAMES_AT = "streamload-shards"


def identity_of(number: int, n_parts: int = 8, etag: str = '"1"') -> ShardIdentity:
    """A shard that is a little shorter than its parts together."""
    return ShardIdentity(f"s3://bucket/train-{number:06d}.tar", etag, n_parts * PART_BYTES - 100)


def content(identity: ShardIdentity) -> bytes:
    seed = [*identity.url.encode(), *(identity.etag or "").encode()]
    return np.random.default_rng(seed).bytes(identity.bytes)


def file_of(identity: ShardIdentity) -> bytes:
    """What a whole file holds: the shard, and the checksums of its parts."""
    data = content(identity)
    parts = (part_of(data, part) for part in range(-(-len(data) // PART_BYTES)))
    return data + b"".join(zlib.crc32(part).to_bytes(4, "little") for part in parts)


def part_of(data: bytes, part: int) -> bytes:
    return data[part * PART_BYTES : (part + 1) * PART_BYTES]


async def fill(shard: CachedShard, identity: ShardIdentity, pause_s: float = 0.0, step: int = 1) -> list[int]:
    """Fetch whatever is not there, from the first or (step -1) the last part on; gives the parts fetched."""
    data = content(identity)
    fetched = []
    for part in range(-(-identity.bytes // PART_BYTES))[::step]:
        if await shard.claim(part):
            await asyncio.sleep(pause_s)
            piece = part_of(data, part)
            shard.write(part * PART_BYTES, piece[:1000])
            shard.write(part * PART_BYTES + 1000, piece[1000:])
            shard.finish(part, zlib.crc32(piece))
            fetched.append(part)
    return fetched


def read_through(cache: DiskCache, identity: ShardIdentity) -> int:
    """Open, fill, compare and close a shard; gives the number of parts fetched, all of them where it is not cached."""
    shard = cache.open(identity)
    if shard is None:
        return -(-identity.bytes // PART_BYTES)
    try:
        fetched = asyncio.run(fill(shard, identity))
        assert os.pread(shard.descriptor, identity.bytes, 0) == content(identity)
        return len(fetched)
    finally:
        shard.close()


def cached_names(folder: str) -> set[str]:
    """The names of the files in a cache that are whole."""
    found = os.path.join(folder, FILE_NAMES_AT)
    return {name for name in os.listdir(found) if name not in ("lock", "partial")}


def partial_names(folder: str) -> set[str]:
    return set(os.listdir(os.path.join(folder, FILE_NAMES_AT, "partial")))


def cached_bytes(folder: str) -> int:
    top = os.path.join(folder, FILE_NAMES_AT)
    paths = [os.path.join(at, name) for at, _, names in os.walk(top) for name in names]
    return sum(os.stat(path).st_size for path in paths if not path.endswith((".state", "/lock")))


ORDER = OrderOptions(seed=7, shuffle=True, window=0, lanes=1, batch_size=1, drop_last=False, pad=True)


async def _epochs(cache: DiskCache, n_shards: int, generator: random.Random, epochs: int, log: int) -> None:
    identities = [identity_of(number) for number in range(n_shards)]
    numbers = numbers_by_key(identity.url for identity in identities)
    for epoch in range(epochs):
        cache.expect(OrderNextUse(numbers, ORDER, np.ones(n_shards, np.int64), epoch))
        for number in shards_in_order(ORDER, n_shards, epoch).tolist():
            shard = cache.open(identities[number])
            if shard is None:
                continue
            data = content(identities[number])
            for part in generator.sample(range(8), 8):
                if await shard.claim(part):
                    os.write(log, f"{number} {part}\n".encode())
                    await asyncio.sleep(0.001)
                    shard.write(part * PART_BYTES, part_of(data, part))
                    shard.finish(part, zlib.crc32(part_of(data, part)))
            if os.pread(shard.descriptor, shard_bytes := identities[number].bytes, 0) != data:
                sys.exit(f"wrong bytes in shard {number} of {shard_bytes} bytes")
            shard.close()


def main() -> None:
    folder, size, n_shards, seed, epochs, log_path = sys.argv[1:]
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    cache = DiskCache(folder, int(size), part_bytes=PART_BYTES)
    asyncio.run(_epochs(cache, int(n_shards), random.Random(seed), int(epochs), log))
    cache.close()


if __name__ == "__main__":
    main()
