"""The first pass over a bucket, from the constructor on: with an index and without, all bytes and a small field.

Memory has been touched before each run, as on a machine that is in use; what it costs else is a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from goals import Goal
from remote_bucket import FAR_AWAY, Bucket, bucket_of
from remote_lit import lit_files
from remote_parts import Sizes, in_turn, median, ratio
from remote_reading import Question
from tables import table

__all__ = ["measure_first_pass"]

_CEILING = "obstore, 32 connections"
_TO_MEMORY = "obstore, 32 connections, to shared memory"
_UNTOUCHED = "all image bytes, without, memory not touched before"
_LEAST_SHARE = 0.80
_LEAST_OF_INDEXED = 0.9
_MOST_PROCESSOR_TIME = 2.0


def _questions(bucket: Bucket) -> Mapping[str, Question]:
    """Readers by name. The ceiling reads all bytes and keeps nothing."""
    raw = Question("streamload", bucket.urls(), bucket.shard_bytes, touched=True)
    unindexed = bucket.urls(indexed=False)
    endpoint = {"endpoint_url": bucket.server.url, "aws_access_key_id": "any", "aws_secret_access_key": "any"}
    return {
        _CEILING: replace(raw, reader="obstore", connections=32),
        _TO_MEMORY: replace(raw, reader="obstore to shared memory", connections=32),
        "all image bytes, with an index": raw,
        "all image bytes, without": replace(raw, urls=unindexed),
        _UNTOUCHED: replace(raw, urls=unindexed, touched=False),
        "a small field, with an index": replace(raw, fields=("cls",)),
        "a small field, without": replace(raw, fields=("cls",), urls=unindexed),
        "WebDataset, all image bytes": replace(raw, reader="WebDataset"),
        "LitData, its own format": replace(raw, reader="LitData", urls=["s3://lit/data/"], storage_options=endpoint),
    }


def measure_first_pass(sizes: Sizes) -> tuple[str, list[Goal]]:
    """Shares of what bare obstore gets from the same server in the same round."""
    copies = sizes.sustained_copies
    with TemporaryDirectory(prefix="streamload-bench-") as folder:
        lit = lit_files(sizes.shards_of_images, copies, Path(folder))
    number = copies * len(sizes.shards_of_images)
    with bucket_of(sizes.shards_of_images, number, others=lit.files, aliases=lit.aliases) as bucket:
        questions = _questions(bucket)
        runs = in_turn(bucket, FAR_AWAY, dict(questions), sizes.rounds)
        data = f"{bucket.total_bytes / 1e6:,.0f} MB"
    rows, goals = [], []
    for name in questions:
        share = ratio(runs, name, _CEILING, "whole_rate")
        rate, first_s = median(runs, name, "whole_rate"), median(runs, name, "first_s")
        if share is None or rate is None or first_s is None:
            continue
        used = f"{median(runs, name, 'processor_s'):.1f}", f"{ratio(runs, name, _TO_MEMORY, 'processor_s'):.1f}"
        rows.append([name, data, f"{rate:,.0f}", f"{share:.2f}", f"{first_s:.2f}", *used])
        if questions[name].reader == "streamload" and name != _UNTOUCHED:
            goals.append(Goal(f"first pass, {name}, of bare obstore", share, ">=", _LEAST_SHARE))
    for read in ("all image bytes", "a small field"):
        share = ratio(runs, f"{read}, without", f"{read}, with an index", "whole_rate")
        goals.append(Goal(f"first pass, {read}, without an index to with one", share, ">=", _LEAST_OF_INDEXED))
    processor = ratio(runs, "all image bytes, with an index", _TO_MEMORY, "processor_s")
    goals.append(Goal("first pass, processor time, of obstore to shared memory", processor, "<=", _MOST_PROCESSOR_TIME))
    header = ["read", "shards' bytes", "MB/s from the constructor on", "of bare obstore", "first batch, s"]
    return table([*header, "processor time, s", "of obstore to shared memory"], rows), goals
