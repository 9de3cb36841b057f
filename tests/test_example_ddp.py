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
from transforms import is_bad

from streamload import ShardWriter, StreamLoader

_RECORDER = Path(__file__).with_name("rank_recorder.py")
_EXAMPLE = Path(__file__).parent.parent / "examples" / "train_ddp.py"
_WINDOW = 40
_UNEVEN = [200, 1, 7, 0, 90, 2]
pytestmark = pytest.mark.timeout(240)  # every rank imports torch first


def run(folder: Path, shards: str, ranks: int, batch_size: int, *more: str, **options: Any) -> Ended:
    """The recorder on so many ranks; it goes on from the state in its folder, if there is one."""
    folder.mkdir(exist_ok=True)
    text = json.dumps({"shuffle": _WINDOW, "num_workers": 1, **options})
    arguments = [folder, shards, text, "--global-batch-size", str(batch_size), *more]
    return torchrun(ranks, _RECORDER, *arguments)


def recorded(folder: Path, ranks: int) -> list[tuple[int, list[int]]]:
    """What was recorded: the position behind each step, and the samples of all ranks, one rank after the other."""
    found = []
    for rank in range(ranks):
        lines = (folder / f"rank{rank}of{ranks}.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    assert len({len(steps) for steps in found}) == 1, "the ranks took different numbers of steps"
    together = []
    for steps in zip(*found, strict=True):
        assert len({end for end, _ in steps}) == 1, "the ranks' states differ"
        assert len({len(samples) for _, samples in steps}) == 1, "the ranks' batches differ in size"
        together.append((steps[0][0], [sample for _, samples in steps for sample in samples]))
    return together


def undisturbed(
    shards: str, batch_size: int, lanes: int, state: dict[str, Any] | None = None
) -> list[tuple[int, list[int]]]:
    """The same on one rank that is not disturbed, from a state on."""
    with StreamLoader(shards, batch_size, shuffle=_WINDOW, fields=("cls",), lanes=lanes, num_workers=0) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [(int(loader.state_dict()["position"]), labels.tolist()) for (labels,) in loader]


def test_a_killed_rank_and_a_restart_on_one_without_torchrun(tmp_path: Path) -> None:
    shards = write_numbers(tmp_path / "shards", _UNEVEN)
    whole = undisturbed(shards, 24, lanes=2)
    folder = tmp_path / "killed"
    ended = run(folder, shards, 2, 24, "--kill-rank", "1", "--kill-at-step", "7")
    assert ended.status != 0, ended.output
    assert "SIGKILL" in ended.output
    own = (folder / "rank1of2.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in own] == [[end, samples[12:]] for end, samples in whole[:7]]
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    assert state["position"] == 6 * 24
    assert undisturbed(shards, 24, lanes=2, state=state) == whole[6:]


@pytest.mark.exhaustive
def test_ranks_keep_step_where_three_samples_in_ten_fail(tmp_path: Path) -> None:
    """Many batches of one sample have none left, on each rank others; a rank with a step less would hang the others.

    That each rank takes as many steps as it has batches is tested always, in `test_loader_filling.py`.
    """
    shards = write_numbers(tmp_path / "shards", [40, 1, 7, 0, 13, 2])
    ended = run(tmp_path / "run", shards, 3, 3, "--raise-on-bad", on_error="skip")
    assert ended.status == 0, ended.output
    found = recorded(tmp_path / "run", 3)
    assert [end for end, _ in found] == list(range(3, 64, 3))
    came = [sample for _, samples in found for sample in samples]
    assert set(came) == {sample for sample in range(63) if not is_bad(sample)}
    assert len(came) > len(set(came)) + 10


def write_images(folder: Path, counts: list[int]) -> None:
    """Images of one colour, whose label says which."""
    for shard, count in enumerate(counts):
        with ShardWriter(folder / f"part{shard}-%06d.tar") as writer:
            for number in range(count):
                image = np.full((24, 24, 3), 25 * (number % 10), np.uint8)
                writer.write({"__key__": f"{shard}-{number:04d}", "png": image, "cls": number % 10})


@pytest.mark.exhaustive
def test_the_example_trains_and_goes_on_elsewhere_on_more_ranks(tmp_path: Path, rclone_s3: S3Server) -> None:
    write_images(tmp_path / "shards", [70, 1, 0, 25])
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


def told(ended: Ended) -> set[tuple[str, ...]]:
    """What the example said of each rank and epoch: the rank, the epoch, its steps and its samples."""
    return set(re.findall(r"(rank \d of \d): (epoch \d+): (\d+ steps), (\d+ samples)", ended.output))
