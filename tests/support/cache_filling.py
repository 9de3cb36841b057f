"""Reads shards through a disk cache as a fetcher would; run as a program, it is one process of a node.

    python cache_filling.py FOLDER CACHE_BYTES N_SHARDS SEED EPOCHS FETCH_LOG

Every shard fetched is a line in the log. It exits with a message if any byte is wrong.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib

import numpy as np

from streamload.fetch.disk_cache import CacheFile, DiskCache, ShardIdentity
from streamload.order.options import OrderOptions
from streamload.order.runs import shards_in_order

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


def fill(
    cache: DiskCache, file: CacheFile, identity: ShardIdentity, parts: list[int] | None = None, pause_s: float = 0.0
) -> None:
    """Write parts, each in two pieces; by default all that are missing."""
    data = content(identity)
    for part in sorted(file.missing) if parts is None else parts:
        piece = part_of(data, part)
        cache.write(file, part * PART_BYTES, [piece[:1000]])
        time.sleep(pause_s)
        cache.write(file, part * PART_BYTES + 1000, [piece[1000:]])


def read_through(cache: DiskCache, identity: ShardIdentity) -> bool:
    """Open, fill, compare and close a shard; whether it was in the cache."""
    file = cache.open(identity)
    if file is None:
        return False
    hit = not file.missing
    try:
        if not hit:
            fill(cache, file, identity)
        assert os.pread(file.descriptor, identity.bytes, 0) == content(identity)
        return hit
    finally:
        file.close()


def cached_names(folder: str) -> set[str]:
    """The names of the files in a cache that are whole."""
    found = os.path.join(folder, FILE_NAMES_AT)
    return {name for name in os.listdir(found) if name not in ("lock", "partial")}


def partial_names(folder: str) -> set[str]:
    return set(os.listdir(os.path.join(folder, FILE_NAMES_AT, "partial")))


ORDER = OrderOptions(seed=7, shuffle=True, window=0, lanes=1, batch_size=1, drop_last=False, pad=True)


def main() -> None:
    folder, size, n_shards, seed, epochs, log_path = sys.argv[1:]
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    cache, generator = DiskCache(folder, int(size), part_bytes=PART_BYTES), random.Random(seed)
    identities = [identity_of(number) for number in range(int(n_shards))]
    for epoch in range(int(epochs)):
        for number in shards_in_order(ORDER, len(identities), epoch).tolist():
            file = cache.open(identities[number])
            if file is None:
                continue
            if file.missing:
                os.write(log, f"{number}\n".encode())
                fill(cache, file, identities[number], generator.sample(range(8), 8), 0.001)
            if os.pread(file.descriptor, identities[number].bytes, 0) != content(identities[number]):
                sys.exit(f"wrong bytes in shard {number}")
            file.close()


if __name__ == "__main__":
    main()
