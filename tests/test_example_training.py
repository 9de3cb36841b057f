"""Frameworks, distributed checkpoints and ranks under torchrun go on where they stopped, with the rest of the epoch."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launched import Ended, run_python, torchrun
from make_shards import write_numbers
from matrix import exhaustive
from ray_cluster import ray_cluster
from servers.rclone import S3Server

from streamload import ShardWriter, StreamLoader

_EXAMPLES = Path(__file__).parent.parent / "examples"
_WITHOUT_TORCHVISION = """
import importlib.metadata, runpy, sys

try:
    import torchvision
except (ImportError, RuntimeError):
    # Frameworks import it where it is installed, and can do without; one that is of another torch is not to be found.
    installed = importlib.metadata.Distribution.from_name.__func__
    def found(cls, name):
        if name == "torchvision":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(cls, name)
    importlib.metadata.Distribution.from_name = classmethod(found)
    sys.modules["torchvision"] = None
"""
_SEVERAL_RUNS = f"""{_WITHOUT_TORCHVISION}
main = runpy.run_path(sys.argv[1])["main"]
for arguments in sys.argv[2:]:
    print("==", flush=True)
    main(arguments.split())
"""
"""Stops a run and goes on with it, with new objects but in one process, since importing a framework takes seconds."""

pytestmark = pytest.mark.timeout(240)


def runs_of(framework: str, *runs: str) -> list[list[str]]:
    """For each of several runs of an example, one after the other, what it told of its steps."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install streamload[frameworks]")
    name = "hf_trainer" if framework == "transformers" else framework
    ended = run_python("-c", _SEVERAL_RUNS, _EXAMPLES / f"train_{name}.py", *runs)
    assert ended.status == 0, ended.output
    return [re.findall(r"^epoch .*samples .*$", run, re.MULTILINE) for run in ended.output.split("==\n")[1:]]


def check_whole(steps: list[str]) -> None:
    """An undisturbed run: every sample once in each epoch, and each epoch in an order of its own."""
    found = [list(map(int, re.findall(r"\d+", step.partition("samples")[2]))) for step in steps]
    epochs = [sum(found[start : start + 5], []) for start in range(0, 15, 5)]
    assert len(found) == 15
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(("framework", "kept"), [("lightning", 6), ("accelerate", 6), ("transformers", 7)])
def test_a_run_goes_on_with_the_rest_of_the_epoch(framework: str, kept: int, tmp_path: Path) -> None:
    steps = [
        f"{tmp_path}/stopped --checkpoint-every 5 --stop-behind-step 5",  # behind the last batch of an epoch
        f"{tmp_path}/stopped --checkpoint-every 3 --stop-behind-step 7",  # within one
    ]
    if framework == "lightning":  # which does not load the loader's state from checkpoints between two epochs
        steps.append(f"{tmp_path}/stopped --checkpoint-every 0 --stop-behind-step 10")
    whole, first, second, *others = runs_of(framework, f"{tmp_path}/whole", *steps, f"{tmp_path}/stopped")
    check_whole(whole)
    assert first == whole[:5]
    assert second == whole[5:7]
    assert sum(others, []) == whole[kept:]
    assert len(others[-1]) == (5 if framework == "lightning" else 15 - kept)


@pytest.mark.parametrize(
    ("sampling", "workers"),
    [({"epoch_size": 16}, 1), ({"sampler": [5, 3, 1, 2]}, 0), exhaustive(({"epoch_size": 16}, 0))],
)
def test_an_epoch_that_is_set_behind_the_iterator_counts(tmp_path: Path, workers: int, sampling: Any) -> None:
    """As Lightning does it: a state is loaded, an iterator is made, and only then the epoch is told."""
    shards = write_numbers(tmp_path / "shards", [10, 10])
    options = {"fields": ("cls",), "num_workers": workers, "shuffle": "epoch_size" in sampling, **sampling}
    with StreamLoader(shards, 2, **options) as plain:
        whole = [[batch[0].tolist() for batch in plain] for _ in range(3)]
    end = 2 * len(whole[0])
    with StreamLoader(shards, 2, **options) as loader:
        state = loader.state_dict()
        for position, epoch, left in ((2, 0, whole[0][1:]), (end, 1, whole[1]), (0, 2, whole[2]), (0, 0, whole[0])):
            loader.load_state_dict({**state, "position": position})
            iterator = iter(loader)
            loader.batch_sampler.sampler.set_epoch(epoch)
            assert [batch[0].tolist() for batch in iterator] == left
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (epoch + 1, 0)


def test_a_resumed_pass_that_has_no_batch_says_so(tmp_path: Path) -> None:
    with StreamLoader(write_numbers(tmp_path, [10]), 5, fields=("cls",), num_workers=0) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        loader.load_state_dict(loader.state_dict())
        said = r"no batch.*last batch of epoch 0.*set_epoch\(1\)"
        with pytest.warns(UserWarning, match=said) as warned:
            assert list(loader) == []
        assert [warning.filename for warning in warned] == [__file__]
        assert len(list(loader)) == 2


# -- checkpoints of Ray Train and torch.distributed ------------------------------------------------------------------


def seen(run: Path, ranks: int) -> dict[tuple[int, int], list[int]]:
    """The samples of all ranks, rank after rank, by epoch and step."""
    of_ranks = []
    for rank in range(ranks):
        lines = map(json.loads, (run / f"rank{rank}of{ranks}.jsonl").read_text().splitlines())
        of_ranks.append({(line["epoch"], line["step"]): line["samples"] for line in lines})
    assert all(each.keys() == of_ranks[0].keys() for each in of_ranks)
    return {step: list(chain.from_iterable(each[step] for each in of_ranks)) for step in of_ranks[0]}


def undisturbed(run: Path, batch_size: int, lanes: int) -> dict[tuple[int, int], list[int]]:
    """The global batches of two epochs on one rank."""
    found = {}
    with StreamLoader(
        run / "shards", batch_size, shuffle=True, fields=("cls",), lanes=lanes, num_workers=0, rank=0, world_size=1
    ) as loader:
        for epoch in range(2):
            for (labels,) in loader:
                found[epoch, len(found) + 1] = labels.tolist()
    return found


def check(run: Path, batch_size: int, before: int, after: int, stopped: int) -> None:
    """Two runs of so many ranks, of which the first stopped behind a step, are one."""
    first, rest = seen(run, before), seen(run, after)
    assert [step for _, step in first] == list(range(1, stopped + 1))
    whole = undisturbed(run, batch_size, lanes=before)
    assert [step for _, step in rest] == list(range(stopped + 1, len(whole) + 1))
    assert first | rest == whole
    assert stopped % (len(whole) // 2), "it stopped within an epoch"


@pytest.mark.exhaustive
def test_a_distributed_checkpoint_of_two_ranks_is_loaded_by_three(tmp_path: Path) -> None:
    example = _EXAMPLES / "checkpoint_dcp.py"
    for ranks, more in ((2, ["--stop-behind-step", "3"]), (3, ["--num-workers", "1"])):
        ended = torchrun(ranks, example, tmp_path, *more)
        assert ended.status == 0, ended.output
    check(tmp_path, 12, 2, 3, stopped=3)


@pytest.mark.exhaustive
def test_ray_train_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'streamload[ray]'")
    if " " in sys.executable:
        pytest.skip("Ray Train's workers start Python through a shell that does not quote its path")
    example = _EXAMPLES / "train_ray.py"
    with ray_cluster({"a": 2}) as cluster:
        for ranks, more in ((2, ["--stop-behind-step", "4"]), (1, ["--num-workers", "1"])):
            environment = {"RAY_ADDRESS": cluster.address}
            ended = run_python(example, tmp_path, "--ray-workers", str(ranks), *more, environment=environment)
            assert ended.status == 0, ended.output
    check(tmp_path, 8, 2, 1, stopped=4)


# -- ranks as real processes under torchrun --------------------------------------------------------------------------

_RECORDER = Path(__file__).parent / "support" / "rank_recorder.py"
_WINDOW = 40


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
    ended = torchrun(1, _EXAMPLES / "train_ddp.py", tmp_path / "run", tmp_path / "shards", *options, "--epochs", "1")
    assert ended.status == 0, ended.output
    assert told(ended) == {("rank 0 of 1", "epoch 0", "8 steps", "96 samples")}

    options += ["--endpoint", rclone_s3.endpoint, "--cache-dir", str(tmp_path / "cache")]
    keys = {"AWS_ACCESS_KEY_ID": "access-key", "AWS_SECRET_ACCESS_KEY": "secret-key"}
    ended = torchrun(
        2, _EXAMPLES / "train_ddp.py", tmp_path / "run", "s3://images", *options, "--epochs", "2", environment=keys
    )
    assert ended.status == 0, ended.output
    assert "going on behind step 5" in ended.output
    rest = {(f"rank {rank} of 2", "epoch 0", "3 steps", "18 samples") for rank in range(2)}
    assert told(ended) == rest | {(f"rank {rank} of 2", "epoch 1", "8 steps", "48 samples") for rank in range(2)}
