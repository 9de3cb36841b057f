"""Lightning, Accelerate and the Hugging Face Trainer go on where they stopped, with exactly the rest of the epoch."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import run_python
from make_shards import write_numbers

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

_RESUMED = f"""{_WITHOUT_TORCHVISION}
loader_of = runpy.run_path(sys.argv[1])["LightningLoader"]
for behind in (4, 12, 13):
    loader = loader_of(sys.argv[2], batch_size=8, epoch_size=100, fields=("cls",), num_workers=0)
    state = loader.state_dict()
    loader.load_state_dict(dict(state, position=min(8 * behind, 100)))
    print(behind, loader.state_dict()["epoch"], sum(1 for _ in loader), flush=True)
"""

_STEPS_OF_AN_EPOCH = 5
_EPOCHS = 3

pytestmark = pytest.mark.timeout(240)


def runs_of(framework: str, *runs: str) -> list[list[str]]:
    """For each of several runs of an example, one after the other, what it told of its steps."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install streamload[frameworks]")
    name = "hf_trainer" if framework == "transformers" else framework
    ended = run_python("-c", _SEVERAL_RUNS, _EXAMPLES / f"train_{name}.py", *runs)
    assert ended.status == 0, ended.output
    return [re.findall(r"^epoch .*samples .*$", run, re.MULTILINE) for run in ended.output.split("==\n")[1:]]


def samples(steps: list[str]) -> list[list[int]]:
    """The samples of each step."""
    return [[int(number) for number in re.findall(r"\d+", step.partition("samples")[2])] for step in steps]


def check_whole(steps: list[str]) -> None:
    """An undisturbed run: every sample once in each epoch, and each epoch in an order of its own."""
    found = samples(steps)
    epochs = [sum(found[start : start + _STEPS_OF_AN_EPOCH], []) for start in range(0, len(found), _STEPS_OF_AN_EPOCH)]
    assert len(epochs) == _EPOCHS
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == _EPOCHS


@pytest.mark.parametrize(
    ("framework", "kept"),
    [("lightning", 6), ("accelerate", 6), ("transformers", 7)],  # the Trainer saves where max_steps stops it, too
)
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


def test_lightnings_loader_knows_the_end_of_an_epoch_that_is_not_the_datasets(tmp_path: Path) -> None:
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed: pip install streamload[frameworks]")
    shards = write_numbers(tmp_path / "shards", [25, 25])
    ended = run_python("-c", _RESUMED, _EXAMPLES / "train_lightning.py", shards)
    assert ended.status == 0, ended.output
    assert ended.output.split("\n")[-4:-1] == ["4 0 9", "12 0 1", "13 1 13"]


def test_the_page_shows_what_the_examples_do() -> None:
    page = (_EXAMPLES.parent / "docs" / "frameworks.md").read_text()
    sources = [stripped(path.read_text()) for path in [*_EXAMPLES.glob("*.py"), *_EXAMPLES.glob("*/*.py")]]
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    for block in blocks:
        assert any(stripped(block) in source for source in sources), block


def stripped(code: str) -> str:
    """Code without its indentation."""
    return "\n".join(line.strip() for line in code.strip().splitlines())
