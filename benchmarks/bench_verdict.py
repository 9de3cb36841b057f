"""Is the verdict of `loader.statistics()` right, and does doing what it says gain what it said?

Eight runs, each limited by one thing on purpose. Each is made as it is, then once more with the remedy that the verdict
of the first names; both are processes of their own, and the rate counts from their first batch on. The rate that the
remedy should reach is the first one times `limit.gain`.

    python benchmarks/bench_verdict.py --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from goals import Goal
from remote_bucket import bucket_of
from workloads import FOLDER

sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "tests"))  # the same server that the tests use

from servers.faults import Script

SAMPLES, PER_SHARD, SAMPLE_BYTES = 24_000, 100, 20_000
BATCH = 32
RUN_S = 5.0
STEP_S = 0.003
WITHIN = 1.5
DISK_BYTES_PER_S = 40_000_000
_BLKIO = Path("/sys/fs/cgroup/blkio")


def burn(seconds: float) -> None:
    """Use a processor for so long, whether others want it or not."""
    ends_s = time.thread_time() + seconds
    while time.thread_time() < ends_s:
        pass


def burning_decoder(data: bytes) -> np.ndarray[Any, Any]:
    """A decoder that takes 2 ms of a processor."""
    burn(0.002)
    return np.frombuffer(data, np.uint8)


def sleeping(value: Any) -> Any:
    """A transform that waits for something else, as for a database."""
    time.sleep(0.002)
    return value


def burning_collate(rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A collate_fn that takes 30 ms of a processor."""
    burn(0.03)
    return np.stack([value for value, _ in rows])


@dataclass(frozen=True)
class Scenario:
    """A run that one thing limits.

    Attributes:
        stage: which.
        options: of the loader.
        script: of the server that the shards come from; None reads them from the disk.
        step_s: what the loop sleeps for each batch.
        disk_bytes_per_s: the most that the disk gives; None as it is.
    """

    stage: str
    options: dict[str, Any]
    script: Script | None = None
    step_s: float = STEP_S
    disk_bytes_per_s: int | None = None


SCENARIOS = {
    "network rate": Scenario("network", {"num_workers": 1}, Script(first_byte_s=0.005, bytes_per_s=2e6)),
    "network latency": Scenario("latency", {"num_workers": 1}, Script(first_byte_s=1.0)),
    "throttling": Scenario(
        "throttling", {"num_workers": 1}, Script(first_byte_s=0.01, bytes_per_s=40e6, status_share=0.3)
    ),
    "decoding": Scenario("decode", {"num_workers": 1, "decode": {"bin": burning_decoder, "cls": int}}),
    "transform": Scenario("transform", {"num_workers": 1, "transform": {"cls": sleeping}}),
    "collating": Scenario("collate", {"num_workers": 1, "collate_fn": burning_collate}),
    "training step": Scenario("step", {"num_workers": 1}, step_s=0.02),
    "disk cache": Scenario("disk", {"num_workers": 1}, disk_bytes_per_s=DISK_BYTES_PER_S),
}


def dataset(folder: Path) -> Path:
    """The shards; made once."""
    from streamload import ShardWriter

    made = folder / f"verdict-{SAMPLES}"
    if not (made / ".streamload").exists():
        shutil.rmtree(made, ignore_errors=True)
        contents = [np.random.default_rng(seed).bytes(SAMPLE_BYTES) for seed in range(50)]
        with ShardWriter(made, max_count=PER_SHARD) as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": f"{number:06d}", "bin": contents[number % 50], "cls": number % 10})
    return made


def measure(name: str, urls: Sequence[str], changes: dict[str, Any], *, warm: bool) -> dict[str, Any]:
    """Make a run in this process.

    Args:
        name: of the scenario.
        urls: where the shards are.
        changes: to the loader's options.
        warm: read all once before.
    """
    from streamload import StreamLoader

    scenario = SCENARIOS[name]
    options = {"decode": {"bin": _as_array, "cls": int}, "shuffle": True, **scenario.options, **changes}
    with StreamLoader(list(urls), BATCH, fields=("bin", "cls"), **options) as loader:
        if warm:
            for _ in loader:
                pass
        before, began_s = loader.statistics(), 0.0
        while True:
            for _ in loader:
                if not began_s:
                    began_s, before = time.perf_counter(), loader.statistics()
                time.sleep(scenario.step_s)
                if time.perf_counter() - began_s > RUN_S:
                    after = loader.statistics().since(before)
                    limit = loader.statistics().limit
                    return {
                        "rate": after.samples / (time.perf_counter() - began_s),
                        "stage": limit.stage,
                        "gain": limit.gain,
                        "workers": limit.workers,
                        "sentence": limit.sentence,
                    }


def _as_array(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


def run(name: str, urls: Sequence[str], changes: dict[str, Any], *, warm: bool = False, slow: bool = False) -> Any:
    """The same in a process of its own."""
    call = json.dumps({"name": name, "urls": list(urls), "changes": changes, "warm": warm})
    with slow_disk(SCENARIOS[name].disk_bytes_per_s if slow else None) as enter:
        ended = subprocess.run(
            [sys.executable, __file__, "--call", call], capture_output=True, text=True, preexec_fn=enter, check=False
        )
    if ended.returncode:
        raise SystemExit(f"{name}: {ended.stderr}")
    return json.loads(ended.stdout)


@contextlib.contextmanager
def slow_disk(bytes_per_s: int | None) -> Iterator[Callable[[], None] | None]:
    """What has a process and its children read no faster from any disk; needs root and cgroup v1."""
    if bytes_per_s is None:
        yield None
        return
    group = _BLKIO / f"streamload-bench-{os.getpid()}"
    group.mkdir()
    try:
        for device in os.listdir("/sys/block"):
            number = Path("/sys/block", device, "dev").read_text().strip()
            with contextlib.suppress(OSError):
                (group / "blkio.throttle.read_bps_device").write_text(f"{number} {bytes_per_s}")
        yield lambda: (group / "tasks").write_text(str(os.getpid())) and None
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def forget(folder: Path) -> None:
    """Have the page cache forget the shards."""
    for path in folder.glob("*.tar"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remedied(name: str, folder: Path, urls: Sequence[str], first: dict[str, Any]) -> dict[str, Any] | None:
    """The run with what the verdict of the first one advises; None where it advises nothing."""
    if first["stage"] in ("network", "latency", "throttling"):
        return run(name, [os.fspath(folder)], {})  # as every epoch from a disk cache
    if first["stage"] == "disk":
        return run(name, urls, {}, warm=True)
    if first["workers"] is not None:
        return run(name, urls, {"num_workers": first["workers"]})
    return None


def one_round(name: str, folder: Path) -> tuple[str, bool, float | None]:
    """A scenario once: the verdict, whether it is right, and the rate after the remedy by what was predicted."""
    scenario = SCENARIOS[name]
    shards = sorted(map(os.fspath, folder.glob("*.tar")))
    if scenario.disk_bytes_per_s is not None:
        forget(folder)
    if scenario.script is None:
        first = run(name, [os.fspath(folder)], {}, slow=True)
        second = remedied(name, folder, [os.fspath(folder)], first)
    else:
        with bucket_of(shards) as bucket:
            bucket.server.play(scenario.script)
            first = run(name, bucket.urls(), {})
            second = remedied(name, folder, bucket.urls(), first)
    reached = None if second is None else second["rate"] / (first["rate"] * first["gain"])
    print(f"  {first['rate']:8,.0f}/s  {first['sentence']}")
    if second is not None:
        print(f"  {second['rate']:8,.0f}/s after it, predicted {first['rate'] * first['gain']:,.0f}: {reached:.2f}")
    return first["stage"], first["stage"] == scenario.stage, reached


def main() -> None:
    """Parse the arguments, run, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        print(json.dumps(measure(**json.loads(arguments.call))))
        return
    folder = dataset(arguments.folder)
    right = within = judged = runs = 0
    for _ in range(arguments.rounds):
        for name in arguments.only:
            if SCENARIOS[name].disk_bytes_per_s is not None and not os.access(_BLKIO, os.W_OK):
                print(f"{name}: not run, since the disk cannot be slowed down here")
                continue
            print(name)
            stage, is_right, reached = one_round(name, folder)
            runs += 1
            right += is_right
            if not is_right:
                print(f"  WRONG: {stage} instead of {SCENARIOS[name].stage}")
            if reached is not None:
                judged += 1
                within += 1 / WITHIN <= reached <= WITHIN
    print(f"right verdicts: {right} of {runs}; remedies within {WITHIN}x of the prediction: {within} of {judged}")
    print(Goal("right verdicts", right / max(1, runs), ">=", 39 / 40).line())
    print(Goal("remedies as predicted", within / max(1, judged), ">=", 1.0).line())


if __name__ == "__main__":
    main()
