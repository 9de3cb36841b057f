"""Ranks as real processes under torchrun: each sample once, equal steps, and exact resuming at another world size."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launched import Ended, torchrun
from make_shards import write_numbers
from servers.rclone import S3Server

from streamload import ShardWriter, StreamLoader

_RECORDER = Path(__file__).parent / "support" / "rank_recorder.py"
_EXAMPLE = Path(__file__).parent.parent / "examples" / "train_ddp.py"
_WINDOW = 40
pytestmark = pytest.mark.timeout(240)  # every rank imports torch first


def rest_of_the_epoch(shards: str, state: dict[str, Any] | None = None) -> list[tuple[int, list[int]]]:
    """The position behind each step, and its samples, on one rank that is not disturbed."""
    with StreamLoader(shards, 24, shuffle=_WINDOW, fields=("cls",), lanes=2, num_workers=0) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [(int(loader.state_dict()["position"]), labels.tolist()) for (labels,) in loader]


def test_a_killed_rank_and_a_restart_on_one_without_torchrun(tmp_path: Path) -> None:
    shards = write_numbers(tmp_path / "shards", [200, 1, 7, 0, 90, 2])
    whole = rest_of_the_epoch(shards)
    ended = torchrun(2, _RECORDER, tmp_path, shards, "12", str(_WINDOW), "7")
    assert ended.status != 0, ended.output
    assert "SIGKILL" in ended.output
    own = (tmp_path / "rank1.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in own] == [[end, samples[12:]] for end, samples in whole[:7]]
    state: dict[str, Any] = json.loads((tmp_path / "state.json").read_text())
    assert state["position"] == 6 * 24
    assert rest_of_the_epoch(shards, state) == whole[6:]


@pytest.mark.exhaustive
def test_the_example_trains_and_goes_on_elsewhere_on_more_ranks(tmp_path: Path, rclone_s3: S3Server) -> None:
    def told(ended: Ended) -> set[tuple[str, ...]]:
        """What the example said of each rank and epoch: the rank, the epoch, its steps and its samples."""
        return set(re.findall(r"(rank \d of \d): (epoch \d+): (\d+ steps), (\d+ samples)", ended.output))

    for shard, count in enumerate([70, 1, 0, 25]):
        with ShardWriter(tmp_path / "shards" / f"part{shard}-%06d.tar") as writer:
            for number in range(count):  # images of one colour, whose label says which
                image = np.full((24, 24, 3), 25 * (number % 10), np.uint8)
                writer.write({"__key__": f"{shard}-{number:04d}", "png": image, "cls": number % 10})
    shutil.copytree(tmp_path / "shards", rclone_s3.folder / "images")
    options = ["--global-batch-size", "12", "--checkpoint-every", "5", "--num-workers", "1"]
    ended = torchrun(1, _EXAMPLE, tmp_path / "run", tmp_path / "shards", *options, "--epochs", "1")
    assert ended.status == 0, ended.output
    assert told(ended) == {("rank 0 of 1", "epoch 0", "8 steps", "96 samples")}

    options += ["--endpoint", rclone_s3.endpoint, "--cache-dir", str(tmp_path / "cache")]
    keys = {"AWS_ACCESS_KEY_ID": "access-key", "AWS_SECRET_ACCESS_KEY": "secret-key"}
    ended = torchrun(2, _EXAMPLE, tmp_path / "run", "s3://images", *options, "--epochs", "2", environment=keys)
    assert ended.status == 0, ended.output
    assert "going on behind step 5" in ended.output
    rest = {(f"rank {rank} of 2", "epoch 0", "3 steps", "18 samples") for rank in range(2)}
    assert told(ended) == rest | {(f"rank {rank} of 2", "epoch 1", "8 steps", "48 samples") for rank in range(2)}
