"""The parts of the remote benchmark that read images: throughput, the first batch, and what a busy trainer costs."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from goals import Goal
from remote_bucket import FAR_AWAY, NO_LIMIT, THIN, Bucket, Script, Traffic, bucket_of, random_shards, traffic
from remote_reading import Question
from running import RunFailedError, run_command
from tables import table
from touched_memory import touch_memory

PROGRAM = Path(__file__).with_name("remote_reading.py")
TOUCHED_TIMES, TOUCHED_BYTES = 1.1, 2e9
UNTOUCHED_S = 20.0
"""Long enough for a host to take back what was free."""
LONGEST_RUN_S = 180.0
SETTLED_BUDGET = "1GB"
"""Half of the many images, so that each pass fetches nearly all of them."""
SERVERS = {"far": FAR_AWAY, "near": NO_LIMIT}
ROUND_TRIP_S = FAR_AWAY.first_byte_s


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        shards_of_images: the real shards.
        rounds: runs of each reader.
        sustained_copies: how often a long pass has all images.
        copies: the same beside a busy trainer.
        shards: in the long list for the first batch.
        budget_bytes: for `memory_budget`; the data are 20 times that.
        sleep_s: how long a consumer sleeps.
    """

    shards_of_images: Sequence[str] = ()
    rounds: int = 3
    sustained_copies: int = 10
    copies: int = 10
    shards: int = 10_000
    budget_bytes: int = 512 << 20
    sleep_s: float = 30.0

    def of(self, shards: Sequence[str]) -> Sizes:
        """The same with these shards."""
        return replace(self, shards_of_images=shards)


@dataclass(frozen=True)
class Run:
    """A run's result.

    Attributes:
        rate: MB of the files' bytes a second over the pass; 0 where they were decoded.
        whole_rate: MB of the shards a second, from the constructor to the end of the pass.
        images: read in a second, where they were decoded.
        first_s: from the constructor to the first batch.
        requests_before: that the server got until then.
        cpu: of a core that the reader's own process used.
        processor_s: of all processes of the reader, from their start on.
        seen: by the server.
    """

    rate: float
    whole_rate: float
    images: float
    first_s: float
    requests_before: int
    cpu: float
    processor_s: float
    seen: Traffic


def run(bucket: Bucket, script: Script, question: Question) -> Run:
    """Ask one question of a server that behaves so.

    Raises:
        RunFailedError: the run failed.
    """
    if question.touched:
        touch_memory(TOUCHED_TIMES * bucket.total_bytes + TOUCHED_BYTES)
    elif question.touched is False:
        time.sleep(UNTOUCHED_S)
    bucket.server.play(script)
    found = run_command([sys.executable, str(PROGRAM), question.argument()], LONGEST_RUN_S)
    report = bucket.server.report()
    per_s = found["values"] / (found["ended_s"] - found["pass_s"])
    return Run(
        rate=per_s / 1e6 if question.raw else 0.0,
        whole_rate=bucket.total_bytes / (found["ended_s"] - found["began_s"]) / 1e6,
        images=0.0 if question.raw else per_s,
        first_s=found["first_s"] - found["began_s"],
        requests_before=sum(began_s < found["first_s"] for _, began_s, _ in report.spans),
        cpu=found["cpu"],
        processor_s=found["processor_s"],
        seen=traffic(report, script),
    )


Runs = dict[str, list[Run]]


def in_turn(bucket: Bucket, script: Script, questions: dict[str, Question], rounds: int) -> Runs:
    """Ask several questions in turn; those whose run fails are left out."""
    runs: Runs = {name: [] for name in questions}
    for _ in range(rounds):
        for name, question in questions.items():
            try:
                runs[name].append(run(bucket, script, question))
            except RunFailedError as error:
                print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    return {name: found for name, found in runs.items() if found}


def median(runs: Runs, name: str, value: str) -> float | None:
    """The median over rounds of one value, which may be one of what the server saw."""
    found = [_value(each, value) for each in runs.get(name, ())]
    return statistics.median(found) if found else None


def ratio(runs: Runs, one: str, other: str, value: str) -> float | None:
    """The median over rounds of the quotient of two readers."""
    pairs = list(zip(runs.get(one, ()), runs.get(other, ()), strict=False))
    return statistics.median(_value(a, value) / _value(b, value) for a, b in pairs) if pairs else None


def _value(of: Run, name: str) -> float:
    found: float = getattr(of, name) if hasattr(of, name) else getattr(of.seen, name)
    return found


def _rows(server: str, data: str, runs: Runs) -> list[list[str]]:
    rows = []
    for name in runs:
        rate, images = median(runs, name, "rate"), median(runs, name, "images")
        amount = f"{rate:,.0f} MB/s" if rate else f"{images:,.0f} images/s"
        limited = SERVERS[server].bytes_per_s is not None
        shares = [f"{_seen(runs, name, which):.2f}" if limited else "-" for which in ("share_of_most", "share")]
        seen = [f"{_seen(runs, name, 'rate'):,.0f}", f"{median(runs, name, 'most_connections'):.0f}"]
        mean = f"{_seen(runs, name, 'connections'):.1f}"
        seen += [shares[0], mean, shares[1], f"{median(runs, name, 'cpu'):.1%}"]
        rows.append([server, data, name, amount, *seen])
    return rows


def _seen(runs: Runs, name: str, value: str) -> float:
    return statistics.median(getattr(each.seen, value) for each in runs[name])


def measure_throughput(sizes: Sizes) -> tuple[str, list[Goal]]:
    """All readers on the images once, and those that are fast enough on many of them."""
    rows, goals = [], []
    for copies in (1, sizes.sustained_copies):
        with bucket_of(sizes.shards_of_images, copies * len(sizes.shards_of_images)) as bucket:
            data = f"{bucket.total_bytes / 1e6:,.0f} MB"
            raw = Question("", bucket.urls(), bucket.shard_bytes, touched=True)
            questions = {
                "streamload": replace(raw, reader="streamload"),
                "streamload, shuffled": replace(raw, reader="streamload", shuffle=True),
                "streamload, untouched memory": replace(raw, reader="streamload", touched=False),
                "obstore, 16 connections": replace(raw, reader="obstore", connections=16),
                "obstore, 32 connections": replace(raw, reader="obstore", connections=32),
                "fsspec, 32 connections": replace(raw, reader="fsspec", connections=32),
            }
            if copies > 1:
                settled = replace(raw, reader="streamload", memory_budget=SETTLED_BUDGET, passes_before=1)
                questions["streamload, second pass"] = settled
                questions["streamload, second pass, shuffled"] = replace(settled, shuffle=True)
            else:
                questions["WebDataset"] = replace(raw, reader="WebDataset")
                questions["streamload, decoding"] = replace(raw, reader="streamload", raw=False)
                questions["WebDataset, decoding"] = replace(raw, reader="WebDataset", raw=False)
            for server, script in SERVERS.items():
                runs = in_turn(bucket, script, questions, sizes.rounds)
                rows += _rows(server, data, runs)
                if server == "far":
                    goals += _throughput_goals(data, runs)
    header = ["server", "data", "reader", "whole pass", "server sent, MB/s", "connections, most", "of what these carry"]
    return table([*header, "in use, mean", "of what these carry", "reader's process, of a core"], rows), goals


def _throughput_goals(data: str, runs: Runs) -> list[Goal]:
    goals = [
        Goal(f"far, {data}, of what the connections in use carry", median(runs, "streamload", "share"), ">=", 0.85),
        Goal(f"far, {data}, MB/s", median(runs, "streamload", "rate"), ">=", 400),
    ]
    if "WebDataset" in runs:
        goals.append(Goal(f"far, {data}, times WebDataset", ratio(runs, "streamload", "WebDataset", "rate"), ">=", 5))
    if "streamload, second pass" in runs:
        goals.append(
            Goal(f"far, {data}, second pass, MB/s", median(runs, "streamload, second pass", "rate"), ">=", 400)
        )
    return goals


def measure_first_batch(sizes: Sizes) -> tuple[str, list[Goal]]:
    """How soon the first batch comes from a far server, with few and with many shards in the list."""
    rows, goals = [], []
    with random_shards(10, 400, 1000) as shards:
        for number in (10, sizes.shards):
            with bucket_of(shards, number) as bucket:
                ask = Question("streamload", bucket.pattern(), (), batches=1)
                questions = {"as listed": ask, "shuffled": replace(ask, shuffle=True)}
                runs = in_turn(bucket, FAR_AWAY, questions, sizes.rounds)
            for name in runs:
                late_s = (median(runs, name, "first_s") or 0.0) - 2 * ROUND_TRIP_S
                requests = median(runs, name, "requests_before")
                rows.append([f"{number:,}", name, f"{late_s:.2f}", f"{requests:.0f}"])
                goals.append(Goal(f"{number:,} shards, {name}: first batch, s + 2 round trips", late_s, "<=", 1.0))
    return table(["shards", "order", "first batch less 2 round trips, s", "requests until then"], rows), goals


def measure_gil(sizes: Sizes) -> tuple[str, list[Goal]]:
    """The rate of fetching beside a trainer that runs pure Python all the time.

    Where the server is near, fetching takes all processors there are, and the trainer takes one of them, GIL or no GIL.
    Over thin connections it needs a part of one, so that only the GIL could be in the way.
    """
    rows, goals = [], []
    for server, script, copies in (("near", NO_LIMIT, sizes.copies), ("thin", THIN, max(1, sizes.copies // 3))):
        with bucket_of(sizes.shards_of_images, copies * len(sizes.shards_of_images)) as bucket:
            http = Question("streamload", bucket.pattern(), (), touched=True)
            endpoint = {"anon": True, "endpoint_url": bucket.server.url}
            kinds = {
                "obstore, http": http,
                "obstore, s3": replace(http, urls=bucket.pattern("s3"), storage_options=endpoint),
                "fsspec, http": replace(http, fsspec=True),
            }
            for kind, question in kinds.items():
                questions = {trainer: replace(question, trainer=trainer) for trainer in ("idle", "neighbour", "busy")}
                runs = in_turn(bucket, script, questions, sizes.rounds)
                if len(runs) == len(questions):
                    rows.append(_gil_row(server, kind, runs))
                    goals += _gil_goals(f"{server}, {kind}", runs)
    header = ["server", "read with", "idle, MB/s", "idle beside a busy process", "busy trainer", "busy / idle"]
    return table([*header, "busy / busy process", "idle trainer's process, of a core"], rows), goals


def _gil_row(server: str, kind: str, runs: Runs) -> list[str]:
    rates = [f"{_seen(runs, trainer, 'rate'):,.0f}" for trainer in runs]
    shares = [f"{_fetch_ratio(runs, other):.2f}" for other in ("idle", "neighbour")]
    return [server, kind, *rates, *shares, f"{median(runs, 'idle', 'cpu'):.1%}"]


def _gil_goals(kind: str, runs: Runs) -> list[Goal]:
    per_500 = (median(runs, "idle", "cpu") or 0.0) * 500 / (median(runs, "idle", "rate") or 1.0)
    return [
        Goal(f"{kind}: fetching beside a busy trainer, of idle", _fetch_ratio(runs, "idle"), ">=", 0.9),
        Goal(f"{kind}: the same, of an idle one beside a busy process", _fetch_ratio(runs, "neighbour"), ">=", 0.9),
        Goal(f"{kind}: trainer's process, of a core, at 500 MB/s", per_500, "<", 0.05),
    ]


def _fetch_ratio(runs: Runs, other: str) -> float:
    pairs = zip(runs["busy"], runs[other], strict=False)
    return statistics.median(busy.seen.rate / beside.seen.rate for busy, beside in pairs)
