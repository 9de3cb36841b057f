"""Lightning, Accelerate and the Hugging Face Trainer go on where they stopped, with exactly the rest of the epoch."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from launched import run_python
from make_shards import write_numbers
from matrix import exhaustive

from streamload import StreamLoader

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
