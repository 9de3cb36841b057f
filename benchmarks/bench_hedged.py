"""What a second request beside a stalled one saves: epochs over a server of which some answers sleep, with and without.

`python benchmarks/bench_hedged.py`. The loader runs without workers, so that second requests can be switched off here.
"""

from __future__ import annotations

import io
import random
import statistics
import sys
import tarfile
import time
from pathlib import Path
from unittest import mock

from streamload import StreamLoader
from streamload.fetch.hedged_requests import HedgedRequests

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from servers.faults import FaultServer, Script

SHARE, STALL_S, FIRST_BYTE_S, BYTES_PER_S = 0.01, 2.0, 0.02, 100e6
SHARD_SAMPLES, SAMPLE_BYTES = 64, 1 << 20
ROUNDS = 7


def shard() -> bytes:
    """A shard of 64 samples of 1 MiB."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for number in range(SHARD_SAMPLES):
            member = tarfile.TarInfo(f"{number:06d}.bin")
            member.size = SAMPLE_BYTES
            archive.addfile(member, io.BytesIO(random.Random(number).randbytes(SAMPLE_BYTES)))
    return made.getvalue()


def epoch_s(urls: list[str]) -> float:
    """The time of one epoch, from making the loader on."""
    began_s = time.perf_counter()
    with StreamLoader(urls, 8, fields=("bin",), decode=False, num_workers=0) as loader:
        batches = sum(1 for _ in loader)
    assert batches == len(urls) * SHARD_SAMPLES // 8
    return time.perf_counter() - began_s


def main() -> None:
    """Print medians of alternating epochs, for a small dataset and a larger one."""
    print(f"{SHARE:.0%} of answers come after {STALL_S:g} s, the others after {FIRST_BYTE_S * 1000:.0f} ms")
    for shards in (4, 16):
        first, *others = [f"bucket/{number:06d}.tar" for number in range(shards)]
        with FaultServer({first: shard()}, aliases=dict.fromkeys(others, first)) as server:
            urls = [f"{server.url}/{name}" for name in (first, *others)]
            times: dict[str, list[float]] = {"none stalls": [], "hedged": [], "one request": []}
            for seed in range(ROUNDS):
                clean = Script(first_byte_s=FIRST_BYTE_S, bytes_per_s=BYTES_PER_S)
                stalls = Script(seed, FIRST_BYTE_S, BYTES_PER_S, sleep_share=SHARE, sleep_s=STALL_S)
                for kind, script in (("none stalls", clean), ("hedged", stalls), ("one request", stalls)):
                    server.play(script)
                    allowed = HedgedRequests.allows if kind == "hedged" else lambda _: False
                    with mock.patch.object(HedgedRequests, "allows", allowed):
                        times[kind].append(epoch_s(urls))
        shown = ", ".join(f"{kind} {statistics.median(found):.2f} s" for kind, found in times.items())
        gains = sorted(one / two for one, two in zip(times["one request"], times["hedged"], strict=True))
        size = shards * SHARD_SAMPLES * SAMPLE_BYTES / 1e6
        print(f"{size:,.0f} MB: {shown}; gain {statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})")


if __name__ == "__main__":
    main()
