"""Ray Train and torch.distributed.checkpoint: saved in the middle of an epoch, loaded by another number of ranks."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from launched import run_python, torchrun
from ray_cluster import ray_cluster

from streamload import StreamLoader

_EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = pytest.mark.timeout(240)


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
