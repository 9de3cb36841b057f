"""Lightning, Accelerate and the Hugging Face Trainer go on where they stopped, with exactly the rest of the epoch."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import run_python

_EXAMPLES = Path(__file__).parent.parent / "examples"
_SEVERAL_RUNS = """
import runpy, sys
main = runpy.run_path(sys.argv[1])["main"]
for arguments in sys.argv[2:]:
    print("==", flush=True)
    main(arguments.split())
"""
"""A run in the middle of an epoch is stopped and gone on with, with new objects in one process: imports are slow."""

_STEPS_OF_AN_EPOCH = 5
_EPOCHS = 3

pytestmark = pytest.mark.timeout(240)


def runs_of(framework: str, *runs: str) -> list[list[str]]:
    """For each of several runs of an example, one after the other, what it told of its steps."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install streamload[frameworks]")
    name = "hf_trainer" if framework == "transformers" else framework
    ended = run_python("-c", _SEVERAL_RUNS, _EXAMPLES / f"train_{name}.py", *runs)
    if "operator torchvision::nms does not exist" in ended.output:
        pytest.skip("the torchvision that is installed is of another torch, and cannot be imported")
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
    runs = [
        f"{tmp_path}/whole",
        f"{tmp_path}/within --checkpoint-every 3 --stop-behind-step 7",
        f"{tmp_path}/within",
        f"{tmp_path}/last --checkpoint-every 5 --stop-behind-step 5",
        f"{tmp_path}/last",
    ]
    if framework == "lightning":  # which does not load the loader's state from checkpoints between two epochs
        runs += [f"{tmp_path}/between --checkpoint-every 0 --stop-behind-step 10", f"{tmp_path}/between"]
    whole, stopped, rest, *others = runs_of(framework, *runs)
    check_whole(whole)
    assert stopped == whole[:7]
    assert rest == whole[kept:]
    for first, second in zip(others[::2], others[1::2], strict=True):
        assert first + second == whole


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
